"""What a tenant and each of its keys may use, and what routers tell each other of what they used.

A router publishes, for each limited tenant and key that was active at it, what it has spent since
it started: sums, so that a message that is lost or comes twice changes nothing. `lacks` tells one
that has just started how far the limits are used up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

import orjson
from pydantic import Field

from schemas.exchange import Priority
from schemas.ids import ValidRegionId, ValidRouterId
from schemas.json_messages import decoder
from schemas.settings import AtLeast0, IntAbove0, Option, Table

ROWS_MAX = 256  # of a message
NAME_CHARS_MAX = 160
NUMBER_MAX = 2.0**53

Sum = Annotated[float, Field(ge=0.0, le=NUMBER_MAX, allow_inf_nan=False)]

NONE = "no limit"
TENANT, KEY = "t:", "k:"  # before a name


class LimitsTable(Table):
    """`[tenants.<name>.limits]`, `[tenants.<name>.key_limits]`: a minute's and a day's limits are
    buckets of that size, which fill evenly."""

    requests_per_minute: Annotated[
        IntAbove0 | None, Option("Requests in a minute.", default=NONE)
    ] = None
    requests_per_day: Annotated[IntAbove0 | None, Option("Requests in a day.", default=NONE)] = None
    tokens_per_minute: Annotated[
        IntAbove0 | None, Option("Tokens in a minute, by their weights.", default=NONE)
    ] = None
    tokens_per_day: Annotated[
        IntAbove0 | None, Option("Tokens in a day, by their weights.", default=NONE)
    ] = None
    uncached_weight: Annotated[
        AtLeast0, Option("What a prompt's token counts that was computed.")
    ] = 1.0
    cached_weight: Annotated[
        AtLeast0, Option("What a prompt's token counts that was in the engine's cache.")
    ] = 1.0
    output_weight: Annotated[AtLeast0, Option("What an answer's token counts.")] = 1.0
    concurrent_requests: Annotated[
        IntAbove0 | None, Option("Requests under way at once.", default=NONE)
    ] = None
    prompt_tokens_max: Annotated[
        IntAbove0 | None, Option("Tokens of the longest prompt, as routers count.", default=NONE)
    ] = None
    priority_max: Annotated[
        Priority | None, Option("The highest priority that requests may have.", default=NONE)
    ] = None

    @property
    def tokens_most(self) -> float:
        """The tokens of a request beyond which it can never be let in."""
        given = (self.tokens_per_minute, self.tokens_per_day)
        return min((float(most) for most in given if most is not None), default=inf)

    def cost(self, uncached: float, cached: float, output: float) -> float:
        """What these tokens count."""
        return (
            uncached * self.uncached_weight
            + cached * self.cached_weight
            + output * self.output_weight
        )


Limited = tuple[tuple[str, LimitsTable], ...]  # names as in `LimitRow`, each with its limits


def key_limits(given: Sequence[tuple[str, float | str]]) -> LimitsTable | None:
    """The limits in a key's record; names that a later version may have are passed over. Raises
    pydantic.ValidationError for a value that none can have."""
    known = {name: value for name, value in given if name in LimitsTable.model_fields}
    return LimitsTable.model_validate(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow:
    """What one process has spent of one tenant's, or key's, limits."""

    name: Annotated[str, Field(min_length=2, max_length=NAME_CHARS_MAX)]
    """`t:` and a tenant, or `k:` and the id of a key."""
    born: Annotated[int, Field(ge=0)]
    """Counts the process's accounts: these sums began with it."""
    age_s: Sum
    """Since then."""
    requests: Sum
    tokens: Sum
    """Of requests that are over, by their weights."""
    held: Sum
    """Tokens that requests under way are expected to cost."""
    open: Sum
    """Requests under way."""
    wanted: Sum
    """Tokens a second that were asked for, those refused too."""
    lacks: Annotated[tuple[Sum, ...], Field(max_length=8)]
    """What is used up of requests and tokens per minute, and per day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitClaims:
    """What one router or batch runner has spent of tenants' limits."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    router: ValidRouterId
    epoch: Annotated[int, Field(ge=0)]
    """Differs at every start of that process."""
    seq: Annotated[int, Field(ge=0)]
    """Rises with each message."""
    rows: Annotated[tuple[LimitRow, ...], Field(max_length=ROWS_MAX)] = ()


def encode_claims(claims: LimitClaims) -> bytes:
    return orjson.dumps(claims)


decode_claims = decoder(LimitClaims)
