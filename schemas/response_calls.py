"""Calls about a response that an engine keeps: fetch, cancel or delete it, list its input.

Such a call has neither a model nor a body. On the bus one header holds it: a method and the target
at the engine, of these alone, so that nobody reaches another endpoint of an engine by it.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from schemas.response_ids import CHARS_MAX, ID_PATTERN

RESPONSE = "/v1/responses/{response_id}"
RESPONSE_CANCEL = "/v1/responses/{response_id}/cancel"
RESPONSE_INPUT = "/v1/responses/{response_id}/input_items"
QUERY_CHARS_MAX = 512  # two times every `include` that OpenAI has
QUERY_PATTERN = (
    r"[A-Za-z0-9%&=+,._~:;@!$'()*/?\[\]-]*"  # RFC 3986, and the brackets that clients send
)
METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {RESPONSE: ("GET", "DELETE"), RESPONSE_CANCEL: ("POST",), RESPONSE_INPUT: ("GET",)}
)
ID = "{response_id}"
CALL_CHARS_MAX = len(f"DELETE {RESPONSE_INPUT}?") + CHARS_MAX + QUERY_CHARS_MAX


def _pattern() -> str:
    targets = (
        rf"({'|'.join(methods)}) {path.replace(ID, ID_PATTERN)}"
        for path, methods in METHODS.items()
    )
    return rf"^({'|'.join(targets)})(\?{QUERY_PATTERN})?$"


CALL_PATTERN = _pattern()
_QUERY = re.compile(QUERY_PATTERN)
_CALL = re.compile(CALL_PATTERN)


class ResponseCall(NamedTuple):
    """One call. `path`: as in `METHODS`; `query`: as its client wrote it."""

    method: str
    path: str
    response_id: str
    query: str = ""

    @property
    def target(self) -> str:
        """Path and query of the request to the engine."""
        query = f"?{self.query}" if self.query else ""
        return self.path.replace(ID, self.response_id) + query

    @property
    def text(self) -> str:
        """As it is on the bus."""
        return f"{self.method} {self.target}"


def is_query(text: str) -> bool:
    """Whether a call may have that query."""
    return len(text) <= QUERY_CHARS_MAX and _QUERY.fullmatch(text) is not None


def parse_call(text: str) -> ResponseCall:
    """The call of a header. Raises ValueError for anything else."""
    if len(text) > CALL_CHARS_MAX or _CALL.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no call about a response")
    method, _, target = text.partition(" ")
    path, _, query = target.partition("?")
    root = RESPONSE.removesuffix(ID)
    name, slash, action = path.removeprefix(root).partition("/")
    return ResponseCall(method, f"{root}{ID}{slash}{action}", name, query)
