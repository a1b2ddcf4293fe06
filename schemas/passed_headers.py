"""Which headers of an engine's answer reach the client, in which bounds.

Engines and what runs before them tell harmless things in headers: times, limits, names of theirs.
Only names that are listed or begin as listed pass, because an unknown one may be an order to a
proxy on the way: `connection`, `set-cookie`, some of `x-` as well. What the mesh says itself,
nobody says for it. The agent chooses, and the router checks what it was told by the same rule.
"""

import re
from collections.abc import Iterable, Mapping

ALLOWED = frozenset({"retry-after", "server-timing"})
ALLOWED_PREFIXES = ("x-", "openai-")
# Ours, and those by which nginx, lighttpd, Apache, Envoy and others let themselves be steered.
DENIED_PREFIXES = (
    "x-mesh",
    "x-request-id",
    "x-accel-",
    "x-sendfile",
    "x-lighttpd-",
    "x-forwarded-",
    "x-real-",
    "x-envoy-",
    "x-http-method",
)
HEADERS_MAX = 16
NAME_CHARS_MAX = 64
BYTES_MAX = 2048  # of all names and values
_may_be_name = re.compile(r"[a-z0-9-]+").fullmatch
_may_be_value = re.compile(r"[ -~]*").fullmatch

Pairs = Iterable[tuple[str, str]]


def may_pass(name: str) -> bool:
    """Whether a header of that name, in lower case, is for the client."""
    if not name.startswith(ALLOWED_PREFIXES) and name not in ALLOWED:
        return False
    return not name.startswith(DENIED_PREFIXES) and len(name) <= NAME_CHARS_MAX


def chosen(headers: Pairs) -> tuple[str, ...]:
    """Those that pass: name, value, name, value. What is beyond the bounds is left out."""
    found: dict[str, str] = {}
    size = 0
    for name, value in headers:
        if not (may_pass(name) and _may_be_name(name) and _may_be_value(value)):
            continue
        size += len(name) + len(value) + 2
        if size > BYTES_MAX or (name not in found and len(found) == HEADERS_MAX):
            break
        # RFC 9110, 5.3: lines of one name are one list.
        found[name] = f"{found[name]}, {value}" if name in found else value
    return tuple(text for pair in found.items() for text in pair)


def as_mapping(told: tuple[str, ...]) -> Mapping[str, str]:
    """What an agent says that it chose, as far as that is so."""
    if not told:
        return {}
    checked = chosen(zip(told[::2], told[1::2], strict=False))
    return dict(zip(checked[::2], checked[1::2], strict=True))
