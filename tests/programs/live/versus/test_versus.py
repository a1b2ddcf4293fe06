"""The benchmark beside real rivals: its parts, and all of it with few engines and requests."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from click.testing import CliRunner

from agents.sim.profiles import A100_MISTRAL
from infra.address import Address
from mesh.replay.tally import RecordedUsage, RequestOutcome, RequestResult
from mesh.replay.trace_formats import load_trace
from tests.programs.bench.processes import Processes
from tests.programs.live.versus import judge, machine
from tests.programs.live.versus.__main__ import known_systems, main
from tests.programs.live.versus.machine import MachineUse, MachineWatch
from tests.programs.live.versus.page import Played, Results, apart, page
from tests.programs.live.versus.recorded import (
    MOONCAKE_BLOCK_TOKENS,
    Recorded,
    in_time_s,
    write_conversations,
)
from tests.programs.live.versus.systems import MESH, SGLANG, SYSTEMS, delayed_links, one_way_s
from tests.programs.live.versus.twin import predict
from tests.support.ports import free_ports

REQUESTS = 80


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("versus") / "conversations.jsonl"
    return Recorded(write_conversations(path, REQUESTS), REQUESTS)


# The requests.


def test_generated_conversations_are_a_trace_of_growing_prompts(recorded):
    requests = load_trace(recorded.path, "mooncake").requests
    assert len(requests) == REQUESTS
    assert all(len(one.blocks) == -(-one.input_tokens // MOONCAKE_BLOCK_TOKENS) for one in requests)
    whole = [one.blocks[: one.input_tokens // MOONCAKE_BLOCK_TOKENS] for one in requests]
    grown = [
        (first, second)
        for at, first in enumerate(whole)
        for second in whole[at + 1 :]
        if len(first) > 4 and second[: len(first)] == first and len(second) > len(first)
    ]
    assert len(grown) > REQUESTS / 8  # a later turn begins with the earlier one's prompt


def test_equal_seeds_write_equal_files(tmp_path):
    one, same, other = (
        write_conversations(tmp_path / str(number), 20, seed).read_bytes()
        for number, seed in enumerate((3, 3, 4))
    )
    assert one == same != other


def test_the_twin_is_asked_the_same_at_the_same_times_in_the_same_regions(recorded):
    live, twin = recorded.plan(), recorded.workload().arrivals
    assert [(one.due_s, one.region, one.request.input_tokens) for one in live] == [
        (one.at_s, one.region, one.node.prompt_tokens) for one in twin
    ]
    regions = Counter(one.region for one in live)
    assert regions["us"] > max(regions["eu"], regions["ap"])


def test_a_body_has_the_recorded_prompts_length(recorded):
    bodies = recorded.bodies("m")
    for body, one in zip(bodies, recorded.plan(), strict=True):
        assert len(body) == pytest.approx(4 * one.request.input_tokens, abs=300)


# The judgement.


def result(ttft_s, outcome=RequestOutcome.OK, cached=0):
    return RequestResult(outcome, "why", 0.001, ttft_s, 9.0, usage=RecordedUsage(100, 5, cached))


def test_what_is_lost_counts_with_the_clients_patience():
    given = [
        result(1.0, cached=50),
        result(61.0),
        result(None, RequestOutcome.SHED),
        result(3.0, cached=None),
    ]
    requests = [judge.seen(one) for one in given]
    found = judge.figures(requests, [1.0, 2.0, 2.0, 2.0], duration_s=10.0)
    assert found[judge.MEAN] == (1.0 + 60.0 + 60.0 + 3.0) / 4
    assert found[judge.P50] == (3.0 + 60.0) / 2
    assert found[judge.LOST] == 2 and judge.reasons(requests) == {"patience": 1, "why": 1}
    assert found[judge.CACHED] == 50 / 200  # of the answered ones
    assert found[judge.GOODPUT] == 0.1  # the second answer in time was too late for its objective


def test_a_long_prompt_has_a_longer_objective():
    assert 1.4 < in_time_s(A100_MISTRAL, 1) < in_time_s(A100_MISTRAL, 10_000) < 60.0
    assert in_time_s(A100_MISTRAL, 1_000_000) == 60.0


# The tables.


def played(mean_s, busy=0.5, lost=""):
    figures = dict.fromkeys(judge.FIGURES, 1.0) | {judge.MEAN: mean_s}
    return Played(figures, MachineUse(2 * busy, busy, busy / 400), 0.002, lost)


def test_rounds_are_compared_with_the_meshs_and_with_the_twins():
    live = {MESH: [played(1.0), played(2.0)], SGLANG: [played(3.0), played(4.0, 0.9, "x 1")]}
    twin = {MESH: [dict.fromkeys(judge.FIGURES, 1.4)], SGLANG: [played(3.6).figures]}
    text = page(Results(live, twin, {MESH: "as by default"}), "about")
    assert "| 3.500 (3.000–4.000) |" in text and "2.50× (2.00–3.00)" in text
    assert f"| {MESH}: {judge.MEAN} | 1.500 (1.000–2.000) | 1.400 | -6.7%, hit |" in text
    assert f"| {MESH}: {judge.P50} | 1.000 (1.000–1.000) | 1.400 | +40.0%, **miss** |" in text
    assert f"| {MESH}: {judge.CACHED} | 1.000 (1.000–1.000) | 1.400 | +40.0 points |" in text
    assert (
        "| 1.40 (1.00–1.80) | 0.70 (0.50–0.90) | 1.75 (1.25–2.25) | 2.00 (2.00–2.00) | 1 | x 1 |"
        in text
    )
    assert text.startswith("about\n") and text.endswith(f"- {MESH}: as by default")


def test_apart_is_the_twins_over_the_live_ones():
    assert apart([1.0, 2.0, 9.0], [2.2]) == pytest.approx(0.1)


# The machine and the links.


def test_processes_that_wait_for_a_core_show():
    spin = "import time; end = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass"
    cores = os.cpu_count() or 1
    with contextlib.ExitStack() as started:
        for _ in range(3 * cores):
            started.enter_context(subprocess.Popen([sys.executable, "-c", spin]))
        time.sleep(0.3)
        with MachineWatch() as watch:
            time.sleep(0.4)
    use = watch.use
    assert use.is_too_busy and use.wait_s > machine.WAIT_MAX_S
    assert 0.0 < use.ours <= cores * 1.05 and use.busy > 0.5 * use.ours
    assert not MachineUse(2.0, 1.0, machine.WAIT_MAX_S).is_too_busy


async def test_links_take_half_the_round_trip_each_way(tmp_path):
    [port] = free_ports(1)

    async def echo(reader, writer):
        writer.write(await reader.read(100))
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", port), Processes(tmp_path) as started:
        [near] = await delayed_links(started, tmp_path, [(f"127.0.0.1:{port}", "ap")])
        address = Address(*near.rsplit(":", 1))
        reader, writer = await asyncio.open_connection(*address)
        asked_s = time.monotonic()
        writer.write(b"?")
        assert await reader.read(1) == b"?"
        assert time.monotonic() - asked_s >= 2 * one_way_s("ap") - 0.002
        writer.close()
    assert 2 * one_way_s("ap") == pytest.approx(0.15)


# The program.


def test_the_twin_predicts_every_system_and_loses_nothing(recorded):
    few = Recorded(recorded.path, 12)
    means = {
        name: sum(one.ttft_s for one in predict(name, few, 2, seed=0)) / 12 for name in SYSTEMS
    }
    assert means[MESH] < means[SGLANG]


def test_some_systems_can_be_left_out():
    assert known_systems(None, None, None) == SYSTEMS
    assert known_systems(None, None, "sglang-router,mesh") == (SGLANG, MESH)


@pytest.mark.timeout(600)  # it installs two routers the first time
def test_all_of_it_with_few_requests():
    words = ["--limit", "10", "--rounds", "1", "--replicas", "1", "--speed", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:]]
        for line in result.output.splitlines()
        if len(cells := line.split("|")) == 10 and cells[1].strip() in SYSTEMS
    }
    # A rival that can't be installed here is named, and the others are measured.
    absent = {name for name in SYSTEMS if f"- {name}: absent: can't be installed" in result.output}
    assert set(rows) == set(SYSTEMS) - absent >= {MESH}, result.output
    for name, row in rows.items():
        assert row[judge.FIGURES.index(judge.LOST)] == "0", f"{name}: {result.output}"
        assert f"| {name}: {judge.MEAN} |" in result.output
