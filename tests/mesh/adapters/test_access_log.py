"""Lines of the access log: what they say, that no value can end one, and a reader that is slow."""

import asyncio
import os
from dataclasses import replace

import orjson
import pytest

from mesh.adapters.access_log import (
    LINES_TOGETHER,
    AccessLog,
    AccessLogFormat,
    LineWriter,
    parts,
    quoted_once,
)
from mesh.core.model import effects as fx
from mesh.explain.files import read_line
from mesh.session.record import UNKNOWN, Ending
from schemas.decision import Decision, Placement
from tests.support.until import until

DECISION = Decision(
    request="r", region="us", policy="mesh", placement=Placement.PEER, peer="eu", hops=1,
    attempt=2, held_s=0.25, reason='first token in 0.3 s: the "least"',
)  # fmt: skip
HELD = Ending(
    request="r", trace="ab" * 16, method="POST", route="/v1/completions", outcome="ok", status=200,
    model="tiny", tenant="acme", origin="", region="eu", replica="eu-0", peer_held_s=7.75,
    numbers=(10, 4, 3, 0.1), sent_bytes=97, is_stream=True, fault="", detail="", arrived_at=1.0,
    started_at=9.1, ended_at=9.5, decided=fx.Decided(1, DECISION), steps=(),
)  # fmt: skip
PLAIN = HELD._replace(
    trace="", tenant="", peer_held_s=0.0, numbers=UNKNOWN, is_stream=False, decided=None
)
NASTY = ['a"b', "a b=c", "a\nts=x id=forged", "a\r\x1b[2Jb", "a\x7f\x85\u2028b", "\udcff", "\\"]


def line(ended: Ending, style: AccessLogFormat = AccessLogFormat.LOGFMT) -> str:
    log = AccessLog("us/r1", style)
    [text] = log._words([ended], 1_700_000_000.25 - HELD.ended_at)
    return text


def test_a_line_of_a_forwarded_stream():
    assert line(HELD) == (
        f"ts=2023-11-14T22:13:20.250Z router=us/r1 id=r method=POST route=/v1/completions "
        f"model=tiny tenant=acme outcome=ok status=200 region=eu replica=eu-0 placement=peer "
        f'hops=1 attempts=2 held_s=0.250 reason="first token in 0.3 s: the \\"least\\"" '
        f"trace={'ab' * 16} "
        f"peer_held_s=7.750 ttft_s=8.100 tokens_in=10 tokens_cached=4 tokens_out=3 "
        f"duration_s=8.500 bytes=97\n"
    )


@pytest.mark.parametrize("style", [AccessLogFormat.LOGFMT, AccessLogFormat.JSON])
def test_a_line_names_both_replicas_of_a_pair(style):
    made = replace(DECISION, placement=Placement.LOCAL, replica="us-1", prefill="us 0")
    text = line(HELD._replace(replica="us-1", decided=fx.Decided(1, made)), style)
    said = orjson.loads(text) if style is AccessLogFormat.JSON else read_line(text)
    assert (said["replica"], said["prefill_replica"]) == ("us-1", "us 0")


@pytest.mark.parametrize("style", [AccessLogFormat.LOGFMT, AccessLogFormat.JSON])
def test_a_request_that_its_engine_refused_is_not_ok(style):
    text = line(HELD._replace(status=404), style)
    said = orjson.loads(text) if style is AccessLogFormat.JSON else read_line(text)
    assert (said["outcome"], str(said["status"])) == ("refused", "404")


def test_what_is_not_known_is_absent():
    said = read_line(line(PLAIN))
    assert said is not None
    absent = {"trace", "tenant", "peer_held_s", "tokens_in", "tokens_cached", "tokens_out"}
    assert said.keys().isdisjoint({*absent, "ttft_s", "placement", "held_s", "error", "detail"})


@pytest.mark.parametrize("ended", [HELD, PLAIN], ids=["held", "plain"])
def test_json_says_the_same_as_logfmt(ended):
    as_json = orjson.loads(line(ended, AccessLogFormat.JSON))
    as_text = read_line(line(ended))
    assert as_text is not None and as_json.keys() == as_text.keys()
    for name, text in as_text.items():
        value = as_json[name]
        assert (float(text) if isinstance(value, int | float) else text) == value, name


@pytest.mark.parametrize("style", [AccessLogFormat.LOGFMT, AccessLogFormat.JSON])
@pytest.mark.parametrize("text", NASTY)
def test_no_value_ends_a_line_or_forges_a_field(text, style):
    written = line(HELD._replace(request=text, model=text, detail=text, route=text), style)
    assert written.endswith("\n") and written.count("\n") == 1
    assert not any(ord(one) < 0x20 for one in written[:-1])
    said = read_line(written)
    assert said is not None and said["router"] == "us/r1"
    if style is AccessLogFormat.LOGFMT:
        assert written.isascii() and "\x7f" not in written
        assert said["id"] == text


def test_a_value_is_bounded():
    assert len(quoted_once("x" * 10_000)) == 256
    assert len(line(HELD._replace(model="x" * 10_000))) < 1000


def test_lines_are_written_whole():
    data = (
        b"".join(b"%d %s\n" % (number, b"x" * 300) for number in range(100)) + b"y" * 9000 + b"\n"
    )
    cut = parts(data)
    assert b"".join(cut) == data
    assert all(part.endswith(b"\n") for part in cut)
    assert max(map(len, cut[:-1])) <= 4096


async def test_a_pipe_that_nobody_reads_costs_lines_and_not_the_loop():
    read, write = os.pipe()
    log = AccessLog("us/r1", descriptor=write)
    log._writer = LineWriter(write, waiting_bytes_max=100_000)
    log.open()
    for _ in range(2000):  # 600 KB: the pipe holds 64
        log.write(HELD)
        if len(log.waiting) > 50:
            log.pass_on()
    got = b""
    while b"access_log_lost=" not in got:  # it is read again, and says what was lost
        got += await asyncio.to_thread(os.read, read, 65536)
        log.write(HELD)
        log.pass_on()
    lines = got.decode().splitlines()
    lost = [int(text.partition("=")[2]) for text in lines if text.startswith("access_log_lost=")]
    assert min(lost) > 0
    assert all(text.startswith(("ts=", "access_log_lost=")) for text in lines[:-1])
    drain = asyncio.create_task(asyncio.to_thread(_read_all, read))
    await log.close()
    os.close(write)
    await drain
    os.close(read)


def _read_all(descriptor: int) -> None:
    while os.read(descriptor, 65536):
        pass


async def test_the_end_writes_every_line_that_waits_for_its_time(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        log = AccessLog("us/r1", descriptor=file.fileno(), every_s=3600.0)
        log.open()
        for _ in range(2 * LINES_TOGETHER + 1):
            log.write(HELD)
        await log.close()
        log.write(HELD)
    assert (tmp_path / "log").read_text().count("\n") == 2 * LINES_TOGETHER + 1


async def test_one_turn_of_the_loop_puts_few_lines_into_words(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        log = AccessLog("us/r1", descriptor=file.fileno(), every_s=3600.0)
        log.open()
        for _ in range(2 * LINES_TOGETHER + 1):
            log.write(HELD)
        log.pass_on()
        waiting = [len(log.waiting)]
        while log.waiting:
            await asyncio.sleep(0)
            waiting.append(len(log.waiting))
        assert waiting == [LINES_TOGETHER + 1, 1, 0]
        await log.close()


async def test_a_reader_that_is_gone_ends_the_log_and_not_the_router(caplog):
    read, write = os.pipe()
    os.close(read)
    log = AccessLog("us/r1", descriptor=write)
    log.open()
    log.write(HELD)
    await until(lambda: log._writer._is_broken)
    log.write(HELD)
    await log.close()
    assert "the access log ended, the router goes on" in caplog.text
    os.close(write)
