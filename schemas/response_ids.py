"""Ids of responses that name the replica which keeps them.

An engine that keeps what it answered on `/v1/responses` is the only place where a request with that
`previous_response_id` can go on. vLLM and SGLang take a response's id from the request's field
`request_id`, so the agent gives one that says where it is: every router of every region can read
it, and none has to remember anything. It is a claim, of whoever sends it back: it chooses a place
among those that the request may go to anyway.
"""

import re

from schemas.ids import NAME_PATTERN, RegionId, ReplicaId

SECRET_BYTES = 16  # whoever guesses an id reads another's conversation
_NAME = NAME_PATTERN.removeprefix("^").removesuffix("$")
_ID = re.compile(rf"resp_mesh_(?P<region>{_NAME})_(?P<replica>{_NAME})_[0-9a-f]{{32}}")


def response_id(region: RegionId, replica: ReplicaId, secret: bytes) -> str:
    """The id of an answer of that replica; `secret`: SECRET_BYTES of chance."""
    return f"resp_mesh_{region}_{replica}_{secret.hex()}"


def keeper_of(text: str) -> tuple[RegionId, ReplicaId] | None:
    """The region and replica that keep the response of that id; None if it is not of this form."""
    found = _ID.fullmatch(text) if len(text) < 128 else None
    return None if found is None else (RegionId(found["region"]), ReplicaId(found["replica"]))
