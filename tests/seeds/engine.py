"""An inference engine in memory: it answers as vLLM does, or misbehaves as it is told.

A prompt says what its answer is: `n=7 tokens=12 gap=0.05`. The answer's tokens name the request and
their position, ` 7.0 7.1 …`, in whatever attempt they are written; those of a request that can't
go on elsewhere (it asks for `logprobs`) also name the attempt.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.seeds.kv_events import KvCache, tokens_of
from tests.seeds.loop import Process, VirtualLoop

METRICS = {
    "vllm": (
        'vllm:num_requests_running{{model_name="m"}} {running}\n'
        'vllm:num_requests_waiting{{model_name="m"}} {waiting}\n'
        'vllm:kv_cache_usage_perc{{model_name="m"}} 0.1\n'
        'vllm:generation_tokens_total{{model_name="m"}} {said}\n'
    ),
    "sglang": (
        "sglang:num_running_reqs {running}\nsglang:num_queue_reqs {waiting}\n"
        "sglang:token_usage 0.1\nsglang:generation_tokens_total {said}\n"
    ),
}
LOADS, UNLOADS = b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"
LOAD_S = 0.3
PREFILL_CHARS = 20_000  # of a prompt, that it computes at the most
TRANSFER_S = 10.0  # that a decode engine waits for a KV cache
GOOD = "good"
NO_LOADS = "no_loads"  # of adapters; it answers well
MODES = (
    *(
        "500",
        "503",
        "429",
        "400",
        "error_first",
        "error_inside",
        "empty",
        "comments",
        "silent",
        "slow",
        "cut",
    ),
    *("cut_inside", "never_ends", "garbage", "no_metrics", "no_models", "half_json"),
)


@dataclass
class Answer:
    """One request that an engine was given, and what became of it. `ended_at`: None before."""

    number: int
    engine: str
    at: float
    ended_at: float | None = None
    tokens: int = 0
    is_whole: bool = False
    was_bad: bool = False  # the engine misbehaved
    model: str = ""  # whose tokens it wrote
    goes_on: bool = False  # from what another engine has said
    told_wrong: str = ""  # what it was to go on from, if nobody had said that


@dataclass
class Asked:
    """What a prompt says."""

    n: int = 0
    model: str = ""
    chars: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 1
    gap: float = 0.01
    said: int = 0  # tokens that another engine has said
    streams: bool = True
    stamp: str = ""
    limit: int = 1 << 30
    usage: bool = False
    told: str = ""  # what it is to go on from
    hands_out: bool = False  # its KV cache, to the engine that will decode
    fetches: str = ""  # a KV cache, by what another engine answered
    response: str = ""  # the id under which it is kept
    previous: str = ""  # which one it goes on with
    room: str = ""  # where both engines of a pair meet

    @property
    def told_wrong(self) -> str:
        words = (f" {self.n}.{position}" for position in range(self.said))
        return "" if self.told in ("", "".join(words)) else self.told[-80:]


def read(body: bytes, stamp: str) -> Asked:
    fields = json.loads(body)
    content = fields.get("input") or fields.get("prompt", "")
    messages = fields.get("messages") or [{"role": "user", "content": content}]
    asked = Asked(streams=bool(fields.get("stream")), model=fields.get("model", ""))
    asked.messages = messages
    asked.chars = sum(len(str(message["content"])) for message in messages)
    for word in str(messages[0]["content"]).split():
        name, equals, value = word.partition("=")
        if equals and name in ("n", "tokens", "gap"):
            setattr(asked, name, type(getattr(asked, name))(float(value)))
    if messages[-1]["role"] == "assistant":
        asked.told = messages[-1]["content"]
        asked.said = len(asked.told.split())
    if "input" in fields:
        asked.response, asked.previous = (
            fields["request_id"],
            fields.get("previous_response_id", ""),
        )
    asked.limit = fields.get("max_tokens") or asked.limit
    transfer = fields.get("kv_transfer_params") or {}
    asked.hands_out = bool(transfer.get("do_remote_decode"))
    asked.fetches = str(transfer.get("remote_request_id", ""))
    if "bootstrap_room" in fields:
        asked.room = f"{fields['bootstrap_host']}.{fields['bootstrap_room']}"
    asked.usage = bool((fields.get("stream_options") or {}).get("include_usage"))
    if fields.get("logprobs"):
        asked.stamp = f"#{stamp}"
    return asked


class Engine:
    """One replica's. `mode`: how it answers what comes now."""

    def __init__(self, loop: VirtualLoop, dice: Random, name: str, model: str) -> None:
        self.loop, self.dice, self.name, self.model = loop, dice, name, model
        self.slots, self.role, self.kind = 8, "", "vllm"
        self.prefill_us = 0.0  # for each character of a prompt
        self.adapters: dict[str, None] = {}  # that are loaded
        self.cache: KvCache
        self.tells_kv = self.keeps_responses = False
        self.responses: set[str] = set()  # that this run of it keeps
        self.ever_kept: set[str] = set()
        self.mode = GOOD
        self.answers: list[Answer] = []
        self.open: dict[Connection, Answer] = {}
        self.said = 0
        self.kept: dict[str, int] = {}  # KV caches for others: of which request
        self.fetch: Callable[[str], int | None]  # such a one of any other engine
        self.process: Process
        self.start()

    def start(self) -> None:
        self.kept.clear()
        self.adapters.clear()
        self.cache = KvCache(self.dice)
        self.responses.clear()
        self.process = Process(self.loop, f"engine {self.name}")
        self.process.do(self._listen)

    def _listen(self) -> None:
        self.loop.create_task(
            self.loop.create_server(lambda: Connection(self), f"engine.{self.name}")
        )

    def has_kept(self, asked: Asked, answer: Answer) -> bool:
        """What it goes on with; not if the engine was started again since."""
        if asked.previous and asked.previous not in self.ever_kept:
            answer.told_wrong = f"{asked.n}, and never kept what that goes on with"
        return not asked.previous or asked.previous in self.responses

    def kill(self) -> None:
        self.process.kill()
        self.cache.end()
        for answer in self.open.values():
            answer.ended_at = self.loop.time()
        self.open.clear()


class Connection(asyncio.Protocol):
    """One of its agent's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport: Any
        self.data = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()
        self._ended()

    def _ended(self) -> None:
        answer = self.engine.open.pop(self, None)
        if answer is not None:
            answer.ended_at = self.engine.loop.time()

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not found or len(body) < length:
            return
        self.data = b""
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._page(path.decode())
        elif path == b"/v1/chat/completions":
            self.task = self.engine.loop.create_task(self._answer(body))
        elif path == b"/v1/responses" and self.engine.keeps_responses:
            if b'"input"' in body:
                self.task = self.engine.loop.create_task(self._answer(body))
            else:
                self._whole(400, b'{"error": {"message": "no input", "code": 400}}')
        elif path == b"/tokenize" and self.engine.tells_kv:
            messages = json.loads(body).get("messages")
            tokens = tokens_of(messages or [])
            self._whole(200 if messages else 400, json.dumps({"tokens": tokens}).encode())
        elif path in (LOADS, UNLOADS):
            adapter = json.loads(body)["lora_name"]
            self.engine.loop.call_later(LOAD_S, self._load, adapter, path == LOADS)
        else:
            self._whole(404, b'{"detail": "Not Found"}')

    def _page(self, path: str) -> None:
        engine, status = self.engine, 200
        if path == "/metrics":
            status = 500 if engine.mode == "no_metrics" else 200
            waiting = max(0, len(engine.open) - engine.slots)
            running = len(engine.open) - waiting
            body = (
                METRICS[engine.kind]
                .format(running=running, waiting=waiting, said=engine.said)
                .encode()
            )
        elif path == "/v1/models":
            status = 503 if engine.mode == "no_models" else 200
            adapters = [{"id": name, "parent": engine.model} for name in engine.adapters]
            listed = [{"id": engine.model}, *adapters]
            body = json.dumps({"object": "list", "data": listed}).encode()
        else:
            status, body = 404, b"{}"
        self._whole(status, body)

    def _whole(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Odd\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def _load(self, adapter: str, is_load: bool) -> None:
        engine = self.engine
        if engine.mode == NO_LOADS or is_load is (adapter in engine.adapters):
            self._whole(400, b'{"error": {"message": "no", "code": 400}}')
            return
        if is_load:
            engine.adapters[adapter] = None
        else:
            del engine.adapters[adapter]
        self._whole(200, b"{}")

    async def _answer(self, body: bytes) -> None:
        engine = self.engine
        asked = read(body, f"{engine.name}.{len(engine.answers)}")
        if not (is_known := asked.model in (engine.model, *engine.adapters)):  # some answer any
            asked.stamp = f"!{engine.model}{asked.stamp}"
        mode = GOOD if engine.mode == NO_LOADS else engine.mode
        answer = Answer(asked.n, engine.name, engine.loop.time(), was_bad=mode != GOOD)
        answer.told_wrong, answer.goes_on = asked.told_wrong, asked.said > 0
        answer.model = asked.model if is_known else engine.model
        engine.answers.append(answer)
        engine.open[self] = answer
        while list(engine.open).index(self) >= engine.slots:
            await asyncio.sleep(0.01)
        if not engine.has_kept(asked, answer):
            mode = "404"
        is_decode = engine.role == "decode"
        asked.fetches = asked.fetches or (asked.room if is_decode else "")
        new_chars = 0 if asked.fetches else min(asked.chars, PREFILL_CHARS)
        await asyncio.sleep(0.005 + engine.prefill_us * 1e-6 * new_chars)
        if engine.tells_kv:
            engine.cache.computed(tokens_of(asked.messages))
        if asked.fetches:
            cache_of = await self._fetched(asked)
            if cache_of is None:
                mode = "500"
            elif cache_of != asked.n:
                answer.told_wrong = f"{asked.n} by the KV cache of {cache_of}"
        elif asked.room:
            engine.kept[asked.room], asked.tokens = asked.n, 1
        elif engine.role and not asked.hands_out and (not is_decode or engine.kind == "sglang"):
            answer.told_wrong = f"all of {asked.n}, and it is the {engine.role} engine of a pair"
        await (self._misbehave(mode, asked, answer) if mode != GOOD else self._say(asked, answer))
        self._ended()

    async def _fetched(self, asked: Asked) -> int | None:
        """Of which request the KV cache is; where both engines meet, the other may be late."""
        engine, until = self.engine, self.engine.loop.time() + TRANSFER_S
        while (cache_of := engine.fetch(asked.fetches)) is None and asked.room:
            if engine.loop.time() > until:
                break
            await asyncio.sleep(0.05)
        return cache_of

    async def _misbehave(self, mode: str, asked: Asked, answer: Answer) -> None:  # noqa: C901
        if mode.isdigit():
            self._whole(int(mode), b'{"error": {"message": "it broke", "code": 1}}')
        elif mode == "garbage":
            self.transport.write(b"\x00\x01 what\r\n\r\n")
            self.transport.close()
        elif mode == "half_json":
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{")
            self.transport.close()
        elif mode in ("silent", "comments"):
            if mode == "comments":
                self._head()
            while True:
                await asyncio.sleep(1.0)
                if mode == "comments":
                    self._chunk(b": wait\n\n")
        elif mode == "empty":
            self._head()
            self._chunk(b"")
        elif mode in ("error_first", "error_inside"):
            said = self.engine.dice.randint(0, asked.tokens - 1) if mode == "error_inside" else 0
            await self._say(asked, answer, up_to=said)
            if not (asked.streams and answer.tokens):
                self._head()
            self._chunk(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
            self._chunk(b"")
        elif mode in ("cut", "cut_inside"):
            await self._say(
                asked, answer, up_to=self.engine.dice.randint(0, max(1, asked.tokens - 1))
            )
            if mode == "cut_inside":
                self.transport.write(b'40\r\ndata: {"cho')
            self.transport.abort()
        elif mode == "never_ends":
            await self._say(asked, answer, up_to=1 << 30)
        else:
            asked.gap *= 20 if mode == "slow" else 1
            await self._say(asked, answer)

    def _head(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    def _chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _say(self, asked: Asked, answer: Answer, up_to: int | None = None) -> None:
        """An answer up to that token, with its end if that is not given."""
        text = []
        last = min(asked.tokens, asked.said + asked.limit)
        for position in range(asked.said, last if up_to is None else up_to):
            await asyncio.sleep(asked.gap)
            token = f" {asked.n}.{position}{asked.stamp}"
            answer.tokens += 1
            self.engine.said += 1
            text.append(token)
            if asked.streams:
                if position == asked.said:
                    self._head()
                self._event({"delta": {"content": token}, "finish_reason": None})
        if up_to is not None:
            return
        prompt_tokens = 1 + asked.chars // 4
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(text),
            "total_tokens": prompt_tokens + len(text),
        }
        answer.is_whole = True
        if not asked.streams:
            if asked.response:
                engine = self.engine
                engine.responses.add(asked.response)
                engine.ever_kept.add(asked.response)
                part = {"type": "output_text", "text": "".join(text)}
                output = [{"type": "message", "role": "assistant", "content": [part]}]
                kept = {"id": asked.response, "object": "response", "status": "completed"}
                self._whole(200, json.dumps(kept | {"output": output}).encode())
                return
            message = {"role": "assistant", "content": "".join(text)}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            fields: dict[str, Any] = {"choices": choices, "usage": usage}
            if asked.hands_out:
                fields["kv_transfer_params"] = self._handed_out(asked)
            self._whole(200, json.dumps(fields).encode())
            return
        if not text:
            self._head()
        self._event({"delta": {}, "finish_reason": "stop"})
        if asked.usage:
            self._chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _handed_out(self, asked: Asked) -> dict[str, Any]:
        """As vLLM's NixlConnector tells the engine that is to decode."""
        engine = self.engine
        name = f"{engine.name}.{engine.said}"
        engine.kept[name] = asked.n
        where = {"remote_engine_id": engine.name, "remote_host": engine.name, "remote_port": 1}
        what = {"remote_request_id": name, "remote_block_ids": [[0]]}
        return {"do_remote_prefill": True, "do_remote_decode": False, **where, **what}

    def _event(self, choice: dict[str, Any]) -> None:
        fields = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        self._chunk(f"data: {json.dumps(fields)}\n\n".encode())
