"""The replicas that a region's digest lists, each with its own load."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from schemas.numbers import Count, Seconds

LISTED_MAX = 12
ListPlace = Annotated[int, Field(ge=0, lt=LISTED_MAX)]
# A replica's name, or that of one of an adopted region: region/replica.
ListedName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}(/[a-z0-9-]{1,32})?$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedReplicas:
    """Some replicas of a region, column by column: the n-th values are of the n-th replica.

    Of each model those with the shortest waits. One of unknown speed or queue is not listed.
    """

    names: Annotated[tuple[ListedName, ...], Field(max_length=LISTED_MAX)] = ()
    """As gossip names them, those of an adopted region as `region/replica`."""
    wait_s: Annotated[tuple[Seconds, ...], Field(max_length=LISTED_MAX)] = ()
    """Time to compute the prompts already queued there, in seconds."""
    running: Annotated[tuple[Count, ...], Field(max_length=LISTED_MAX)] = ()
    """Requests running there."""
    kv_free_tokens: Annotated[tuple[Count | None, ...], Field(max_length=LISTED_MAX)] = ()
    """KV memory left for prompts not sent to it yet, in tokens; null while unknown."""
    prefill_s_per_token: Annotated[tuple[Seconds, ...], Field(max_length=LISTED_MAX)] = ()
    """Seconds per uncached prompt token."""
    prefill_base_s: Annotated[tuple[Seconds | None, ...], Field(max_length=LISTED_MAX)] = ()
    """What every first token costs there, in seconds; null while unknown."""

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns}) > 1:
            raise ValueError("columns of replicas differ in length")

    @property
    def columns(self) -> tuple[tuple[Any, ...], ...]:
        """All of them, in their order."""
        return (
            self.names,
            self.wait_s,
            self.running,
            self.kv_free_tokens,
            self.prefill_s_per_token,
            self.prefill_base_s,
        )
