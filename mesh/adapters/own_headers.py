"""Headers that say what to do: each is said once, and spelled as it is known.

RFC 9110 (section 5.3) lets whoever passes a request on join the lines of a repeated header with a
comma. So two lines of labels may arrive as two or as one list, and in a list labels are
alternatives: a request that was to meet both would go where one holds. Of two keys or two
priorities one would be dropped. And a misspelt header would be no header at all: a prompt that
was to stay in a region would go anywhere. All of that is 400, before anything is read or placed.
Separators count as spelling: proxies and CGI turn hyphens into underscores and back.

Rejected: meeting the labels of all lines (right only where no proxy joins them, and who sent the
request can't know that).
"""

import re

from aiohttp import web

from mesh.adapters.problem import Problem
from schemas.http import H_DECISION, H_REGION, OWN_PREFIX, SAID_ONCE, Fault
from schemas.near_words import did_you_mean

_KNOWN = tuple(name for name in SAID_ONCE if name.startswith(OWN_PREFIX))
_OF_ANSWERS = frozenset({H_REGION, H_DECISION})
_perhaps_own = re.compile(r"x?[^a-z0-9]*mesh", re.IGNORECASE).match  # for every header: cheap
_OWN = re.compile(r"x[^a-z0-9]*mesh[^a-z0-9]+(.*)")
_SEPARATORS = re.compile(r"[^a-z0-9]+")


def refuse_misread(request: web.BaseRequest) -> None:
    """Raises Problem for the first header that is given twice, or that nobody here knows."""
    for given in request.headers:
        if _perhaps_own(given) and (meant := _meant(name := given.lower())) is not None:
            raise Problem(Fault.INVALID, _unknown(name, meant), name)
    for name in SAID_ONCE:
        times = len(request.headers.getall(name, ()))
        if times > 1:
            message = f"{name} is given {times} times; give it once"
            raise Problem(Fault.INVALID, message, name)


def _meant(name: str) -> str | None:
    """The header of ours that this unknown name looks like, whatever its separators; else None."""
    if name in _KNOWN:
        return None
    if (own := _OWN.match(name)) is not None:
        return OWN_PREFIX + _SEPARATORS.sub("-", own[1]).strip("-")
    squeezed = "x" + _SEPARATORS.sub("", name).removeprefix("x")
    return next((known for known in _KNOWN if known.replace("-", "") == squeezed), None)


def _unknown(name: str, meant: str) -> str:
    if name in _OF_ANSWERS:
        return f"{name} is a header of answers; leave it out"
    return f"unknown header {name:.60}{did_you_mean(meant, _KNOWN, prefix=OWN_PREFIX)}"
