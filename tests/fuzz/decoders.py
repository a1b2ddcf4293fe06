"""Each decoder of ours with its good inputs, how they are changed, and the errors that it promises.

What a decoder took is used, too: written again, or fed to a router's or agent's core, which must
bear whatever passes its decoders.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from agents.adapters import engine_kinds, listed_models
from agents.adapters.engine_call import UnexpectedAnswer
from agents.core import events as agent_events
from agents.core.agent import AgentCore
from agents.core.engine_cache import EngineCache
from agents.core.held_blocks import HeldBlocks
from agents.core.kv_events import KvEventsInvalid, parse_batch
from agents.core.replica_config import ReplicaConfig
from agents.core.work_message import BadWork, parse_handoff, parse_work
from infra import topology, trace_context
from mesh.adapters.refused import RequestRefused
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.requests.limit_account import Origin
from mesh.core.requests.limits import LimitKeeper
from mesh.http.form_parts import FormInvalid, model_place
from mesh.http.read_request import read_fields, read_options
from mesh.replay import trace_formats
from mesh.replay.trace import TraceError
from mesh.session.continuation import CantContinue, continuation
from mesh.session.headers import IngressInvalid, accepted_headers, read_forwarded
from mesh.session.said import Said
from schemas import (
    batch,
    control,
    decision,
    exchange,
    explain,
    gossip,
    keys,
    limits,
    residency,
    response_calls,
    response_ids,
    state,
    subjects,
    usage,
    wire,
)
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.parcels import unpack_parcel
from tests.fuzz.mutate import of_text, of_tree, torn
from tests.mesh.core import build

ROOT = Path(__file__).parents[2]
GOLDEN, DATA = ROOT / "tests" / "schemas" / "golden", ROOT / "tests" / "data"
Read = Callable[[bytes], object]
Make = Callable[[Random], bytes]


@dataclass(frozen=True, slots=True)
class Decoder:
    read: Read
    make: Make
    errors: tuple[type[Exception], ...] = ()


def _found(read: Read) -> Read:
    """Of a decoder that returns None for what it does not take: that raises LookupError."""

    def found(data: bytes) -> object:
        if (value := read(data)) is None:
            raise LookupError
        return value

    return found


def _compact(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _json(*goods: bytes) -> Make:
    trees = [json.loads(good) for good in goods]
    return lambda dice: of_tree(dice, dice.choice(trees), _compact)


def _golden(name: str) -> Make:
    files = sorted(GOLDEN.glob(f"{name}.*"))
    return _json(*(line for file in files for line in file.read_bytes().splitlines()))


def _wire(*goods: bytes) -> Make:
    trees = [msgpack.unpackb(good) for good in goods]
    return lambda dice: of_tree(dice, dice.choice(trees), msgpack.packb)


def _text(*goods: bytes) -> Make:
    return lambda dice: of_text(dice, dice.choice(goods))


def _bytes(*goods: bytes) -> Make:
    def make(dice: Random) -> bytes:
        data = dice.choice(goods)
        for _ in range(dice.choice((1, 1, 2, 5))):
            data = torn(dice, data)
        return data

    return make


def _headers(*goods: dict[str, str]) -> Make:
    return _json(*(_compact(good) for good in goods))


def _text_headers(data: bytes) -> dict[str, str]:
    """As the bus hands them on: text; what JSON has besides is left out."""
    fields = json.loads(data) if data else {}
    pairs = fields.items() if isinstance(fields, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _of_headers(read: Callable[[dict[str, str]], object]) -> Read:
    def decode(data: bytes) -> object:
        try:
            headers = _text_headers(data)
        except ValueError:  # torn
            return None
        return read(headers)

    return decode


def _messages() -> list[bytes]:
    lines = (GOLDEN / "wire.txt").read_text().splitlines()
    return [bytes.fromhex(line.split(" ")[2]) for line in lines]


def _frames() -> list[bytes]:
    lines = (GOLDEN / "frame.txt").read_text().splitlines()
    return [bytes.fromhex(line.split(" ")[2]) for line in lines]


def _again(read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> Read:
    def decode(data: bytes) -> object:
        found = read(data)
        read(write(found))
        return found

    return decode


def _to_core(event: Callable[[Any], ev.Event], read: Callable[[bytes], Any]) -> Read:
    """A router's core takes it, and goes on: it decides, and publishes its own digest."""

    def decode(data: bytes) -> object:
        found = read(data)
        core = build.core(peers=(RegionId("eu"),))
        number = 0
        for at, one in enumerate((ev.HeartbeatSeen(build.beat("us-9")), event(found))):
            number += len(core.handle(one, 10.0 + at / 10))
        core.handle(ev.RequestArrived(build.request(1, arrived_at=10.2)), 10.2)
        for effect in core.handle(ev.Tick(), 10.5):
            digest = getattr(effect, "digest", None)
            if digest is not None:
                state.decode_digest(state.encode_state(digest))
        return number

    return decode


def _gossip(data: bytes) -> object:
    message = wire.decode(data)
    kinds: dict[type, Callable[[Any], ev.Event]] = {
        gossip.TrieDelta: ev.TrieSeen,
        gossip.TriePart: ev.TriePartSeen,
    }
    if (kind := kinds.get(type(message))) is not None:
        core = build.core(peers=(RegionId("eu"),))
        core.handle(kind(message), 10.0)
        core.handle(ev.Tick(), 10.5)
    return message


def _deltas() -> Iterator[bytes]:
    delta = gossip.TrieDelta("eu", "r1", 1, 1, (1, 2), (3,))
    yield wire.encode(delta)
    yield wire.encode(replace(delta, replicas=("a",), holders=(1, 1)))
    yield wire.encode(gossip.TriePart("eu", "r1", 1, 1, 0, 1, (1, 2, 3), replicas=("a", "b")))


def _claims(data: bytes) -> object:
    """A process with a limit of each kind hears them, and what it then says can be read."""
    claims = limits.decode_claims(data)
    origin = Origin(RegionId("us"), RouterId("r1"))
    keeper = LimitKeeper(origin, 1, ("us", "eu"), Random(1), 0.0)
    keeper.take((("t:acme", LIMITS),), 9, 0.1)
    for now in (0.2, 1.5, 12.0):
        keeper.hear(claims, now)
        for said in keeper.turn_period(now):
            limits.decode_claims(limits.encode_claims(said))
        keeper.take((("t:acme", LIMITS),), 9, now)
    return claims


def _reading(kind: Callable[[engine_kinds.MetricsPage], agent_events.EngineReading]) -> Read:
    """An agent's core takes the page, and says what it makes of it in a heartbeat."""

    def decode(data: bytes) -> object:
        page = engine_kinds.MetricsPage(data.decode("utf-8", "replace"))
        reading = kind(page)
        core = AgentCore(REPLICA)
        core.handle(agent_events.EngineScraped(began_at=0.9, reading=reading, models=MODELS), 1.0)
        return state.decode_heartbeat(state.encode_state(core.heartbeat(1.1)))

    return decode


def _events(data: bytes) -> object:
    cache = EngineCache(HeldBlocks())
    cache.live(1, data)
    return parse_batch(data)


def _pages(folder: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((DATA / folder).glob("*")) if file.is_file()]


def _prompt(*_: object) -> Prompt:
    return build.prompt("a")


def _said(data: bytes) -> object:
    """An engine's events, cut anywhere into two answers."""
    said = Said(BODY, is_chat=True)
    half = data.rfind(b"\n\n", 0, len(data) // 2) + 2
    said.chunks.append(data[:half])
    _, splice = continuation(said)
    return splice.joined(data[half:])


def _fields(path: str) -> Read:
    def decode(data: bytes) -> object:
        fields = read_fields(path, data)
        return model_place(data), fields

    return decode


def _form(data: bytes) -> object:
    return read_fields("/v1/audio/transcriptions", data, "multipart/form-data; boundary=b")


def _words(data: bytes) -> str:
    return data.decode("utf-8", "replace")


REPLICA = ReplicaConfig(
    region=RegionId("us"),
    replica=ReplicaId("us-0"),
    epoch=7,
    engine="vllm",
    outstanding_max=4,
    heartbeat_s=0.1,
)
MODELS = (ModelId("tiny"),)
CHAT = {"model": "tiny", "stream": True, "max_tokens": 9}
CHAT |= {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
BODY = _compact({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "a"}]})
RESPONSES = _compact({"model": "tiny", "input": [{"role": "user", "content": "a"}], "tools": []})
MESSAGES = _compact({**CHAT, "system": [{"type": "text", "text": "s"}], "tools": [{"name": "t"}]})
COMPLETION = _compact({"model": "tiny", "prompt": ["a", "b"], "logit_bias": {"1": 2}, "n": 1})
FORM = b"\r\n".join(
    (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF\x00\x01",
        b"--b--\r\n",
    )
)
TOKEN = {"index": 0, "delta": {"role": "assistant", "content": " a"}, "finish_reason": None}
EVENTS = (
    b"".join(
        b"data: "
        + _compact({"id": "c", "created": 1, "model": "tiny", "choices": [TOKEN], **more})
        + b"\n\n"
        for more in ({}, {}, {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}, {})
    )
    + b": wait\n\ndata: [DONE]\n\n"
)
WORK = {
    "Mesh-Request": "r-1", "Mesh-Model": "tiny", "Mesh-Path": "/v1/chat/completions",
    "Mesh-From": "r1", "Mesh-Handoff": "7", "Mesh-Deadline-Ms": "9000", "Mesh-Window": "65536",
    "Mesh-Body-Bytes": "100", "Mesh-Prefill-Tokens": "10", "Mesh-May-Queue": "1",
    "Mesh-Owner": "eu", "Mesh-Term": "3", "Mesh-Residency": "gdpr,home",
}  # fmt: skip
STAGE = {**WORK, "Mesh-Stage": "decode", "Mesh-Kv-Room": "5", "Mesh-Kv-Params": "{}"}
STAGE |= {"Mesh-Kv-Prefill": "10.0.0.8:8998", "Mesh-Kv-Decode": "10.0.0.9:8998"}
RESPONSE = response_ids.response_id(
    RegionId("us"), ReplicaId("us-0"), b"s" * response_ids.SECRET_BYTES
)
CALL = {**WORK, "Mesh-Call": f"GET /v1/responses/{RESPONSE}?stream=true"}
FORWARDED = {
    "Mesh-Request": "r-1", "Mesh-Model": "tiny", "Mesh-Path": "/v1/chat/completions",
    "Mesh-Hops": "1", "Mesh-Origin": "eu", "Mesh-Deadline-Ms": "9000", "Mesh-Waited-Ms": "10",
    "Mesh-Held-Ms": "5", "Mesh-Priority": "high", "Mesh-Slo-Ttft-Ms": "100", "Mesh-Session": "s",
    "Mesh-Tenant": "acme", "Mesh-Key-Id": "k1", "Mesh-Residency": "gdpr", "Mesh-Keeper": "us-0",
}  # fmt: skip
OPTIONS = {
    "x-mesh-priority": "high", "x-mesh-slo-ttft-ms": "100", "x-mesh-session": "s",
    "x-mesh-debug": "1", "x-mesh-residency": "gdpr,home",
}  # fmt: skip
TRACE = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "a=b,c=d"}
KEYS = keys.encode_keys(keys.no_keys(RegionId("us")))
CONTROL = control.encode_control(
    control.RegionControl(region=RegionId("us"), drained=(ReplicaId("us-0"),), at_unix_s=1.5)
)
LIMITS = limits.LimitsTable(
    requests_per_minute=9, requests_per_day=99, tokens_per_minute=999, tokens_per_day=9999,
    concurrent_requests=2,
)  # fmt: skip
SPENT = limits.LimitRow(
    name="t:acme", born=1, age_s=0.2, requests=1.0, tokens=9.0, held=3.0, open=1.0, wanted=2.5,
    lacks=(1.0, 9.0, 1.0, 9.0),
)  # fmt: skip
CLAIMS = [
    limits.encode_claims(
        limits.LimitClaims(
            region=RegionId("eu"), router=RouterId("r1"), epoch=1, seq=seq, rows=(row,)
        )
    )
    for seq, row in enumerate((SPENT, replace(SPENT, age_s=60.0)), 1)
]
USED = usage.UsageRow(
    key="k1", tenant="acme", model="tiny", served_region="us", requests=2, cached=3
)
USAGE = usage.encode_page(
    usage.UsagePage(
        region=RegionId("us"), router=RouterId("r1"), epoch=1, day="2026-11-29", number=0,
        rows=(USED,),
    )
)  # fmt: skip
JOB = batch.encode_job(
    batch.BatchJob(
        id="batch_1", endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="24h", status=batch.JobStatus.IN_PROGRESS, created_at=1, expires_at=9,
        tenant="acme", residency=("gdpr",), metadata={"a": "b"}, total=3, completed=1,
        errors=(batch.LineError(code="c", message="m", line=1),), estimated_end_at=2.5,
    )
)  # fmt: skip
LISTED = _compact(
    {"object": "list", "data": [{"id": "tiny", "max_model_len": 9, "root": "r", "parent": None}]}
)
STORED: list[dict[str, Any]] = [
    {"type": "BlockStored", "block_hashes": [1, b"\x02" * 8], "parent_block_hash": None}
]
STORED[0] |= {"token_ids": [*range(32)], "block_size": 16, "lora_id": None, "medium": "GPU"}
REMOVED = ["BlockRemoved", [1, 2], "GPU"]
BATCH = msgpack.packb([1.5, [STORED, REMOVED, {"type": "AllBlocksCleared"}], 0])
TRACES = {
    "mooncake": (trace_formats.parse_mooncake, DATA / "mooncake" / "conversation_first60.jsonl"),
    "azure": (trace_formats.parse_azure, DATA / "azure" / "conv_first60.csv"),
    "lmcache": (
        trace_formats.parse_lmcache,
        sorted((DATA / "lmcache" / "taubench").glob("*.jsonl"))[0],
    ),
    "kv-cache-tester": (
        trace_formats.parse_kv_cache_tester,
        DATA / "kv-cache-tester" / "four_sessions.jsonl",
    ),
}
WIRE = (wire.WireError,)


def _lines(read: Callable[[list[bytes]], object]) -> Read:
    return lambda data: read(data.splitlines(keepends=True))


def _trace(file: Path) -> Make:
    """A few lines of it: short ones, for speed."""
    lines = sorted(file.read_bytes().splitlines(), key=len)[:4]
    return _text(b"\n".join(line[:20_000] for line in file.read_bytes().splitlines()[:1] + lines))


def _forwarded(headers: dict[str, str]) -> object:
    return read_forwarded(
        accepted_headers(headers), _prompt, key=1, home=RegionId("us"), label="gdpr",
        inbox="_INBOX.eu.r1.1", now=1.0,
    )  # fmt: skip


def decoders() -> Iterator[tuple[str, Decoder]]:
    """All of them, by name."""
    yield (
        "messages of the bus",
        Decoder(_again(wire.decode, wire.encode), _wire(*_messages()), WIRE),
    )
    yield (
        "gossip",
        Decoder(_gossip, _wire(*_deltas()), WIRE),
    )
    yield "frames", Decoder(exchange.unpack_frame, _bytes(*_frames()), WIRE)
    parcel = b"".join(
        len(b"p-1").to_bytes(1, "big") + len(one).to_bytes(4, "big") + b"p-1" + one
        for one in _frames()[:3]
    )
    yield "parcels", Decoder(lambda data: list(unpack_parcel(data)), _bytes(parcel), WIRE)
    for name, read, event in (
        ("heartbeat", state.decode_heartbeat, ev.HeartbeatSeen),
        ("digest", state.decode_digest, ev.DigestSeen),
        ("lease", state.decode_lease, lambda lease: ev.LeaseHeard(lease, 5)),
    ):
        yield name, Decoder(_to_core(event, _again(read, state.encode_state)), _golden(name), WIRE)
    yield (
        "offline",
        Decoder(_again(state.decode_offline, state.encode_state), _golden("offline"), WIRE),
    )
    yield (
        "receipts",
        Decoder(
            _again(decision.decode_decision, decision.encode_decision), _golden("decision"), WIRE
        ),
    )
    yield "questions", Decoder(explain.decode_question, _golden("question"), WIRE)
    yield "stories", Decoder(explain.decode_answer, _golden("answer"), WIRE)
    yield (
        "orders",
        Decoder(_again(control.decode_control, control.encode_control), _json(CONTROL), WIRE),
    )
    yield "keys", Decoder(_again(keys.decode_keys, keys.encode_keys), _json(KEYS), WIRE)
    yield "limits", Decoder(_claims, _json(*CLAIMS), WIRE)
    yield "usage", Decoder(_again(usage.decode_page, usage.encode_page), _json(USAGE), WIRE)
    yield "jobs", Decoder(_again(batch.decode_job, batch.encode_job), _json(JOB), WIRE)
    yield (
        "work",
        Decoder(
            _of_headers(lambda headers: (parse_handoff(headers), parse_work(headers, b"{}"))),
            _headers(WORK, STAGE, CALL),
            (BadWork,),
        ),
    )
    yield (
        "forwarded requests",
        Decoder(_of_headers(_forwarded), _headers(FORWARDED), (IngressInvalid,)),
    )
    yield "trace context", Decoder(_of_headers(trace_context.read), _headers(TRACE))
    yield (
        "options",
        Decoder(
            _of_headers(lambda headers: read_options(headers, {})),
            _headers(OPTIONS),
            (RequestRefused,),
        ),
    )
    yield (
        "model tokens",
        Decoder(
            lambda data: subjects.decode_model(_words(data)),
            _bytes(b"a=2Fb", b"=C3=A9"),
            (ValueError,),
        ),
    )
    yield (
        "inboxes",
        Decoder(
            _found(lambda data: subjects.parse_inbox(_words(data))),
            _bytes(b"_INBOX.eu.r1.12"),
            (LookupError,),
        ),
    )
    yield (
        "labels",
        Decoder(
            lambda data: residency.parse_labels(_words(data)), _bytes(b"gdpr, home"), (ValueError,)
        ),
    )
    yield (
        "calls",
        Decoder(
            lambda data: response_calls.parse_call(_words(data)),
            _bytes(CALL["Mesh-Call"].encode()),
            (ValueError,),
        ),
    )
    yield (
        "response ids",
        Decoder(
            _found(lambda data: response_ids.place_of(_words(data))),
            _bytes(RESPONSE.encode()),
            (LookupError,),
        ),
    )
    for name, path, body in (
        ("chat", "/v1/chat/completions", _compact(CHAT)),
        ("completions", "/v1/completions", COMPLETION),
        ("responses", "/v1/responses", RESPONSES),
        ("messages", "/v1/messages", MESSAGES),
        ("embeddings", "/v1/embeddings", _compact({"model": "tiny", "input": ["a", "b"]})),
    ):
        yield name, Decoder(_fields(path), _json(body), (RequestRefused,))
    yield "forms", Decoder(_form, _bytes(FORM), (RequestRefused, FormInvalid))
    yield "streams that go on", Decoder(_said, _text(EVENTS), (CantContinue,))
    for name, reading in (
        ("vllm", engine_kinds.read_vllm),
        ("sglang", engine_kinds.read_sglang),
        ("llamacpp", engine_kinds.read_llamacpp),
    ):
        pages = [
            file.read_bytes() for file in sorted((DATA / "server_metrics").glob(f"{name}*.txt"))
        ]
        yield f"metrics of {name}", Decoder(_reading(reading), _text(*pages))
    yield (
        "listed models",
        Decoder(lambda data: listed_models.served(data, "x"), _json(LISTED), (UnexpectedAnswer,)),
    )
    yield "KV events", Decoder(_events, _wire(BATCH), (KvEventsInvalid,))
    yield (
        "mesh.toml",
        Decoder(
            lambda data: topology.parse(_words(data), "x"),
            _text((ROOT / "infra" / "mesh.toml").read_bytes()),
            (topology.TopologyError,),
        ),
    )
    for name, (parse, file) in TRACES.items():
        yield f"{name} traces", Decoder(_lines(parse), _trace(file), (TraceError,))
