"""The command: a whole short run on the simulated engine, every error that a person can make, and
what is left after Ctrl-C."""

import asyncio
import contextlib
import signal
import sys
import xml.dom.minidom
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agents.cli import main
from agents.core.engine_curves import decode_calibrated
from agents.core.offline_profile import decode_profile
from agents.core.slo_profile import Measure
from agents.sim.profile_files import find_profile
from agents.sim.profiles import L4_LLAMA
from tests.agents.simserver.support import config, running
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S

LOAD = (
    *("--online-rps", "8", "--online-prompt-tokens", "60", "--online-output-tokens", "12"),
    *("--offline-prompt-tokens", "200", "--offline-output-tokens", "20"),
)
FASTER = 4.0
LOOSE = ("--slo", "tbt-p99=60s", "--slo", "ttft-mean=60s")


@contextlib.asynccontextmanager
async def profiling(url: str, *options: str) -> AsyncIterator[Process]:
    """The command as a process, killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents.cli", "profile", "--engine-url", url, *LOAD, *options),
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said_by(process: Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_whole_run_writes_a_profile_a_picture_and_a_table(
    tmp_path: Path,
) -> None:
    out = tmp_path / "profile.json"
    async with running(config(profile=L4_LLAMA, time_scale=6.0, max_seqs=2)) as engine:
        options = ("--duration-s", "6", "--batch-max", "2", "--calibrate", "--out", str(out))
        options = (*options, *LOOSE, "--burst-s", "0.5")
        async with profiling(engine.url, *options) as process:
            code, said, told = await said_by(process)
        assert code == 0, told
        numbers = await engine.metrics()
    assert numbers["vllm:num_requests_running"] == numbers["vllm:num_requests_waiting"] == 0
    profile = decode_profile(out.read_bytes())
    print(f"mean error of the prediction: {profile.predictor_error:.1%}; {told}")
    assert (profile.engine, profile.model) == ("vllm", "sim/tiny")
    assert profile.limits_s == {Measure.TBT_P99: 60.0, Measure.TTFT_MEAN: 60.0}
    assert 0.0 < profile.predictor_error < 1.0
    assert profile.burst_s == 0.5
    assert profile.curves is not None
    assert profile.curves.chunk_tokens == profile.chunk_tokens
    assert find_profile(str(out)).max_seqs == 2
    assert len(profile.trials) == 5  # of a search among 31 budgets
    assert all(trial.kept for trial in profile.trials)
    assert profile.latency_budget_s == max(trial.budget_s for trial in profile.trials)
    assert max(trial.offline_tokens_per_s for trial in profile.trials) > 0
    assert "mean error of the prediction" in told
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert len(rows) == 6
    assert f"{profile.latency_budget_s * 1000:.1f}" in said
    picture = xml.dom.minidom.parse(str(tmp_path / "profile.svg"))
    texts = [text.firstChild.data for text in picture.getElementsByTagName("text")]
    assert any(text.startswith("p99 TBT") for text in texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "profile.svg"]


async def test_an_engine_is_calibrated_without_any_objective(tmp_path: Path) -> None:
    out = tmp_path / "us-0.json"
    async with running(config(profile=L4_LLAMA, time_scale=FASTER, max_seqs=4)) as engine:
        options = ("--calibrate", "--duration-s", "5", "--batch-max", "4", "--out", str(out))
        async with profiling(engine.url, *options) as process:
            code, said, told = await said_by(process)
        assert code == 0, told
        assert f"mesh sim --profile {out}" in said
        numbers = await engine.metrics()
    assert numbers["vllm:num_requests_running"] == numbers["vllm:num_requests_waiting"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["us-0.json"]
    found = find_profile(str(out))
    print(found)
    assert (found.name, found.model, found.max_seqs) == ("us-0", "sim/tiny", 4)
    cached = decode_calibrated(out.read_bytes()).curves.cached
    assert {256, 512} <= {point.cached_tokens for point in cached}
    # Medians of rounds: a machine that stands still now and then doesn't move them far.
    assert found.alone_s(512) * FASTER == pytest.approx(L4_LLAMA.alone_s(512), rel=0.5)
    assert found.decode_s(2, 64) * FASTER == pytest.approx(L4_LLAMA.decode_s(2, 64), rel=0.5)


async def test_an_objective_that_online_requests_break_alone_is_named(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    async with running(config(profile=L4_LLAMA, time_scale=20.0)) as engine:
        options = ("--duration-s", "6", "--out", str(out), "--slo", "ttft-p99=0.01ms")
        async with profiling(engine.url, *options, "--slo", "tbt-p99=60s") as process:
            code, _, told = await said_by(process)
    assert code == 1
    assert "even without offline work p99 TTFT is" in told and "p99 TBT" not in told
    assert not list(tmp_path.iterdir())


async def test_ctrl_c_leaves_no_request_and_no_file(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    async with running(config(profile=L4_LLAMA, time_scale=1.0)) as engine:
        options = ("--duration-s", "600", "--out", str(out), *LOOSE)
        async with profiling(engine.url, *options) as process:
            await engine.until(lambda numbers: numbers["vllm:num_requests_running"] >= 2)
            process.send_signal(signal.SIGINT)
            code, _, told = await said_by(process)
            assert code == 130
            assert "no request is left at the engine" in told
        await engine.until(
            lambda numbers: (
                not numbers["vllm:num_requests_running"]
                and not numbers["vllm:num_requests_waiting"]
            )
        )
    assert not list(tmp_path.iterdir())


def run_wrong(*options: str) -> str:
    """What it says about options that it refuses."""
    result = CliRunner().invoke(main, ["profile", *options])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


BASE = ("--engine-url", "http://127.0.0.1:9", "--out", "unused.json")
RATE = ("--online-rps", "1")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((*BASE, *RATE), "give an objective"),
        ((*BASE, *RATE, "--tolerance", "ttft-p99=ten"), "'ten' is no tolerance"),
        ((*BASE, *RATE, "--tolerance", "ttft-p99=0.1"), "write it in per cent"),
        ((*BASE, *RATE, "--tolerance", "ttft-p99=-5%"), "is no tolerance"),
        ((*BASE, *RATE, "--tolerance", "ttft-p99=1001%"), "is no tolerance"),
        ((*BASE, *RATE, "--tolerance", "ttft-p99"), "lacks its value"),
        ((*BASE, *RATE, "--tolerance", "ttft-p98=5%"), 'did you mean "ttft-p99"'),
        ((*BASE, *RATE, "--slo", "tbt-p99=50"), "write it in ms or s"),
        ((*BASE, *RATE, "--slo", "tbt-p99=0ms"), "is no limit"),
        ((*BASE, *RATE, "--slo", "tbt-p99=1ms", "--slo", "tbt-p99=2ms"), "given twice"),
        ((*BASE, *RATE, "--slo", "tbt-p99=1ms", "--tolerance", "tbt-p99=2%"), "one of them"),
        ((*BASE, "--slo", "tbt-p99=1ms"), "--online-rps or --trace"),
        ((*BASE, *RATE, "--trace", __file__, *LOOSE), "--online-rps or --trace"),
        ((*BASE, "--trace", __file__, *LOOSE), "line 1: Invalid JSON"),
        ((*BASE, "--online-rps", "0", *LOOSE), "--online-rps"),
        ((*BASE, *RATE, *LOOSE, "--duration-s", "1"), "--duration-s"),
        ((*BASE, *RATE, *LOOSE, "--batch-max", "0"), "--batch-max: must be at least 1"),
        ((*BASE, *RATE, *LOOSE, "--picture", "unused.json"), "the same file"),
        (("--engine-url", "ftp://x", "--out", "x", *RATE, *LOOSE), "give it as http://host:port"),
        (("--engine-url", "http://x/v1", "--out", "x", *RATE, *LOOSE), "without /v1"),
        (
            ("--engine-url", "http://x", "--out", "/nowhere/x.json", *RATE, *LOOSE),
            "can't write /nowhere/x.json: No such file",
        ),
    ],
)
def test_wrong_options(options: tuple[str, ...], says: str) -> None:
    assert says in run_wrong(*options)


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    [port] = free_ports(1)
    url, out = f"http://127.0.0.1:{port}", str(tmp_path / "p.json")
    options = ["profile", "--engine-url", url, "--out", out, *RATE, *LOOSE]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 1
    assert f"no connection to 127.0.0.1:{port}" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
