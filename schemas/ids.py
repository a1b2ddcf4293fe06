"""Names of things on the bus, and the one rule for what such a name may look like.

Region, replica and router names become NATS subject tokens, file names and metric labels,
so they are short lower-case words. Model names come from the world (`meta-llama/Llama-3.1-8B`)
and are free text; `schemas.subjects` encodes them where a subject token is needed.
"""

import re
from typing import Annotated, NewType

from pydantic import Field

RegionId = NewType("RegionId", str)
ReplicaId = NewType("ReplicaId", str)
RouterId = NewType("RouterId", str)
RequestId = NewType("RequestId", str)
ModelId = NewType("ModelId", str)

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"
NAME_ADVICE = "use 1 to 32 lower-case letters, digits and inner hyphens"
_NAME = re.compile(NAME_PATTERN)

# Checked by pydantic where they are fields.
ValidRegionId = Annotated[RegionId, Field(pattern=NAME_PATTERN)]
ValidReplicaId = Annotated[ReplicaId, Field(pattern=NAME_PATTERN)]
ValidRouterId = Annotated[RouterId, Field(pattern=NAME_PATTERN)]

# Each worker of a router counts. Peers take the prefixes of no more of a region's routers, so
# a region that invents names takes no place of other regions.
REGION_ROUTERS_MAX = 16

UNLISTED_KEY = "key:"  # begins the owner of what a key on no list asked; no name has a colon
OWNER_PATTERN = NAME_PATTERN.replace("^", f"^({UNLISTED_KEY})?")

MODEL_CHARS_MAX = 256  # a model name travels in headers, metric labels and subject tokens
ValidModelId = Annotated[ModelId, Field(min_length=1, max_length=MODEL_CHARS_MAX)]

REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)

PATH_PATTERN = r"^(/[a-z0-9_-]+){1,4}$"  # of an engine's route, without a query
PATH_CHARS_MAX = 64
_PATH = re.compile(PATH_PATTERN)


class NameInvalid(ValueError):
    """A name that can't be a subject token; the message says what is allowed."""


def checked_name(kind: str, text: str) -> str:
    """Return `text` if it is a legal region, replica or router name, else raise NameInvalid."""
    if not _NAME.fullmatch(text):  # match() would let a last newline through
        raise NameInvalid(f"{kind} name {text!r}: {NAME_ADVICE}")
    return text


def is_request_id(text: str) -> bool:
    """Whether a client's own `x-request-id` may be kept: short, printable, safe in logs."""
    return _REQUEST_ID.fullmatch(text) is not None


def is_path(text: str) -> bool:
    """Whether it may be the path of an engine's route."""
    return len(text) <= PATH_CHARS_MAX and _PATH.fullmatch(text) is not None
