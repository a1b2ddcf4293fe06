"""Where a client says that it is, or a proxy says of it: a query or a header, `lat,lon`.

A query that is misspelt would be no query, and the nearest region another one than was asked for.
"""

from aiohttp import web

from mesh.adapters.problem import Problem
from mesh.core.federation.geo import Location, parse_location
from schemas.http import H_CLIENT_LOCATION, NEAR, Fault
from schemas.near_words import did_you_mean


def read_near(request: web.BaseRequest) -> Location | None:
    """The location; the query goes before the header.

    Raises Problem for one that is none, and for a query of another name.
    """
    for name in request.query:
        if name != NEAR:
            words = f"unknown query parameter {name!r:.60}{did_you_mean(name, (NEAR,))}"
            raise Problem(Fault.INVALID, words, name[:60])
    if len(request.query.getall(NEAR, ())) > 1:
        raise Problem(Fault.INVALID, f"{NEAR} is given more than once", NEAR)
    for given, name in (
        (request.query.get(NEAR), NEAR),
        (request.headers.get(H_CLIENT_LOCATION), H_CLIENT_LOCATION),
    ):
        if given is not None:
            try:
                return parse_location(given)
            except ValueError as error:
                raise Problem(Fault.INVALID, f"{name}: {error}", name) from error
    return None
