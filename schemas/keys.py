"""The API keys of a region, as one record in a stream of the region.

Each command writes the whole record anew, as `schemas.control` does with orders. A key never gets
better: what made it stays, it may be revoked once, and it may be given an earlier end. So two
records of any age join to one, in any order and however often, and no copy of a record, old, late
or lost, brings a key back.

The record holds SHA-256 of keys, never a key. It is no secret, and nobody but routers and admins
reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Annotated, Literal

import orjson
from pydantic import Field

from schemas.control import Text
from schemas.ids import NAME_PATTERN, RegionId, ValidRegionId
from schemas.json_messages import decoder

KEYS_MAX = 1000  # of a region, with those that are over
MODELS_MAX = 16  # that a key is limited to
MODEL_CHARS_MAX = 200
LIMITS_MAX = 16
LIMIT_CHARS_MAX = 32
KEYS_BYTES_MAX = 768 * 1024  # of a record
HISTORY_MAX = 100  # records that the stream keeps
SHA256_PATTERN = r"^[0-9a-f]{64}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Moment = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Scope(StrEnum):
    """What a key is good for."""

    INFERENCE = "inference"
    BATCH = "batch"  # files and batches
    ADMIN = "admin"  # of what a region's operators see over HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One API key. Times are Unix seconds by the clock of an operator's machine."""

    id: Name
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN)]
    tenant: Name
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]
    models: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)], ...],
        Field(max_length=MODELS_MAX),
    ] = ()
    """That it may name; empty for all."""
    origin: ValidRegionId | None = None
    """The region whose routers take it; None for all."""
    limits: Annotated[
        tuple[
            tuple[
                Annotated[str, Field(max_length=LIMIT_CHARS_MAX)],
                Annotated[float, Field(allow_inf_nan=False)]
                | Annotated[str, Field(max_length=LIMIT_CHARS_MAX)],
            ],
            ...,
        ],
        Field(max_length=LIMITS_MAX),
    ] = ()
    """What it may use: names and values as in mesh.toml's `key_limits`."""
    created_at_unix_s: Moment
    expires_at_unix_s: Moment | None = None
    revoked_at_unix_s: Moment | None = None

    @property
    def ends_at_unix_s(self) -> float:
        """From when on it is not taken any more; infinite for never."""
        return min(_or_never(self.expires_at_unix_s), _or_never(self.revoked_at_unix_s))

    def joined(self, other: "KeyRecord") -> "KeyRecord":
        """What holds of two records of it."""
        return replace(
            self,
            expires_at_unix_s=_earlier(self.expires_at_unix_s, other.expires_at_unix_s),
            revoked_at_unix_s=_earlier(self.revoked_at_unix_s, other.revoked_at_unix_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKeys:
    """The keys of one region, in order of their ids, and the command that wrote them."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    region: ValidRegionId
    keys: Annotated[tuple[KeyRecord, ...], Field(max_length=KEYS_MAX)] = ()
    command: Text = ""
    """What the operator asked for, in words."""
    by: Text = ""
    """Who says to have asked: user and host. Nobody checks it."""
    reason: Text = ""
    at_unix_s: Moment = 0.0
    """When, by the clock of the operator's machine."""


def no_keys(region: RegionId) -> RegionKeys:
    """Of a region for which none was made."""
    return RegionKeys(region=region)


def joined(*records: Iterable[KeyRecord]) -> tuple[KeyRecord, ...]:
    """All keys of these, each as it holds after all of them. Of two with one id the first stays."""
    found: dict[str, KeyRecord] = {}
    for record in records:
        for key in record:
            known = found.get(key.id)
            found[key.id] = key if known is None else known.joined(key)
    return tuple(found[name] for name in sorted(found))


def _or_never(moment: float | None) -> float:
    return inf if moment is None else moment


def _earlier(one: float | None, other: float | None) -> float | None:
    first = min(_or_never(one), _or_never(other))
    return None if first == inf else first


def encode_keys(keys: RegionKeys) -> bytes:
    return orjson.dumps(keys)


decode_keys = decoder(RegionKeys, KEYS_BYTES_MAX)
