"""Which errors are a region's, so that another region may do better.

The region could not be reached, it hung up before it answered, or it said 503. Everything else
(a bad request, 429 of a mesh that is full in all regions, an engine's own error) is the same
everywhere. SDKs have classes of their own for a lost connection; they are known here by name, so
that none of them has to be installed.
"""

from collections.abc import Iterator

STATUS_UNAVAILABLE = 503
# Bases of what openai, httpx and aiohttp raise when a connection fails; others raise OSError.
CONNECTION_ERRORS = frozenset({"APIConnectionError", "TransportError", "ClientConnectionError"})
FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
CAUSES_MAX = 8


def is_a_regions(error: BaseException) -> bool:
    """Whether the request may be asked of another region.

    Of errors that an SDK raised before it returned an answer: nothing of one was read then.
    """
    status = _status(error)
    if status is not None:
        return status == STATUS_UNAVAILABLE
    return any(_is_of_a_connection(one) for one in _causes(error))


def _is_of_a_connection(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, FILE_ERRORS)
    return not CONNECTION_ERRORS.isdisjoint(base.__name__ for base in type(error).mro())


def retry_after_s(error: BaseException) -> float:
    """The seconds that a 503 asked for; 0.0 if it did not."""
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    text = str(headers.get("retry-after") or headers.get("Retry-After") or "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def _status(error: BaseException) -> int | None:
    """As openai (status_code), aiohttp (status), urllib (code) and httpx (response) tell it."""
    response = getattr(error, "response", None)
    for told in (
        getattr(error, "status_code", None),
        getattr(error, "status", None),
        getattr(error, "code", None),
        getattr(response, "status_code", None),
    ):
        if isinstance(told, int):
            return told
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if one is None:
            return
        yield one
        one = one.__cause__
