"""What an engine of a pair is sent for each stage of a request, by its kind of KV transfer.

A client's body stays as it is but for fields that are appended to it: engines take the last of two
equal names, so nothing of it is read or written anew. The prefill stage generates one token, which
nobody sees. A client's own values of the fields that direct a transfer are overridden in every
request, also in a whole one: with them it could fetch another client's KV cache.

`schemas.kv_transfer` has the sources of the protocols.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from schemas import exchange
from schemas.kv_transfer import (
    ADDRESS_CHARS_MAX,
    ADDRESS_PATTERN,
    PARAMS_BYTES_MAX,
    ROOM_MAX,
    ROOM_PATTERN,
    KvRole,
    TransferKind,
)

Fields = dict[str, Any]
# Of a prefill engine's answer to a prompt and one token, with whatever its client asked for.
ANSWER_BYTES_MAX = 8 * 1024 * 1024
NO_STREAM: Fields = {"stream": False, "stream_options": None}
ONE_TOKEN: Fields = {
    **NO_STREAM,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "n": 1,
    "logprobs": None,
    "top_logprobs": None,
    "prompt_logprobs": None,
    "echo": False,
}
# vLLM answers a prompt with these with the same object, filled in.
HANDS_OUT: Fields = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DIRECTING: Mapping[TransferKind, tuple[str, ...]] = {
    TransferKind.NIXL: ("kv_transfer_params",),
    TransferKind.P2P: ("kv_transfer_params",),
    TransferKind.SGLANG: ("bootstrap_host", "bootstrap_port", "bootstrap_room"),
}
_ADDRESS, _ROOM = re.compile(ADDRESS_PATTERN), re.compile(ROOM_PATTERN)


class StageInvalid(ValueError):
    """Headers of a stage, or an engine's answer to one, that can't be served; it says which."""


@dataclass(frozen=True, slots=True)
class KvStage:
    """The stage of a request that an engine computes. Addresses are host:port."""

    role: KvRole
    room: int
    prefill_address: str | None = None
    decode_address: str | None = None
    params: bytes = b""  # of decode: the JSON object that the prefill engine handed out


def parse_stage(headers: Mapping[str, str]) -> KvStage:
    """The stage that a work message's headers describe. Raises StageInvalid."""
    role, room = headers.get(exchange.H_STAGE, ""), headers.get(exchange.H_KV_ROOM, "")
    if role not in set(KvRole):
        raise StageInvalid(f"{exchange.H_STAGE} {role[:40]!r} is no stage")
    if not _ROOM.fullmatch(room) or int(room) > ROOM_MAX:
        raise StageInvalid(f"{exchange.H_KV_ROOM} {room[:40]!r} is no number up to {ROOM_MAX}")
    params = headers.get(exchange.H_KV_PARAMS, "")
    if params:
        _checked_params(params)
    return KvStage(
        KvRole(role),
        int(room),
        _address(headers, exchange.H_KV_PREFILL),
        _address(headers, exchange.H_KV_DECODE),
        params.encode(),
    )


def _checked_params(text: str) -> None:
    if len(text) > PARAMS_BYTES_MAX:
        raise StageInvalid(f"{exchange.H_KV_PARAMS} of {len(text)} characters")
    try:
        is_object = isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        is_object = False
    if not is_object:
        raise StageInvalid(f"{exchange.H_KV_PARAMS} {text[:40]!r} is no JSON object")


def _address(headers: Mapping[str, str], name: str) -> str | None:
    text = headers.get(name)
    if text is not None and not (len(text) <= ADDRESS_CHARS_MAX and _ADDRESS.fullmatch(text)):
        raise StageInvalid(f"{name} {text[:40]!r} is no host:port")
    return text


def whole_body(body: bytes, kind: TransferKind) -> bytes:
    """The body of a request that its engine answers alone."""
    return _with_fields(body, dict.fromkeys(DIRECTING[kind]))


def stage_body(body: bytes, kind: TransferKind, stage: KvStage) -> bytes:
    """The body of a request of which its engine computes one stage. Raises StageInvalid."""
    is_prefill = stage.role is KvRole.PREFILL
    if kind is TransferKind.SGLANG:  # whose prefill engines end after one token by themselves
        host, port = _host_and_port(stage.prefill_address)
        room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": stage.room}
        return _with_fields(body, room | (NO_STREAM if is_prefill else {}))
    fields = ONE_TOKEN.copy() if is_prefill else {}
    if kind is TransferKind.NIXL and is_prefill:
        fields["kv_transfer_params"] = HANDS_OUT
    else:
        params = stage.params if kind is TransferKind.NIXL else b""
        fields["kv_transfer_params"] = orjson.loads(params) if params else None
    return _with_fields(body, fields)


def stage_request_id(kind: TransferKind, stage: KvStage) -> str | None:
    """The id that both requests of a pair must carry; None where any will do.

    Raises StageInvalid where an address is missing.
    """
    if kind is not TransferKind.P2P:
        return None
    first, second = stage.prefill_address, stage.decode_address
    if first is None or second is None:
        raise StageInvalid("a p2p stage needs both engines' addresses")
    return f"___prefill_addr_{first}___decode_addr_{second}_{stage.room:032x}"


def handed_out(answer: bytes, kind: TransferKind) -> bytes:
    """What of a prefill engine's answer goes to the decode engine, as JSON; `null` for nothing.

    vLLM hands out nothing for a prompt that is shorter than a block. Raises StageInvalid for an
    answer that is no JSON object, or whose object is too large or nested too deeply.
    """
    if kind is not TransferKind.NIXL:
        return b"null"
    try:
        params = orjson.loads(answer).get("kv_transfer_params")
    except (orjson.JSONDecodeError, AttributeError):
        raise StageInvalid("the prefill engine's answer is no JSON object") from None
    if params is not None and not isinstance(params, dict):
        raise StageInvalid("the prefill engine's kv_transfer_params are no object")
    text = _written(params)
    if len(text) > PARAMS_BYTES_MAX:
        raise StageInvalid(f"kv_transfer_params of {len(text)} bytes, over {PARAMS_BYTES_MAX}")
    return text


def _host_and_port(address: str | None) -> tuple[str, int]:
    if address is None:
        raise StageInvalid("an sglang stage needs the prefill engine's bootstrap address")
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _with_fields(body: bytes, fields: Fields) -> bytes:
    """A JSON object with fields, and these after its own."""
    end = body.rfind(b"}")
    return body if end < 0 else b"%b,%b%b" % (body[:end], _written(fields)[1:-1], body[end:])


def _written(fields: Fields | None) -> bytes:
    """As JSON. Raises StageInvalid for what orjson reads and does not write: deeply nested."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        raise StageInvalid("kv_transfer_params are nested too deeply") from None
