"""Accounts of tokens of real routers, read by `mesh usage`: what engines counted, to the token."""

import asyncio
import csv
import itertools
import json
import time
from collections import Counter

import orjson
import pytest
from aiohttp import web
from click.testing import CliRunner

from infra.tenant_table import Caller, key_hash
from mesh.cli.main import main
from mesh.session import usage_book
from schemas import subjects
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.scripted_engine import event, opened, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh, upload

REQUESTS, AT_ONCE, SOON_S = 300, 16, 20.0
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
KINDS = ("plain", "leaves", "refused", *range(len(OPTIONS)))
SUMS = ("uncached", "cached", "output")


class Counting:
    """An engine's own counters, of answers of which it says the counts."""

    def __init__(self) -> None:
        self.sums = Counter()
        self.answers, self.left = 0, 0

    async def answer(self, request, body):
        words = body["messages"][0]["content"].split()
        kind, number = words[0], int(words[1])
        if kind == "refused":
            return request_error()
        cached, prompt, output = number % 16, 40 + number % 70, 1 + number % 9
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
        if (body.get("stream_options") or {}).get("include_usage"):
            self.count(prompt, cached, output)
            await stream.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def count(self, prompt, cached, output):
        self.answers += 1
        self.sums.update(uncached=prompt - cached, cached=cached, output=output)


def json_answer(answer, status=200):
    return web.json_response(answer, status=status)


def request_error():
    return json_answer({"error": {"message": "no", "type": "invalid_request_error"}}, 400)


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    toml = mesh_toml(ENTRIES, replicas=1)
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


async def ask(session, mesh, number, kind, key, entry):
    stream = kind not in ("plain", "refused")
    fields = OPTIONS[kind] if isinstance(kind, int) else {}
    body = chat(f"{kind} {number} " + "word " * 20, stream=stream, **fields)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    url = mesh.urls[entry] + "/v1/chat/completions"
    async with session.post(url, data=upload(body), headers=headers) as answer:
        assert answer.status == (400 if kind == "refused" else 200)
        if kind == "leaves":
            await answer.content.readany()
            answer.close()
        else:
            shows_counts = b"prompt_tokens" in await answer.read()
            assert shows_counts is (kind in ("plain", ASKS_FOR_COUNTS))


async def test_sums_are_what_engines_counted(regions, monkeypatch):
    """Mixed requests at two regions, one of which has the replica: forms of answers, forms of
    asking for counts, clients that leave, requests that the engine refuses."""
    monkeypatch.setattr(usage_book, "ROWS_MAX", 1)  # several pages
    asked = Counter()
    counting = Counting()
    async with scripted_engine() as engine, small_mesh(regions) as mesh, client() as session:
        engine.behaviour = counting.answer
        for region in ENTRIES:
            await mesh.router(region, keys=KEYS, **PATIENT)
        await mesh.agent("eu", "eu-0", engine)
        await mesh.until_ready("eu", 1)
        await mesh.until_peer("us", "eu")
        mixed = itertools.product(KINDS, SENT, ENTRIES)
        todo = list(enumerate(itertools.islice(itertools.cycle(mixed), REQUESTS)))

        async def worker():
            while todo:
                number, (kind, key, entry) = todo.pop()
                asked[kind, key] += 1
                await ask(session, mesh, number, kind, key, entry)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        served = REQUESTS - sum(asked["refused", key] for key in SENT)
        found = await until_counted(regions, served)

        left = sum(asked["leaves", key] for key in SENT)
        assert sum(row["estimated_requests"] for row in found) == left
        assert served - left == counting.answers
        by_engine = Counter()
        for row in found:
            by_engine["prompt"] += row["uncached"] + row["cached"] - row["estimated_prompt"]
            by_engine["output"] += row["output"] - row["estimated_output"]
            assert row["served_region"] == "eu" and row["model"] == "tiny"
        sums = counting.sums
        assert by_engine["prompt"] == sums["uncached"] + sums["cached"]
        assert by_engine["output"] == sums["output"]
        for key, sent in (("ka", "sk-a"), (KEY_B, "sk-b"), ("", None)):
            of_key = sum(asked[kind, sent] for kind in KINDS if kind != "refused")
            assert sum(row["requests"] for row in found if row["key"] == key) == of_key
        assert await rows(regions, "--tenant", "acme") == [
            row for row in found if row["key"] == "ka"
        ]
        assert await rows(regions, "--key", KEY_B[:4]) == [
            row for row in found if row["key"] == KEY_B
        ]
        assert await rows(regions, "--key", KEY_B, "--model", "tiny", "--region", "eu", "--daily")
        for row in await rows(regions, "--day", today := time.strftime("%Y-%m-%d", time.gmtime())):
            assert row["day"] == today
        for nothing in (("--region", "us"), ("--model", "m"), ("--day", "2020-01-01")):
            assert await rows(regions, *nothing) == []
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
        await setup.jetstream().delete_stream(subjects.STREAM_USAGE)
        await regions.set_up("us")
        await ask(session, mesh, 1, "plain", "sk-a", "us")
        again = await until_counted(regions, served + 1)
        assert sum(row["output"] for row in again) == sum(row["output"] for row in found) + 2

        await regions.stop_one("us")
        partial = await usage(regions, "--format", "json")
        assert partial.exit_code == 1
        assert partial.stderr.startswith("us: not read, so what its clients used is missing:")
        assert list(json.loads(partial.stdout)["unread"]) == ["us"]
        assert 0 < sum(row["requests"] for row in json.loads(partial.stdout)["rows"]) < served
        await regions.start_one("us")
