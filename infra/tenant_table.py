"""`[tenants.<name>]` of mesh.toml: owners of API keys, and where their prompts may be computed.

An API key's SHA-256 is in the file instead of the key: a reader of the file can't send requests in
the tenant's name. That holds for keys that were made at random; a slow password hash would cost
every request a hundred times its placement, and protects only short passwords.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from schemas.ids import NAME_PATTERN
from schemas.keys import SHA256_PATTERN, KeyRecord, Scope
from schemas.limits import KEY, TENANT, Limited, LimitsTable, key_limits
from schemas.residency import LABELS_MAX, Label, Labels, checked_labels
from schemas.settings import Advice, Option, Table, TenantWeight

TENANTS_MAX = 4096
KEYS_MAX = 64  # of one tenant

LabelName = Annotated[Label, Field(pattern=NAME_PATTERN)]
LABEL_LIST = Advice('write a list of labels, like ["eu"]')
LabelList = Annotated[
    tuple[LabelName, ...],
    Field(max_length=LABELS_MAX),
    AfterValidator(checked_labels),
    LABEL_LIST,
]
KeySha256 = Annotated[
    str,
    Field(pattern=SHA256_PATTERN),
    Advice("write the key's SHA-256 in 64 lower-case hex digits, never the key"),
]


class TenantTable(Table):
    """`[tenants.<name>]`: its prompts share prefixes with no other tenant's, and are computed
    only where one of the labels is carried, whatever their requests hold."""

    key_sha256: Annotated[
        Annotated[tuple[KeySha256, ...], Field(min_length=1, max_length=KEYS_MAX)],
        Option("SHA-256 of each of its API keys, beside those of `mesh keys`."),
    ] = ()
    residency: Annotated[
        Annotated[
            tuple[LabelName, ...],
            Field(min_length=1, max_length=LABELS_MAX),
            AfterValidator(checked_labels),
            LABEL_LIST,
        ],
        Option("Labels of places where its prompts may be computed.", default="anywhere"),
    ] = ()
    weight: Annotated[
        TenantWeight, Option("Its share of engines beside other tenants that wait.")
    ] = 1.0
    limits: Annotated[
        LimitsTable | None,
        Option("`[tenants.NAME.limits]`: what all its keys may use together.", default="none"),
    ] = None
    key_limits: Annotated[
        LimitsTable | None,
        Option(
            "`[tenants.NAME.key_limits]`: what each of its keys may use, unless it was made with "
            "limits of its own.",
            default="none",
        ),
    ] = None


CLIENT_SCOPES = frozenset((Scope.INFERENCE, Scope.BATCH))


class Caller(NamedTuple):
    """Who asks, as its API key says: made once per request, where the router lets it in."""

    key_id: str = ""  # for accounts and people; no secret, and empty for nobody's key
    tenant: str = ""  # empty for nobody's key
    scopes: frozenset[Scope] = CLIENT_SCOPES
    models: frozenset[str] = frozenset()  # that it may name; empty for all
    residency: Labels = ()  # labels of places where its prompts may be computed; empty: anywhere
    limited: Limited = ()  # what it may use, as this key and as its tenant


KEY_ID_HEX = 12  # of the hash, in the id of a key that is listed without one


def listed_callers(tenants: Mapping[str, TenantTable]) -> dict[str, Caller]:
    """Who has each key of mesh.toml, by the key's SHA-256."""
    return {
        key: caller_of(name, table, key[:KEY_ID_HEX])
        for name, table in tenants.items()
        for key in table.key_sha256
    }


def caller_of(tenant: str, table: TenantTable | None, key_id: str) -> Caller:
    """Who has that key of the tenant. `table`: its own; None where mesh.toml lists no tenants."""
    if table is None:
        return Caller(key_id, tenant)
    limited = limited_by(tenant, table.limits, key_id, table.key_limits)
    return Caller(key_id, tenant, residency=table.residency, limited=limited)


def limited_by(
    tenant: str, of_tenant: LimitsTable | None, key_id: str, of_key: LimitsTable | None
) -> Limited:
    """The limits that there are, each with the name that it is counted by."""
    both = ((KEY + key_id, of_key), (TENANT + tenant, of_tenant))
    return tuple((name, limits) for name, limits in both if limits is not None)


def caller_with(record: KeyRecord, table: TenantTable | None) -> Caller:
    """Who has a key that was made on the bus."""
    scopes, models = frozenset(record.scopes), frozenset(record.models)
    caller = caller_of(record.tenant, table, record.id)._replace(scopes=scopes, models=models)
    if (own := key_limits(record.limits)) is None:
        return caller
    of_tenant = None if table is None else table.limits
    return caller._replace(limited=limited_by(record.tenant, of_tenant, record.id, own))


def key_hash(key: str) -> str:
    """What mesh.toml holds for an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
