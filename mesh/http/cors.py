"""Cross-origin requests (the Fetch standard's CORS protocol): off unless origins are configured.

Browsers send a preflight before a page of another origin may call the endpoint. The headers go with
every answer to a request, errors and streams too, or the page would see no more than "network
error". It sees no more of a connection that is refused or cut before a request was read (503, 408):
there the origin is not known. Cookies play no part here, so `*` permits nothing that a program
without a browser can't do.
"""

from collections.abc import Collection, Mapping

from schemas import http

ANY = "*"
PREFLIGHT_S = 600  # for which a browser may cache the answer
_EXPOSED = (http.H_REQUEST_ID, http.H_REGION, http.H_DECISION, http.H_RETRY_AFTER, ANY)
VARY = {"vary": "origin"}


class Cors:
    """The origins that may call, and the headers for their browsers."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: as browsers write them, or `*` alone for every one; not none."""
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> Mapping[str, str]:
        """Those of any answer to a request of this origin; None where it names none."""
        if ANY in self._origins:
            return {} if origin is None else self._allowed(ANY)
        if origin not in self._origins:
            return VARY
        return {**self._allowed(origin), **VARY}

    def preflight(
        self, origin: str | None, asked: Mapping[str, str], methods: Collection[str]
    ) -> Mapping[str, str] | None:
        """Those of the answer to an OPTIONS that a browser sends first; None if it is none, or
        of an origin that may not call. `asked`: the request's headers."""
        allowed = self.headers(origin)
        if http.H_ALLOW_ORIGIN not in allowed or http.H_REQUEST_METHOD not in asked:
            return None
        wanted = asked.get(http.H_REQUEST_HEADERS)
        return {
            **allowed,
            "access-control-allow-methods": ", ".join(methods),
            **({"access-control-allow-headers": wanted} if wanted and wanted.isascii() else {}),
            "access-control-max-age": str(PREFLIGHT_S),
        }

    @staticmethod
    def _allowed(origin: str) -> dict[str, str]:
        exposed = ", ".join(_EXPOSED)
        return {http.H_ALLOW_ORIGIN: origin, "access-control-expose-headers": exposed}
