"""Accounts of tokens: what was computed for whom, by day, as pages in a stream of the region.

A row counts one key's requests for one model at one region, on one day by UTC, at the router or
batch runner that their clients asked. Each process writes pages of its own: sums since it started,
which only rise. A page is written whole, over its last writing, so writing it again changes
nothing, and the sum over all pages is what was used.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import orjson
from pydantic import Field

from schemas.ids import MODEL_CHARS_MAX, ValidRegionId, ValidRouterId
from schemas.json_messages import decoder
from schemas.numbers import WHOLE_MAX

DAYS_KEPT = 400
ROWS_MAX = 64  # of a page
NAME_CHARS_MAX = 128  # of a key's id, a tenant
PAGE_BYTES_MAX = 128 * 1024

Name = Annotated[str, Field(max_length=NAME_CHARS_MAX)]
Sum = Annotated[int, Field(ge=0, le=WHOLE_MAX)]
DAY_PATTERN = r"^\d{4}-\d{2}-\d{2}$"


class UsageKind(StrEnum):
    """Whose requests they are."""

    ONLINE = "online"  # clients'
    BATCH = "batch"  # lines of batch jobs
    COPY = "copy"  # that an operator has sent for other models; their answers are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Sums of one account. The fields `estimated_…` are parts of the others."""

    key: Name = ""
    """The id of the API key; empty where there is none."""
    tenant: Name = ""
    model: Annotated[str, Field(max_length=MODEL_CHARS_MAX)]
    served_region: Annotated[str, Field(max_length=NAME_CHARS_MAX)]
    kind: UsageKind = UsageKind.ONLINE
    requests: Sum = 0
    uncached: Sum = 0
    """Prompt tokens that were computed."""
    cached: Sum = 0
    """Prompt tokens that were in the engine's cache."""
    output: Sum = 0
    estimated_requests: Sum = 0
    """Requests of which any count is an estimate."""
    estimated_prompt: Sum = 0
    estimated_output: Sum = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePage:
    """Rows of one process and day."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    router: ValidRouterId
    """Whose clients asked: a router or batch runner."""
    epoch: Sum
    """Differs at every start of that process."""
    day: Annotated[str, Field(pattern=DAY_PATTERN)]
    number: Sum
    """Of the page, from 0."""
    rows: Annotated[tuple[UsageRow, ...], Field(max_length=ROWS_MAX)] = ()


def encode_page(page: UsagePage) -> bytes:
    return orjson.dumps(page)


decode_page = decoder(UsagePage)
