"""Residency in mesh.toml: labels of regions, and tenants by a hash of their API keys.

A key's SHA-256 stands in the file instead of the key: whoever reads the file can't ask in its
name. That holds for keys that were made at random, as API keys are; a slow password hash would
cost every request what a placement costs a hundred times over, and guards only short passwords.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, NamedTuple, Protocol

from pydantic import BeforeValidator, Field, WithJsonSchema

from infra.table import Table
from schemas.ids import NAME_PATTERN, RegionId
from schemas.near_words import did_you_mean
from schemas.residency import LABELS_MAX, Ground, Label, Labels, checked_labels, ground

TENANTS_MAX = 4096
KEYS_MAX = 64  # of one tenant
SHA256_PATTERN = r"^[0-9a-f]{64}$"
LABEL_LIST = {
    "type": "array",
    "items": {"type": "string", "pattern": NAME_PATTERN},
    "maxItems": LABELS_MAX,
}


def _labels(value: object) -> Labels:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError('write a list of labels, like ["eu"]')
    return checked_labels(value)


def _key_hash(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(SHA256_PATTERN, value):
        raise ValueError("write the key's SHA-256 in 64 lower-case hex digits, never the key")
    return value


LabelList = Annotated[tuple[Label, ...], BeforeValidator(_labels), WithJsonSchema(LABEL_LIST)]
KeyHash = Annotated[
    str,
    BeforeValidator(_key_hash),
    WithJsonSchema({"type": "string", "pattern": SHA256_PATTERN}),
]


class Tenant(Table):
    """`[tenants.<name>]`: whose prompts share prefixes with nobody else's, and where they may be
    computed, whatever their requests say."""

    key_sha256: Annotated[tuple[KeyHash, ...], Field(min_length=1, max_length=KEYS_MAX)]
    residency: Annotated[LabelList, Field(min_length=1)] = ()  # none: anywhere


class KeyHolder(NamedTuple):
    """What mesh.toml says of one API key."""

    tenant: str
    residency: Labels


class HasResidency(Protocol):
    """A region's table, as far as it matters here."""

    @property
    def residency(self) -> tuple[Label, ...]: ...

    @property
    def confined_to(self) -> tuple[Label, ...]: ...


Regions = Mapping[RegionId, HasResidency]


def key_hash(key: str) -> str:
    """What stands in mesh.toml for an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def ground_of(regions: Regions, reached: Collection[RegionId]) -> Ground:
    """What regions carry. Those outside `reached` are known by name and vouched for by nobody."""
    carried = {name: table.residency if name in reached else () for name, table in regions.items()}
    return ground(carried, {name: table.confined_to for name, table in regions.items()})


def problems(regions: Regions, tenants: Mapping[str, Tenant]) -> Iterator[str]:
    """What is wrong with all that is said of residency, a line each."""
    known = sorted({label for region in regions.values() for label in region.residency})
    for name, region in regions.items():
        for label in sorted(set(region.confined_to) - set(region.residency)):
            yield (
                f'regions.{name}.confined_to: the region itself does not carry "{label}"; '
                "add it to its residency"
            )
    seen: dict[str, str] = {}
    for tenant, table in tenants.items():
        for label in sorted(set(table.residency) - set(known)):
            hint = did_you_mean(label, known)
            yield f'tenants.{tenant}.residency: no region carries "{label}"{hint}'
        for digest in table.key_sha256:
            if digest in seen:
                yield f"tenants.{tenant}.key_sha256: a key of tenants.{seen[digest]}; remove one"
            seen.setdefault(digest, tenant)
