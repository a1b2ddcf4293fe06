"""`mesh sim` as people run it: lists in, tables and files out, and every mistake named."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mesh.cli.sim import command
from mesh.core.model.settings import RouterSettings
from tests.mesh.sim.test_recording_replay import chaos_lines

TRACE = ("--trace", "tests/data/mooncake/conversation_first60.jsonl")
QUICK = (*TRACE, "--limit", "12", "--scale-lengths", "0.05", "--regions", "us=1,eu=1")


def sim(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def without_clock(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    for report in found["policies"].values():
        assert report.pop("decisions_per_s") > 0
    return found


def test_policies_stand_beside_each_other_in_table_and_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ended = sim(*QUICK, "--policy", "round-robin,least-load", "--out", out)
    assert (ended.exit_code, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[:3] for line in lines[1:3]] == [
        ["round-robin", "12", "12"],
        ["least-load", "12", "12"],
    ]
    assert list(without_clock(out)["policies"]) == ["round-robin", "least-load"]


def test_a_single_run_is_shown_by_region() -> None:
    shown = sim(*QUICK).stdout
    assert [name for name in ("all", "us", "eu") if f"\n {name} " in shown] == ["all", "us", "eu"]
    assert "GPU busy" in shown


def test_the_same_seed_gives_the_same_file_however_many_jobs(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for jobs, file in enumerate(files, 1):
        assert (
            sim(*QUICK, "--topology", "mesh,central:eu", "--jobs", jobs, "--out", file).exit_code
            == 0
        )
    one, two = map(without_clock, files)
    assert one == two
    assert len({report["digest"] for report in one["policies"].values()}) == 2


@pytest.mark.parametrize("format_name", ["azure", "kv-cache-tester", "lmcache"])
def test_every_format_can_be_played(format_name: str) -> None:
    path = {
        "azure": "azure/conv_first60.csv",
        "kv-cache-tester": "kv-cache-tester/four_sessions.jsonl",
        "lmcache": "lmcache/taubench",
    }[format_name]
    trace = ("--trace", f"tests/data/{path}", "--format", format_name)
    few = ("--limit", 8, "--scale-lengths", "0.02", "--regions", "us=1,eu=1")
    ended = sim(*trace, *few)
    assert ended.exit_code == 0, ended.output
    assert " all " in ended.stdout


def test_a_workload_with_everything_said(tmp_path: Path) -> None:
    rtt = tmp_path / "rtt.toml"
    rtt.write_text('[[links]]\nbetween = ["us", "ap"]\nrtt_ms = 120\n')
    ended = sim(
        *("--workload", "chat", "--clients", "us=2,ap=1", "--regions", "us=1,ap=1"),
        *("--duration-s", 10, "--seed", 3, "--rtt", rtt, "--jitter-ms", 2, "--loss", 0.05),
        *("--profile", "a100-mistral-7b", "--profile", "ap=l4-llama3.1-8b*2+a6000-mistral-7b"),
        *("--pushing", "outstanding:4", "--warmup-s", 1),
        *("--setting", "hold-max=20", "--heartbeat-ms", 50, "--gossip-ms", 200),
        *("--out", tmp_path / "out.json", "--pictures", tmp_path / "pictures"),
    )
    assert (ended.exit_code, ended.stderr) == (0, ""), ended.output
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "ttft-cdf.svg",
        "regions.svg",
    }
    written = [line for line in ended.stdout.splitlines() if line.startswith("wrote ")]
    assert written == [
        f"wrote {tmp_path / 'out.json'}",
        f"wrote {tmp_path / 'pictures' / 'ttft-cdf.svg'}",
        f"wrote {tmp_path / 'pictures' / 'regions.svg'}",
    ]


BAD = {
    "no source": ((), "give either --trace or --workload"),
    "two sources": ((*QUICK, "--workload", "chat"), "give either --trace or --workload"),
    "policy": (
        (*QUICK, "--policy", "best"),
        "--policy: unknown policy 'best'; there are round-robin",
    ),
    "policy twice": ((*QUICK, "--policy", "round-robin,round-robin"), "round-robin is named twice"),
    "workload": (("--workload", "chats"), "--workload: unknown workload 'chats': use one of chat"),
    "format": (
        (*QUICK, "--format", "csv"),
        "--format: unknown format 'csv': use one of mooncake, azure",
    ),
    "no file": (("--trace", "nowhere.jsonl"), "can't read trace nowhere.jsonl: No such file"),
    "profile": ((*QUICK, "--profile", "h200"), "--profile: unknown profile 'h200': use one of l4-"),
    "profile twice": (
        (*QUICK, "--profile", "us=a100-mistral-7b", "--profile", "us=l4-llama3.1-8b"),
        "--profile: us is named twice",
    ),
    "profile region": (
        (*QUICK, "--profile", "ap=a100-mistral-7b"),
        "--profile names ap, which is not in",
    ),
    "topology": ((*QUICK, "--topology", "star"), "use mesh, region-local or central:REGION"),
    "centre": ((*QUICK, "--topology", "central:ap"), "topology: ap is none of us, eu"),
    "pushing": (
        (*QUICK, "--pushing", "hard"),
        "--pushing: pushing is blind, pending or outstanding:N",
    ),
    "regions": ((*TRACE, "--regions", "us"), "--regions: 'us': write REGION=NUMBER"),
    "no replica": ((*TRACE, "--regions", "us=0"), "--regions: give at least one region a replica"),
    "fleets": ((*QUICK, "--regions", "us=1"), "--regions: every fleet names us, eu"),
    "name": ((*TRACE, "--regions", "US=1"), "use 1 to 32 lower-case letters"),
    "clients": (
        ("--workload", "chat", "--clients", "us=1,sa=2"),
        "--clients names sa, which is not in --regions: use us, eu, ap",
    ),
    "clients of a trace": (
        (*QUICK, "--clients", "us=1"),
        "--clients goes with --workload: leave it out",
    ),
    "weight of a workload": (
        ("--workload", "chat", "--weight", "us=1"),
        "--weight goes with --trace",
    ),
    "weight": ((*QUICK, "--weight", "ap=1"), "--weight names ap, which is not in --regions"),
    "load 0": ((*QUICK, "--load", "0"), "--load: must be more than 0, not 0"),
    "load and speed": (
        (*QUICK, "--load", "1", "--speed", "2"),
        "--load sets the speed: leave --speed",
    ),
    "closed load": (("--workload", "tot", "--load", "1"), "closed loop"),
    "closed speed": (("--workload", "tot", "--speed", "2"), "change the number of clients"),
    "rtt": ((*QUICK, "--rtt", "nowhere.csv"), "--rtt: can't read nowhere.csv: No such file"),
    "rtt pair": (
        (*TRACE, "--regions", "us=1,sa=1"),
        "--rtt: no round trip between us and sa: write for each pair",
    ),
    "loss": ((*QUICK, "--loss", "1"), "--loss: must be less than 1, not 1"),
    "seed": ((*QUICK, "--seed", "x"), "--seed: must be a whole number, not x"),
    "setting": (
        (*QUICK, "--setting", "speed=1"),
        "unknown setting 'speed': use one of peer_queue_max",
    ),
    "setting's value": (
        (*QUICK, "--setting", "hold_max=many"),
        "--setting hold_max=many: must be a whole number",
    ),
    "setting's range": ((*QUICK, "--setting", "hold_max=0"), "hold_max=0: must be more than 0"),
    "out": (
        (*QUICK, "--out", "nowhere/out.json"),
        "--out: nowhere/out.json: give a file in a folder",
    ),
    "pictures": (
        (*QUICK, "--pictures", "nowhere/at/all"),
        "--pictures: nowhere/at/all: give a folder",
    ),
    "jobs": ((*QUICK, "--jobs", "0"), "--jobs: must be at least 1, not 0"),
    "replay and more": (("--replay", "x", *TRACE), "--trace does not go with --replay"),
    "no recording": (("--replay", "nowhere"), "--replay nowhere: No such file"),
    "recording": (("--replay", "pyproject.toml"), "pyproject.toml: line 1"),
    "policy of a replay": (("--replay", "x", "--policy", "a,b"), "unknown policy 'a,b'"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_what_can_not_be_used_is_named_and_nothing_is_played(
    arguments: tuple[str, ...], says: str
) -> None:
    ended = sim(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert says in ended.stderr.replace("\n", " ")
    assert ended.stderr.count("\n") == 1


def test_a_malformed_table_of_round_trips_is_named_by_its_line(tmp_path: Path) -> None:
    rtt = tmp_path / "rtt.toml"
    link = 'links = [{ between = ["us", "%s"], rtt_ms = %s }]'
    rtt.write_text(link % ("eu", '"fast"'))
    ended = sim(*QUICK, "--rtt", rtt)
    assert ended.exit_code == 2
    assert f"--rtt: {rtt}: links.0: rtt_ms: must be a number" in ended.stderr
    rtt.write_text(link % ("ap", 80))
    ended = sim(*QUICK, "--rtt", rtt)
    assert ended.exit_code == 2
    assert f"--rtt {rtt}: no round trip between us and eu: write" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_round_trips_come_from_a_mesh_toml() -> None:
    ended = sim(*QUICK, "--rtt", "infra/mesh.toml")
    assert (ended.exit_code, "note:" in ended.stderr) == (0, False)


def test_without_matplotlib_pictures_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = sim(*QUICK, "--pictures", "pictures")
    assert ended.exit_code == 2
    assert "pip install 'inference-mesh[pictures]'" in ended.stderr


def test_batch_jobs_stand_beside_the_same_run_without_them(tmp_path: Path) -> None:
    out = tmp_path / "sim.json"
    job = "us=20,prompt=200,shared=128,groups=2,answer=5,window=10m"
    ended = sim(*QUICK, "--offline", job, "--offline-scope", "mesh,none", "--out", out)
    assert ended.exit_code == 0, ended.output
    assert "tokens/GPU hour" in ended.stdout
    reports = json.loads(out.read_text())["policies"]
    assert reports["mesh offline mesh"]["offline"]["answered"] == 20
    assert "offline" not in reports["mesh offline none"]


def test_a_run_in_which_every_request_fails_ends_with_1() -> None:
    assert sim(*QUICK, "--timeout-s", 0.0001).exit_code == 1


def test_an_interrupted_study_gives_the_runs_that_were_complete(tmp_path: Path) -> None:
    """A short run, and then one that takes so long that it is still going."""
    out = tmp_path / "out.json"
    fleets = ("--regions", "us=1,eu=1", "--regions", "us=500,eu=500")
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mesh.cli.main", "sim", *TRACE, *fleets, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=end,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=heed_interrupts,
    )
    os.close(end)
    try:
        read_until(terminal, b"1 of 2 runs", 90.0)
        process.send_signal(signal.SIGINT)
        assert ended_within(process, terminal, 40.0) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert list(without_clock(out)["policies"]) == [f"{RouterSettings().policy} us=1,eu=1"]


def read_until(terminal: int, words: bytes, within_s: float) -> None:
    seen, ends_at = b"", time.monotonic() + within_s
    while words not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, ends_at - time.monotonic()))
        assert ready, seen[-200:]
        seen += os.read(terminal, 65_536)


def heed_interrupts() -> None:
    """A shell starts what runs in its background deaf to them, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended_within(process: subprocess.Popen[bytes], terminal: int, within_s: float) -> int | None:
    """Its exit status. What it says is read meanwhile: a full terminal would hold it up."""
    ends_at = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < ends_at:
        ready, _, _ = select.select([terminal], [], [], 0.05)
        try:
            ready and os.read(terminal, 65_536)
        except OSError:  # its end of the terminal is closed
            return process.wait(within_s)
    return process.poll()


def recorded(folder: Path) -> Path:
    path = folder / "router.recording"
    path.write_bytes(b"".join(chaos_lines(3)))
    return path


def test_a_recording_is_replayed_to_the_same_decisions(tmp_path: Path) -> None:
    ended = sim("--replay", recorded(tmp_path))
    assert ended.exit_code == 0, ended.output
    assert "every decision and every other effect is the same" in ended.stdout


def test_a_recording_that_differs_ends_with_1_and_a_question_with_0(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(at for at, line in enumerate(lines) if b'"RequestArrived"' in line)
    path.write_bytes(b"".join(lines[:first] + lines[first + 1 :]))
    ended = sim("--replay", path)
    assert ended.exit_code == 1
    assert "first difference at line " in ended.stdout
    asked = sim("--replay", recorded(tmp_path), "--policy", "least-load", "--pushing", "blind")
    assert asked.exit_code == 0
    assert "replayed with " in asked.stdout
    assert "policy least-load instead of" in asked.stdout
    assert "pushing blind instead of pending" in asked.stdout
    assert " decisions differ; " in asked.stdout
    assert "recorded → replayed" in asked.stdout
    assert "  hold: the request waits in the router's queue" in asked.stdout
    assert "Up to the first of them this is exact." in asked.stdout
