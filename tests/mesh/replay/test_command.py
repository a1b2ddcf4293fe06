"""`mesh replay` as people run it: a process, real endpoints, a file at the end."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from mesh.cli.replay import command
from mesh.replay.trace import TraceRequest
from mesh.replay.trace_formats import load_trace
from tests.mesh.replay import endpoint as scripts
from tests.mesh.replay.endpoint import Endpoint, serving
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S

RECORDED = "tests/data/mooncake/conversation_first60.jsonl"
QUICK = ("--trace", RECORDED, "--speed", "20", "--scale-lengths", "0.02")
KEYS = {"requests", "ok", "shed", "failed", "ttft_s", "e2e_s", "itl_s"} | {
    "output_tokens_per_s",
    "cached_token_ratio",
}


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def complaints(self) -> list[str]:
        """What it printed besides its progress, as it does every ten seconds."""
        return [line for line in self.stderr.splitlines() if " sent: " not in line]


@asynccontextmanager
async def running(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "mesh.cli.main", "replay", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def end_of(process: asyncio.subprocess.Process) -> Ended:
    async with asyncio.timeout(PATIENCE_S):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, stdout.decode(), stderr.decode())


async def replay(*arguments: object) -> Ended:
    async with running(*arguments) as process:
        return await end_of(process)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def is_accounted(figures: dict[str, Any]) -> bool:
    counted: int = figures["ok"] + figures["shed"] + figures["failed"]
    return counted == figures["requests"]


async def test_a_run_over_two_regions_accounts_for_every_request(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with serving(Endpoint()) as us, serving(Endpoint()) as eu:
        ended = await replay(
            "--url", f"us={us.url}", "--url", f"eu={eu.url}/v1", *QUICK, "--out", out
        )
    assert (ended.code, ended.complaints) == (0, [])
    report = orjson.loads(out.read_bytes())
    assert report.keys() >= KEYS
    assert (report["requests"], report["ok"], report["failed"]) == (60, 60, 0)
    assert report["regions"].keys() == {"us", "eu"}
    for name, server in (("us", us), ("eu", eu)):
        figures = report["regions"][name]
        assert figures.keys() >= KEYS
        assert is_accounted(figures)
        assert figures["requests"] == len(server.requests) > 10
    assert 0 < report["ttft_s"]["p50"] <= report["ttft_s"]["p99"] < report["e2e_s"]["p99"] * 1.01
    assert 0 < report["cached_token_ratio"] < 1
    assert report["output_tokens_per_s"] > 0
    asked, reported = report["prompt_tokens"]["asked"], report["prompt_tokens"]["reported"]
    assert reported == pytest.approx(asked, rel=0.01)
    assert report["model"] == "test/model"
    assert ["all", "60", "60", "0", "0"] in [row[:5] for row in rows(ended.stdout)]


async def test_what_was_shared_in_the_trace_is_shared_on_the_wire(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with serving(Endpoint()) as us:
        await replay("--url", f"us={us.url}", *QUICK, "--limit", 20, "--out", out)
    recorded = [orjson.loads(line) for line in Path(RECORDED).read_bytes().splitlines()[:20]]
    # Requests of one moment may overtake each other: who is who is seen by the two lengths.
    asked = {(asked["max_tokens"], len(prompt_of(asked))): asked for asked in us.requests}
    lengths = [(of.output_tokens, 4 * of.input_tokens) for of in scaled(20)]
    assert len(set(lengths)) == len(recorded) == len(us.requests)
    block_bytes = round(512 * 0.02) * 4
    texts = {}
    for key, record in zip(lengths, recorded, strict=True):
        prompt = prompt_of(asked[key])
        for place, block in enumerate(record["hash_ids"][:-1]):
            text = prompt[place * block_bytes : (place + 1) * block_bytes]
            assert texts.setdefault(block, text) == text
    assert len(set(texts.values())) == len(texts) > 50
    assert [output_tokens for output_tokens, _ in lengths] == [
        max(1, round(record["output_length"] * 0.02)) for record in recorded
    ]


def prompt_of(asked: dict[str, Any]) -> str:
    content: str = asked["messages"][0]["content"]
    return content


def scaled(requests: int) -> Sequence[TraceRequest]:
    return load_trace(Path(RECORDED), "mooncake").scaled(0.02).requests[:requests]


async def test_shed_and_failed_requests_are_counted_apart_per_region(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with serving(Endpoint()) as us, serving(Endpoint()) as eu:
        us.behave, eu.behave = scripts.status(429), scripts.body(scripts.WORD)
        ended = await replay(
            "--url",
            f"us={us.url}",
            "--url",
            f"eu={eu.url}",
            *QUICK,
            "--assign",
            "round-robin",
            "--weight",
            "us=3",
            "--out",
            out,
        )
    assert (ended.code, ended.complaints) == (0, [])
    report = orjson.loads(out.read_bytes())
    assert (report["ok"], report["shed"], report["failed"]) == (0, 45, 15)
    assert report["failures"] == report["regions"]["eu"]["failures"] == {"truncated": 15}
    assert report["ttft_s"]["p50"] is None
    assert report["cached_token_ratio"] is None
    assert "failed: truncated 15" in ended.stdout


async def test_a_run_in_which_all_failed_is_an_error() -> None:
    async with serving(Endpoint()) as us:
        us.behave = scripts.status(500)
        ended = await replay("--url", f"us={us.url}", *QUICK, "--limit", 3)
    assert ended.code == 1
    assert "failed: status_500 3" in ended.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_run_reports_its_results_so_far(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "out.json"
    async with serving(Endpoint()) as us:
        us.behave = scripts.stall_inside
        options = ("--url", f"us={us.url}", "--trace", RECORDED, "--speed", "1", "--out", out)
        async with running(*options) as process:
            await us.wait_for(2)
            process.send_signal(number)
            ended = await end_of(process)
    assert ended.code == code
    report = orjson.loads(out.read_bytes())
    assert report["interrupted"] is True
    assert report["planned"] == 60
    assert 2 <= report["requests"] < 60
    assert report["failures"] == {"interrupted": report["requests"]}
    assert "failed: interrupted" in ended.stdout


GOOD = {"--url": "us=http://127.0.0.1:9", "--trace": RECORDED}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"--url": None}, "--url"),
        ({"--url": "us"}, "--url us: name the region before it, as REGION=URL"),
        ({"--url": "http://127.0.0.1:8101"}, "name the region before it, as REGION=URL"),
        ({"--url": "http://127.0.0.1:8101/?a=b"}, "name the region before it, as REGION=URL"),
        ({"--url": "us="}, "--url: '' is no endpoint: write REGION=http://host:port"),
        ({"--weight": "2"}, "--weight 2: name the region before it, as REGION=NUMBER"),
        ({"--url": "us=ftp://127.0.0.1"}, "is no endpoint"),
        ({"--url": "us=http://127.0.0.1:99999"}, "is no endpoint"),
        ({"--url": "US=http://127.0.0.1"}, "region name 'US'"),
        ({"--trace": "missing.jsonl"}, "can't read trace missing.jsonl"),
        ({"--trace": "pyproject.toml"}, "pyproject.toml: line 1: not a JSON object"),
        ({"--format": "azur"}, "--format: unknown format 'azur': use one of mooncake"),
        ({"--speed": "0"}, "--speed: must be more than 0, not 0"),
        ({"--speed": "nan"}, "--speed: must be"),
        ({"--speed": "fast"}, "'fast' is not a valid float"),
        ({"--limit": "0"}, "--limit: must be at least 1, not 0"),
        ({"--assign": "luck"}, "--assign: unknown rule 'luck': use one of hash, round-robin"),
        ({"--weight": "eu=1"}, "--weight names eu, which has no --url"),
        ({"--weight": "us=-1"}, "--weight: must be more than 0, not -1"),
        ({"--scale-lengths": "1.5"}, "--scale-lengths: must be at most 1, not 1.5"),
        ({"--scale-lengths": "0.001"}, "scale lengths down less"),
        ({"--out": "no/such/folder/out.json"}, "give a file in a folder that exists"),
        ({"--max-in-flight": "999999999"}, "lower it, or raise `ulimit -Hn`"),
        ({"--url": f"us=http://127.0.0.1:{free_ports(1)[0]}"}, "doesn't answer"),
    ],
)
def test_bad_input_is_one_clear_line(changes: dict[str, str | None], problem: str) -> None:
    options: Sequence[str] = [
        word for name, value in (GOOD | changes).items() if value for word in (name, value)
    ]
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert problem in result.stderr.splitlines()[-1]


def test_a_region_named_twice_is_refused() -> None:
    twice = ("--url", GOOD["--url"], "--url", GOOD["--url"], "--trace", RECORDED)
    result = CliRunner().invoke(command, twice)
    assert result.exit_code == 2
    assert "--url names region us twice" in result.stderr
