"""Accounts of tokens of real routers, read by `mesh usage`: what engines counted, to the token."""

import asyncio
import csv
import itertools
import json
import time
from collections import Counter, defaultdict

import orjson
import pytest
from aiohttp import web
from click.testing import CliRunner

from infra.tenant_table import Caller, key_hash
from mesh.cli.main import main
from mesh.session import usage_book
from schemas import subjects
from schemas.batch import JobStatus
from schemas.http import CHAT, MESSAGES, RESPONSES
from tests.support.batch_mesh import EASY, BatchMesh
from tests.support.batch_regions import ROOMY
from tests.support.batch_regions import opened as batch_store
from tests.support.batch_store import request_line, submit
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh, upload

REQUESTS, LINES, AT_ONCE, SOON_S = 960, 40, 16, 20.0
KEY_B = "kb0123"
KEYS = {
    key_hash("sk-a"): Caller(key_id="ka", tenant="acme"),
    key_hash("sk-b"): Caller(key_id=KEY_B, tenant="beta"),
}
SENT = ("sk-a", "sk-b", None)
ENTRIES = ("us", "eu")
OPTIONS = ({}, {"stream_options": None})
OPTIONS += tuple({"stream_options": {"include_usage": wanted}} for wanted in (False, True))
ASKS_FOR_COUNTS = len(OPTIONS) - 1
CHATS = ("plain", "leaves", "breaks", "refused", *range(len(OPTIONS)))
PATHS = {CHAT: CHATS, MESSAGES: ("whole", "streamed"), RESPONSES: ("whole", "streamed")}
KINDS = [(path, kind) for path, kinds in PATHS.items() for kind in kinds]
UNCOUNTED = ("leaves", "breaks")  # by the engine: estimated
SUMS = ("uncached", "cached", "output")


class Counting:
    """An engine's own counters, of answers of which it says the counts."""

    def __init__(self) -> None:
        self.sums = Counter()
        self.answers, self.left = 0, 0
        self.has_begun = defaultdict(asyncio.Event)

    def behave(self, engine):
        engine.behaviour = self.answer
        engine.on_path = {MESSAGES: self.message, RESPONSES: self.response}

    async def message(self, request, body):
        cached, prompt, output = self.numbers(body["messages"][0]["content"])
        of_prompt = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
        usage = of_prompt | {"output_tokens": output}
        begins = named("message_start", message={"usage": of_prompt | {"output_tokens": 1}})
        begins += named("content_block_start", index=0)
        delta = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "x"})
        ends = named("message_delta", usage={"output_tokens": output}) + named("message_stop")
        whole = {"type": "message", "usage": usage}
        self.count(prompt, cached, output)
        return await either(request, body, whole, [begins, *[delta] * output, ends])

    async def response(self, request, body):
        cached, prompt, output = self.numbers(body["input"])
        details = {"input_tokens_details": {"cached_tokens": cached}}
        whole = {"usage": {"input_tokens": prompt, "output_tokens": output, **details}}
        delta = named("response.output_text.delta", delta="x")
        ends = named("response.completed", response=whole)
        self.count(prompt, cached, output)
        begins = named("response.created", response={"usage": None})
        return await either(request, body, whole, [begins, *[delta] * output, ends])

    @staticmethod
    def numbers(text):
        """Of a prompt: cached and all of its tokens, and those of its answer."""
        _, _, number = text.partition(" ")  # nothing is in an agent's probe
        number = int(number.partition(" ")[0] or 0)
        return number % 16, 40 + number % 70, 1 + number % 9

    async def answer(self, request, body):
        words = body["messages"][0]["content"].split()
        kind = words[0]
        if kind == "refused":
            return request_error()
        cached, prompt, output = self.numbers(body["messages"][0]["content"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not body.get("stream"):
            self.count(prompt, cached, output)
            message = {"role": "assistant", "content": "x" * output}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}
            return json_answer(answer)
        stream = await opened(request)
        for _ in range(output):
            await stream.write(event("x"))
        if kind == "leaves":
            self.left += 1
            await asyncio.Event().wait()  # until the client leaves
        if kind == "breaks":
            await self.has_begun[words[1]].wait()  # at the client, else it would be a 502
            return stream
        if (body.get("stream_options") or {}).get("include_usage"):
            self.count(prompt, cached, output)
            await stream.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def reset(self):
        self.sums.clear()
        self.answers = 0

    def count(self, prompt, cached, output):
        self.answers += 1
        self.sums.update(uncached=prompt - cached, cached=cached, output=output)


def named(name, **fields):
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


async def either(request, body, whole, events):
    """A whole answer, or its events, as the client asked."""
    if not body.get("stream"):
        return json_answer(whole)
    stream = await opened(request)
    for each in events:
        await stream.write(each)
    return stream


def json_answer(answer, status=200):
    return web.json_response(answer, status=status)


def request_error():
    return json_answer({"error": {"message": "no", "type": "invalid_request_error"}}, 400)


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    more = {"eu": 'batch_runners = ["batch-0"]\ngpu_hour_price = 2'}
    toml = mesh_toml(ENTRIES, replicas=1, more=more) + ROOMY
    with running_regions(tmp_path_factory.mktemp("usage"), toml=toml) as made:
        (made.directory / "mesh.toml").write_text(toml)
        yield made


async def usage(regions, *words):
    """What `mesh usage` ends with, as an operator types it."""
    where = ["--config", regions.directory / "mesh.toml", "--credentials", regions.directory]
    return await asyncio.to_thread(CliRunner().invoke, main, ["usage", *words, *map(str, where)])


async def rows(regions, *words):
    found = await usage(regions, *words, "--format", "json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)["rows"]


async def until_counted(regions, requests):
    async with asyncio.timeout(SOON_S):
        found = await rows(regions)
        while sum(row["requests"] for row in found) != requests:
            await asyncio.sleep(0.1)
            found = await rows(regions)
    return found


async def ask(session, mesh, counting, number, kind, key, entry, path=CHAT):
    stream = kind not in ("plain", "refused", "whole")
    fields = OPTIONS[kind] if isinstance(kind, int) else {}
    body = chat(f"{kind} {number} " + "word " * 20, stream=stream, **fields)
    if path == RESPONSES:
        body["input"] = body.pop("messages")[0]["content"]
    elif path == MESSAGES:
        body["max_tokens"] = 9
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = mesh.urls[entry] + path
    async with session.post(url, data=upload(body), headers=headers) as answer:
        assert answer.status == (400 if kind == "refused" else 200)
        if kind == "leaves":
            await answer.content.readany()
            answer.close()
        else:
            said = await answer.content.readany() if kind == "breaks" else b""
            counting.has_begun[str(number)].set()
            said += await answer.read()
            if path == CHAT:
                assert (b"prompt_tokens" in said) is (kind in ("plain", ASKS_FOR_COUNTS))


async def test_sums_are_what_engines_counted(regions, monkeypatch):
    """A thousand at two regions, one of which has the replica: chats, messages, responses and lines
    of a batch job; forms of answers, forms of asking for counts, clients that leave, streams that
    break, requests that the engine refuses."""
    monkeypatch.setattr(usage_book, "ROWS_MAX", 1)  # several pages
    asked = Counter()
    counting = Counting()
    async with (
        scripted_engine() as engine,
        small_mesh(regions) as mesh,
        client() as session,
        batch_store(regions, "eu") as store,
    ):
        counting.behave(engine)
        for region in ENTRIES:
            await mesh.router(region, keys=KEYS, **PATIENT)
        await mesh.agent("eu", "eu-0", engine, profile=EASY)
        for path in PATHS:
            await mesh.until_ready("eu", 1, "tiny" if path == CHAT else f"tiny on {path}")
        await mesh.until_peer("us", "eu")
        batch = BatchMesh(regions, mesh, store)
        await batch.runner("eu")
        counting.reset()  # of an agent's probes
        # Of neighbours one breaks: after three in a row the engine would be taken for a bad one.
        mixed = itertools.product(SENT, ENTRIES, KINDS)
        todo = list(enumerate(itertools.islice(itertools.cycle(mixed), REQUESTS)))

        async def worker():
            while todo:
                number, (key, entry, (path, kind)) = todo.pop()
                asked[kind, key] += 1
                await ask(session, mesh, counting, number, kind, key, entry, path)

        lines = b"".join(request_line(f"{n}", content=f"plain {n}") for n in range(LINES))
        job = await submit(store, lines, tenant="jobs")
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        await batch.until(job, JobStatus.COMPLETED)
        served = REQUESTS + LINES - sum(asked["refused", key] for key in SENT)
        found = await until_counted(regions, served)

        uncounted = sum(asked[kind, key] for kind in UNCOUNTED for key in SENT)
        assert sum(row["estimated_requests"] for row in found) == uncounted > 0
        assert served - uncounted == counting.answers
        by_engine = Counter()
        for row in found:
            by_engine["prompt"] += row["uncached"] + row["cached"] - row["estimated_prompt"]
            by_engine["output"] += row["output"] - row["estimated_output"]
            assert row["served_region"] == "eu" and row["model"] == "tiny"
        assert [(row["tenant"], row["requests"]) for row in found if row["kind"] == "batch"] == [
            ("jobs", LINES)
        ]
        sums = counting.sums
        assert by_engine["prompt"] == sums["uncached"] + sums["cached"]
        assert by_engine["output"] == sums["output"]
        for key, sent in (("ka", "sk-a"), (KEY_B, "sk-b"), ("", None)):
            of_key = sum(n for (kind, by), n in asked.items() if by == sent and kind != "refused")
            online = (row for row in found if row["kind"] == "online")
            assert sum(row["requests"] for row in online if row["key"] == key) == of_key
        assert await rows(regions, "--tenant", "acme") == [
            row for row in found if row["key"] == "ka"
        ]
        assert await rows(regions, "--key", KEY_B[:4]) == [
            row for row in found if row["key"] == KEY_B
        ]
        assert await rows(regions, "--key", KEY_B, "--model", "tiny", "--region", "eu", "--daily")
        for row in await rows(regions, "--day", today := time.strftime("%Y-%m-%d", time.gmtime())):
            assert row["day"] == today
        assert await rows(regions, "--month", today[:7]) == found
        for nothing in (("--region", "us"), ("--model", "m"), ("--day", "2020-01-01")):
            assert await rows(regions, *nothing) == []
        empty = await usage(regions, "--month", "2024-02")
        told = "nothing was counted from 2024-02-01 to 2024-02-29\n"
        assert (empty.exit_code, empty.stderr) == (0, told)
        for wrong in (("--month", "2024-13"), ("--month", today[:7], "--day", today)):
            assert (await usage(regions, *wrong)).exit_code == 2
        empty = await usage(regions, "--tenant", "nosuch", "--day", today)
        told = f"nothing was counted of tenant nosuch on {today}\n"
        assert (empty.exit_code, empty.stdout, empty.stderr) == (0, "", told)
        unknown = await usage(regions, "--region", "zz")
        assert unknown.exit_code == 2 and "no region 'zz'; there are us, eu" in unknown.stderr
        table, text = await usage(regions), await usage(regions, "--format", "csv")
        assert table.stdout.splitlines()[1].split()[:5] == ["-", "-", "tiny", "eu", "online"]
        read = list(csv.DictReader(text.stdout.splitlines()))
        total = table.stdout.splitlines()[-1].split()
        counted = [name for name, value in found[0].items() if isinstance(value, int)]
        assert total == ["total", *(str(sum(row[name] for row in found)) for name in counted)]
        assert [{name: row[name] for name in row if name != "day"} for row in found] == [
            {name: type(found[0][name])(value) for name, value in row.items()} for row in read
        ]

        # What is lost of the stream is written again, and no sum is counted twice.
        setup = await regions.connect("us", "setup")
        kept = await setup.jetstream().stream_info(subjects.STREAM_USAGE)
        assert kept.config.max_age == 400 * 86_400
        await setup.jetstream().delete_stream(subjects.STREAM_USAGE)
        await setup.close()
        await regions.set_up("us")
        await ask(session, mesh, counting, 1, "plain", "sk-a", "us")
        again = await until_counted(regions, served + 1)
        assert sum(row["output"] for row in again) == sum(row["output"] for row in found) + 2

        await regions.stop_one("us")
        partial = await usage(regions, "--format", "json")
        assert partial.exit_code == 1
        assert partial.stderr.startswith("us: not read, so what its clients used is missing:")
        assert list(json.loads(partial.stdout)["unread"]) == ["us"]
        assert 0 < sum(row["requests"] for row in json.loads(partial.stdout)["rows"]) < served
        await regions.start_one("us")
