"""A header that says what to do may be said once; said twice, nobody knows what was meant.

RFC 9110 (section 5.3) lets whoever passes a request on join the lines of a repeated header with a
comma. So two lines of labels may arrive as two or as one list, and in a list labels are
alternatives: a request that was to meet both would go where one holds. Of two keys or two
priorities one would be dropped. All of that is 400, before anything is read or placed.

Rejected: meeting the labels of all lines (right only where no proxy joins them, and who sent the
request can't know that).
"""

from aiohttp import web

from mesh.adapters.problem import Problem
from schemas.http import SAID_ONCE, Fault


def refuse_repeated(request: web.BaseRequest) -> None:
    """Raises Problem for the first header that must stand alone and does not."""
    for name in SAID_ONCE:
        times = len(request.headers.getall(name, ()))
        if times > 1:
            message = f"{name} is given {times} times; give it once"
            raise Problem(Fault.INVALID, message, name)
