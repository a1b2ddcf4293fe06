"""Ids of responses that name the replica which keeps them.

An engine that keeps what it answered on `/v1/responses` is the only place where a request with that
`previous_response_id` can go on. vLLM and SGLang take a response's id from the request's field
`request_id`, so the agent gives one that says where it is: every router of every region can read
it, and none has to remember anything. It is a claim, of whoever sends it back: it chooses a place
among those that the request may go to anyway. It belongs to one tenant: an id holds a digest of its
secret and that tenant, and one that was changed names no response that an engine keeps.
"""

import re
from hashlib import sha256
from hmac import compare_digest
from typing import NamedTuple

from schemas.ids import NAME_PATTERN, RegionId, ReplicaId

SECRET_BYTES = 16  # whoever guesses an id reads another's conversation
OWNER_HEX = 16
CHARS_MAX = 128  # two names of 32, the secret and the owner have 124
_NAME = NAME_PATTERN.removeprefix("^").removesuffix("$")
ID_PATTERN = (  # without the names of its parts, for documents
    rf"resp_mesh_{_NAME}_{_NAME}_[0-9a-f]{{{2 * SECRET_BYTES + OWNER_HEX}}}"
)
_HEX = rf"(?P<secret>[0-9a-f]{{{2 * SECRET_BYTES}}})(?P<owner>[0-9a-f]{{{OWNER_HEX}}})"
_ID = re.compile(rf"resp_mesh_(?P<region>{_NAME})_(?P<replica>{_NAME})_{_HEX}")


class ResponsePlace(NamedTuple):
    """What the id of a response says: which replica keeps it, and whose it is."""

    region: RegionId
    replica: ReplicaId
    secret: str
    owner: str

    def is_of(self, tenant: str) -> bool:
        """Whether it was made for that tenant; empty for none."""
        return compare_digest(self.owner, _owner(self.secret, tenant))


def response_id(region: RegionId, replica: ReplicaId, secret: bytes, tenant: str = "") -> str:
    """The id of an answer of that replica; `secret`: SECRET_BYTES of chance."""
    return f"resp_mesh_{region}_{replica}_{secret.hex()}{_owner(secret.hex(), tenant)}"


def place_of(text: str) -> ResponsePlace | None:
    """The place of the response of that id; None if it is not of this form."""
    found = _ID.fullmatch(text) if len(text) <= CHARS_MAX else None
    if found is None:
        return None
    region, replica, secret, owner = found.group("region", "replica", "secret", "owner")
    return ResponsePlace(RegionId(region), ReplicaId(replica), secret, owner)


def _owner(secret: str, tenant: str) -> str:
    return sha256(f"{secret}/{tenant}".encode()).hexdigest()[:OWNER_HEX]
