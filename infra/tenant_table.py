"""`[tenants.<name>]` of mesh.toml: owners of API keys, and where their prompts may be computed.

An API key's SHA-256 is in the file instead of the key: a reader of the file can't send requests in
the tenant's name. That holds for keys that were made at random; a slow password hash would cost
every request a hundred times its placement, and protects only short passwords.
"""

import hashlib
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from schemas.ids import NAME_PATTERN
from schemas.residency import LABELS_MAX, Label, Labels, checked_labels
from schemas.settings import Advice, Option, Table

TENANTS_MAX = 4096
KEYS_MAX = 64  # of one tenant
SHA256_PATTERN = r"^[0-9a-f]{64}$"

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
        Option("SHA-256 of each of its API keys."),
    ]
    residency: Annotated[
        Annotated[
            tuple[LabelName, ...],
            Field(min_length=1, max_length=LABELS_MAX),
            AfterValidator(checked_labels),
            LABEL_LIST,
        ],
        Option("Labels of places where its prompts may be computed.", default="anywhere"),
    ] = ()


class KeyHolder(NamedTuple):
    """The tenant of one API key."""

    tenant: str
    residency: Labels


def key_hash(key: str) -> str:
    """What mesh.toml holds for an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
