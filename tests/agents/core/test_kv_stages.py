"""What engines of a pair are sent and answer, against requests and answers as real ones look.

The shapes: vLLM 0.10's NixlConnector through its toy proxy and its request schema, vLLM's example
of P2P NCCL, SGLang 0.5's `mini_lb`.
"""

import re

import orjson
import pytest

from agents.core.kv_stages import (
    KvStage,
    StageInvalid,
    handed_out,
    parse_stage,
    stage_body,
    stage_request_id,
    whole_body,
)
from agents.core.work_message import BadWork, parse_work
from schemas import exchange, subjects
from schemas.kv_transfer import PARAMS_BYTES_MAX, ROOM_MAX, KvRole, TransferKind

NIXL, P2P, SGLANG = TransferKind
PREFILL, DECODE = KvRole

CLIENTS = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "messages": [{"role": "user", "content": 'Say "}" and {"max_tokens": 9}'}],
    "max_tokens": 200,
    "min_tokens": 10,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.2,
}
BODY = orjson.dumps(CLIENTS)
# What vLLM's prefill engine answers: the client's chat, one token, and the object for the decoder.
PREFILL_ANSWER = {
    "id": "chatcmpl-8f0c",
    "object": "chat.completion",
    "created": 1754480000,
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A", "tool_calls": []},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 41, "total_tokens": 42, "completion_tokens": 1},
    "prompt_logprobs": None,
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "5a8a3be2-7f1c-4bd1-a7a1-9d5b2b7dbe5e",
        "remote_request_id": "chatcmpl-8f0c",
        "remote_host": "10.0.0.8",
        "remote_port": 5600,
        "tp_size": 1,
    },
}
PARAMS = PREFILL_ANSWER["kv_transfer_params"]


def fields_of(body: bytes) -> dict:
    """As an engine reads them: of two equal names the last one counts."""
    return orjson.loads(body)


def test_vllms_prefill_request_is_the_clients_with_one_token_and_asks_for_the_cache():
    sent = fields_of(stage_body(BODY, NIXL, KvStage(PREFILL, 7)))
    changed = {name: value for name, value in sent.items() if CLIENTS.get(name, "") != value}
    assert changed == {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 0,
        "n": 1,
        "stream": False,
        "stream_options": None,
        "logprobs": None,
        "top_logprobs": None,
        "prompt_logprobs": None,
        "echo": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_vllms_decode_request_is_the_clients_with_what_the_prefill_engine_answered():
    params = handed_out(orjson.dumps(PREFILL_ANSWER), NIXL)
    assert orjson.loads(params) == PARAMS
    sent = fields_of(stage_body(BODY, NIXL, KvStage(DECODE, 7, params=params)))
    assert sent == CLIENTS | {"kv_transfer_params": PARAMS}


def test_a_prompt_shorter_than_a_block_has_nothing_to_hand_out():
    answer = orjson.dumps(PREFILL_ANSWER | {"kv_transfer_params": None})
    assert handed_out(answer, NIXL) == b"null"
    sent = fields_of(stage_body(BODY, NIXL, KvStage(DECODE, 7)))
    assert sent == CLIENTS | {"kv_transfer_params": None}


def test_vllms_p2p_requests_carry_one_id_with_both_addresses():
    stages = [KvStage(role, 255, "10.0.0.8:21001", "10.0.0.9:22001") for role in KvRole]
    first, second = (stage_request_id(P2P, stage) for stage in stages)
    assert first == second
    # `P2pNcclEngine.parse_request_id` of vLLM reads it with these.
    assert re.search(r"___decode_addr_(.*):(\d+)", first).groups() == ("10.0.0.9", "22001")
    found = re.search(r"___prefill_addr_(.*):(\d+)___", first)
    assert found.groups() == ("10.0.0.8", "21001")
    prefill, decode = (fields_of(stage_body(BODY, P2P, stage)) for stage in stages)
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert decode == CLIENTS | {"kv_transfer_params": None}
    with pytest.raises(StageInvalid, match="both engines' addresses"):
        stage_request_id(P2P, KvStage(PREFILL, 255, "10.0.0.8:21001"))


def test_sglangs_requests_are_equal_but_that_nobody_streams_the_prefill_engines_answer():
    stages = [KvStage(role, 2**62, "10.0.0.8:8998") for role in KvRole]
    room = {"bootstrap_host": "10.0.0.8", "bootstrap_port": 8998, "bootstrap_room": 2**62}
    prefill, decode = (fields_of(stage_body(BODY, SGLANG, stage)) for stage in stages)
    assert decode == CLIENTS | room
    assert prefill == CLIENTS | room | {"stream": False, "stream_options": None}
    assert handed_out(b"anything", SGLANG) == b"null"
    with pytest.raises(StageInvalid, match="bootstrap address"):
        stage_body(BODY, SGLANG, KvStage(DECODE, 1))


@pytest.mark.parametrize(
    ("kind", "stolen"),
    [
        (NIXL, {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.66"}}),
        (SGLANG, {"bootstrap_host": "10.0.0.66", "bootstrap_port": 1, "bootstrap_room": 5}),
    ],
)
def test_a_client_can_not_direct_transfers(kind, stolen):
    body = orjson.dumps(CLIENTS | stolen)
    assert fields_of(whole_body(body, kind)) == CLIENTS | dict.fromkeys(stolen)
    for role in KvRole:
        sent = fields_of(stage_body(body, kind, KvStage(role, 3, "10.0.0.8:1", None, b"{}")))
        assert "10.0.0.66" not in orjson.dumps(sent).decode()


def test_white_space_around_a_body_changes_nothing():
    sent = stage_body(b"\n" + BODY + b" \r\n", NIXL, KvStage(PREFILL, 7))
    assert fields_of(sent)["max_tokens"] == 1


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b'{"kv_transfer_params": 7}', b'{"kv_transfer_params": [1]}']
)
def test_an_answer_without_an_object_is_refused(answer):
    with pytest.raises(StageInvalid):
        handed_out(answer, NIXL)


def test_what_is_handed_out_has_a_limit():
    def answer(size: int) -> bytes:
        return orjson.dumps({"kv_transfer_params": {"ids": "x" * (size - len('{"ids":""}'))}})

    assert len(handed_out(answer(PARAMS_BYTES_MAX), NIXL)) == PARAMS_BYTES_MAX
    with pytest.raises(StageInvalid, match="over"):
        handed_out(answer(PARAMS_BYTES_MAX + 1), NIXL)


GOOD = {
    exchange.H_STAGE: "decode",
    exchange.H_KV_ROOM: str(ROOM_MAX),
    exchange.H_KV_PARAMS: '{"remote_port":5600}',
    exchange.H_KV_PREFILL: "[fd00::8]:1",
    exchange.H_KV_DECODE: "gpu-9.example:65535",
}


def test_headers_of_a_stage_are_read():
    assert parse_stage(GOOD) == KvStage(
        DECODE, ROOM_MAX, "[fd00::8]:1", "gpu-9.example:65535", b'{"remote_port":5600}'
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (exchange.H_STAGE, "both"),
        (exchange.H_KV_ROOM, ""),
        (exchange.H_KV_ROOM, "-1"),
        (exchange.H_KV_ROOM, str(ROOM_MAX + 1)),
        (exchange.H_KV_PARAMS, "[]"),
        (exchange.H_KV_PARAMS, "{"),
        (exchange.H_KV_PARAMS, '{"a":"%s"}' % ("x" * PARAMS_BYTES_MAX)),
        (exchange.H_KV_PREFILL, "host"),
        (exchange.H_KV_PREFILL, "host:1\r\nX-Evil: 1"),
        (exchange.H_KV_DECODE, "h" * 200 + ":1"),
    ],
)
def test_other_headers_of_a_stage_are_refused(name, text):
    work = {exchange.H_PATH: "/v1/chat/completions", exchange.H_MODEL: subjects.encode_model("m")}
    assert parse_work(work | GOOD, BODY).stage is not None
    with pytest.raises(BadWork, match=name):
        parse_work(work | GOOD | {name: text}, BODY)


def test_parameters_that_are_nested_too_deeply_are_refused():
    most = b'{"a":' * 253 + b"1" + b"}" * 253
    assert most in stage_body(BODY, NIXL, KvStage(DECODE, 1, params=most))
    deep = b'{"a":%b}' % most
    with pytest.raises(StageInvalid, match="deeply"):
        stage_body(BODY, NIXL, KvStage(DECODE, 1, params=deep))
    with pytest.raises(StageInvalid, match="deeply"):
        handed_out(b'{"kv_transfer_params":{"a":%b}}' % deep, NIXL)


def test_only_chats_and_completions_are_computed_in_stages():
    work = {exchange.H_PATH: "/v1/embeddings", exchange.H_MODEL: subjects.encode_model("m")}
    with pytest.raises(BadWork, match="not computed in stages"):
        parse_work(work | GOOD, BODY)
