"""Supervision of real processes: readiness, restarts, order of the end, nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.supervisor.program import FileWritten, Program, ProgramKind
from mesh.supervisor.supervisor import (
    GRACE_S,
    ProgramDied,
    ProgramFailed,
    ProgramReady,
    SupervisedProgram,
    Supervisor,
)
from tests.support.until import PATIENCE_S, until

PRELUDE = "import os, pathlib, signal, sys, time; READY, ENDED = map(pathlib.Path, sys.argv[1:])\n"
WELL_BEHAVED = """
def end(*_):
    with ENDED.open("a") as f: f.write(sys.argv[1].rsplit("/", 1)[1] + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
READY.touch()
while True: time.sleep(60)
"""
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
READY.touch()
while True: time.sleep(60)
"""
ENDS_AFTER_A_SECOND = """
def end(*_):
    time.sleep(1)
    with ENDED.open("a") as f: f.write(sys.argv[1].rsplit("/", 1)[1] + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
READY.touch()
while True: time.sleep(60)
"""
BROKEN = """
print("first line", flush=True)
sys.exit("the port is taken")
"""
DIES_ONCE_READY = """
READY.touch()
print("out of memory", flush=True)
while not (READY.parent / "die").exists(): time.sleep(0.005)
os._exit(3)
"""
ENDS_SILENTLY = """
READY.touch()
while not (READY.parent / "end").exists(): time.sleep(0.005)
os._exit(3)
"""


class Stage:
    """A supervisor over small programs, and what it reported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reports: list[ProgramReady | ProgramDied] = []
        self.supervisor = Supervisor(directory, self.reports.append)

    def program(self, name: str, source: str, kind: ProgramKind = ProgramKind.ENGINE) -> Program:
        ready = self.directory / name
        return Program(
            name=name,
            kind=kind,
            region="us",
            command=(sys.executable, "-I", "-S", "-c", PRELUDE + source, str(ready), self.ended),
            ready=FileWritten(ready),
        )

    def preloaded(self, name: str, source: str) -> Program:
        """The same as a fork of the preloaded process."""
        module = self.directory / "of_this_test" / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text("def main():\n" + textwrap.indent(PRELUDE + source, " "))
        words = ("-m", f"of_this_test.{name}", str(self.directory / name), self.ended)
        program = self.program(name, source)
        return replace(program, command=(sys.executable, *words), preloaded=True)

    @property
    def ended(self) -> str:
        return str(self.directory / "ended")

    def deaths(self) -> list[ProgramDied]:
        return [report for report in self.reports if isinstance(report, ProgramDied)]


@pytest.fixture
async def stage(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")  # of the preloaded process
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    stage = Stage(tmp_path)
    yield stage
    stage.supervisor.hurry()
    await stage.supervisor.stop()
    assert stage.supervisor.pids == {}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def children() -> set[int]:
    """Of this process."""
    return set(map(int, Path("/proc/thread-self/children").read_text().split()))


async def test_programs_are_stopped_routers_first_and_the_bus_last(stage, monkeypatch):
    order = [ProgramKind.NATS, ProgramKind.ENGINE, ProgramKind.AGENT, ProgramKind.ROUTER]
    for kind in order:
        monkeypatch.setitem(GRACE_S, kind, 30.0)
    async with stage.supervisor:
        for kind in order:
            await stage.supervisor.start(stage.program(kind.label, WELL_BEHAVED, kind))
        pids = stage.supervisor.pids
        assert len(pids) == 4
    assert Path(stage.ended).read_text().split() == ["router", "agent", "engine", "nats-server"]
    assert not any(map(alive, pids.values()))
    assert stage.deaths() == []


async def test_a_program_that_does_not_end_in_its_grace_is_killed(stage, monkeypatch, caplog):
    monkeypatch.setitem(GRACE_S, ProgramKind.ENGINE, 0.2)
    await stage.supervisor.start(stage.program("deaf", DEAF))
    pid = stage.supervisor.pids["deaf"]
    async with asyncio.timeout(PATIENCE_S):
        await stage.supervisor.stop()
    assert not alive(pid)
    assert caplog.messages == ["deaf did not end in time and is killed"]


async def test_time_in_which_a_program_waits_for_a_core_is_not_of_its_grace(
    stage, monkeypatch, caplog
):
    """Its grace is over many times before it gets a core and ends by itself."""
    monkeypatch.setitem(GRACE_S, ProgramKind.ENGINE, 0.1)
    monkeypatch.setattr("mesh.supervisor.supervisor.CHECK_S", 0.01)
    monkeypatch.setattr(SupervisedProgram, "queued_s", lambda one: time.monotonic())
    for name in ("engine-0", "engine-1"):
        await stage.supervisor.start(stage.program(name, ENDS_AFTER_A_SECOND))
    async with asyncio.timeout(PATIENCE_S):
        await stage.supervisor.stop()
    assert sorted(Path(stage.ended).read_text().split()) == ["engine-0", "engine-1"]
    assert caplog.messages == []


async def test_a_pause_of_the_supervisor_is_not_of_a_programs_grace(stage, monkeypatch, caplog):
    monkeypatch.setitem(GRACE_S, ProgramKind.ENGINE, 0.5)
    await stage.supervisor.start(stage.program("engine", ENDS_AFTER_A_SECOND))
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, time.sleep, 3.0)  # as a machine that is paused, or has no core for us
    async with asyncio.timeout(PATIENCE_S):
        await stage.supervisor.stop()
    assert Path(stage.ended).read_text() == "engine\n"
    assert caplog.messages == []


async def test_it_is_known_how_long_a_process_waited_for_a_core(stage):
    """Six busy processes of one core: each waits."""
    busy = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
READY.touch()
while True: pass
"""
    programs = [await stage.supervisor.start(stage.program(f"busy-{n}", busy)) for n in range(6)]
    await until(lambda: all(one.queued_s() > 0.05 for one in programs))
    stage.supervisor.hurry()
    await stage.supervisor.stop()
    assert [one.queued_s() for one in programs] == [0.0] * 6


async def test_a_hurry_cuts_the_grace_short_without_a_warning(stage, monkeypatch, caplog):
    monkeypatch.setitem(GRACE_S, ProgramKind.ENGINE, 1000.0)
    await stage.supervisor.start(stage.program("deaf", DEAF))
    pid = stage.supervisor.pids["deaf"]
    stopping = asyncio.create_task(stage.supervisor.stop())
    stage.supervisor.hurry()
    async with asyncio.timeout(PATIENCE_S):
        await stopping
    assert not alive(pid)
    assert caplog.messages == []


async def test_a_program_that_never_becomes_ready_fails_with_the_end_of_its_log(stage):
    with pytest.raises(ProgramFailed) as caught:
        await stage.supervisor.start(stage.program("broken", BROKEN))
    death = caught.value.death
    assert death.how == "ended with status 1"
    assert death.tail.splitlines() == ["first line", "the port is taken"]
    assert death.restart_in_s is None


async def test_a_program_that_can_not_be_run_fails(stage):
    absent = replace(stage.program("absent", ""), command=("/nonexistent/nats-server",))
    with pytest.raises(ProgramFailed) as caught:
        await stage.supervisor.start(absent)
    assert "/nonexistent/nats-server: can't be run" in caught.value.death.tail


async def test_a_program_that_dies_is_reported_and_restarted(stage):
    await stage.supervisor.start(stage.program("brittle", DIES_ONCE_READY))
    first = stage.supervisor.pids["brittle"]
    (stage.directory / "die").touch()
    await until(stage.deaths)
    (stage.directory / "die").unlink()
    death = stage.deaths()[0]
    assert (death.how, death.tail) == ("ended with status 3", "out of memory")
    assert death.restart_in_s == 0.25
    await until(lambda: stage.supervisor.pids.get("brittle", first) != first)
    await until(lambda: isinstance(stage.reports[-1], ProgramReady) and stage.reports[-1].again)


async def test_a_death_is_reported_with_the_log_of_that_process_alone(stage):
    child = await stage.supervisor.start(stage.program("brittle", DIES_ONCE_READY))
    first = stage.supervisor.pids["brittle"]
    child.program = stage.program("brittle", ENDS_SILENTLY)
    (stage.directory / "die").touch()
    await until(lambda: stage.supervisor.pids.get("brittle", first) != first)
    await until(lambda: isinstance(stage.reports[-1], ProgramReady) and stage.reports[-1].again)
    (stage.directory / "end").touch()
    await until(lambda: len(stage.deaths()) == 2)
    assert [death.tail for death in stage.deaths()] == ["out of memory", ""]


async def test_a_killed_program_is_reported_without_its_log(stage):
    source = "print('an old story', flush=True)" + WELL_BEHAVED
    await stage.supervisor.start(stage.program("engine", source))
    os.kill(stage.supervisor.pids["engine"], signal.SIGKILL)
    await until(stage.deaths)
    [death] = stage.deaths()
    assert (death.how, death.tail) == ("was ended by SIGKILL", "")
    assert "an old story" in death.log.read_text()


async def test_a_killed_program_is_restarted_with_its_current_command(stage):
    child = await stage.supervisor.start(stage.program("engine", WELL_BEHAVED))
    child.program = stage.program("engine", "open(ENDED, 'w').write('second'); READY.touch()")
    os.kill(stage.supervisor.pids["engine"], signal.SIGKILL)
    await until(lambda: Path(stage.ended).exists())
    assert stage.deaths()[0].how == "was ended by SIGKILL"


async def test_preloaded_programs_are_forks_of_one_process(stage):
    """Each with the name, arguments, environment and log of its own, in a group of its own."""
    say = "print(sys.argv[0], os.environ['GREETING'])" + WELL_BEHAVED
    for name in ("one", "two"):
        program = stage.preloaded(name, say.replace("def end(*_)", "global end\ndef end(*_)"))
        await stage.supervisor.start(replace(program, environment={"GREETING": f"I am {name}"}))
    pids = stage.supervisor.pids
    for name, pid in pids.items():
        assert (stage.directory / f"{name}.log").read_text() == f"of_this_test.{name} I am {name}\n"
        assert Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"
        assert os.getpgid(pid) == pid
    [parent] = {Path(f"/proc/{pid}/stat").read_text().split()[3] for pid in pids.values()}
    assert int(parent) not in (os.getpid(), *pids.values())
    await stage.supervisor.stop()
    assert sorted(Path(stage.ended).read_text().split()) == ["one", "two"]
    assert not any(map(alive, (int(parent), *pids.values())))
    assert stage.deaths() == []


async def test_a_preloaded_program_that_dies_is_reported_and_restarted(stage):
    await stage.supervisor.start(stage.preloaded("brittle", DIES_ONCE_READY))
    first = stage.supervisor.pids["brittle"]
    (stage.directory / "die").touch()
    await until(stage.deaths)
    (stage.directory / "die").unlink()
    [death] = stage.deaths()
    assert (death.how, death.tail) == ("ended with status 3", "out of memory")
    await until(lambda: stage.supervisor.pids.get("brittle", first) != first)
    await until(lambda: isinstance(stage.reports[-1], ProgramReady) and stage.reports[-1].again)


async def test_a_preloaded_program_that_never_becomes_ready_fails_as_any_other(stage):
    with pytest.raises(ProgramFailed) as caught:
        await stage.supervisor.start(stage.preloaded("broken", BROKEN))
    assert caught.value.death.how == "ended with status 1"
    assert caught.value.death.tail.splitlines() == ["first line", "the port is taken"]
    absent = stage.preloaded("absent", "")
    (stage.directory / "of_this_test" / "absent.py").unlink()
    with pytest.raises(ProgramFailed) as caught:
        await stage.supervisor.start(absent)
    assert caught.value.death.how == "ended with status 1"
    assert "No module named 'of_this_test.absent'" in caught.value.death.tail


async def test_a_deaf_preloaded_program_is_killed_after_its_grace(stage, monkeypatch, caplog):
    monkeypatch.setitem(GRACE_S, ProgramKind.ENGINE, 0.2)
    await stage.supervisor.start(stage.preloaded("deaf", DEAF))
    pid = stage.supervisor.pids["deaf"]
    async with asyncio.timeout(PATIENCE_S):
        await stage.supervisor.stop()
    assert not alive(pid)
    assert caplog.messages == ["deaf did not end in time and is killed"]


async def test_when_the_preloaded_process_is_killed_its_programs_start_again(stage, caplog):
    await stage.supervisor.start(stage.preloaded("engine", DEAF))
    first = stage.supervisor.pids["engine"]
    parent = int(Path(f"/proc/{first}/stat").read_text().split()[3])
    os.kill(parent, signal.SIGKILL)
    await until(lambda: stage.supervisor.pids.get("engine", first) != first)
    assert [death.how for death in stage.deaths()] == ["was ended by SIGKILL"]
    assert "the preloaded process ended (-9), and all it forked" in caplog.text
    await until(lambda: not alive(first))


async def test_a_preloaded_process_that_dies_before_its_first_program_starts_again(stage, caplog):
    others = children()
    await stage.supervisor.preload()
    [first] = children() - others
    os.kill(first, signal.SIGKILL)
    await until(lambda: "the preloaded process ended (-9)" in caplog.text)
    await stage.supervisor.start(stage.preloaded("engine", WELL_BEHAVED))
    assert first not in children()


async def test_what_is_preloaded_early_is_not_started_twice(stage):
    others = children()
    await stage.supervisor.preload()
    [first] = children() - others
    await stage.supervisor.start(stage.preloaded("engine", WELL_BEHAVED))
    assert children() - others == {first}


async def test_a_preloaded_process_that_hangs_keeps_nobody(stage, monkeypatch):
    monkeypatch.setitem(GRACE_S, ProgramKind.ENGINE, 0.2)
    monkeypatch.setattr("mesh.supervisor.supervisor.KILLED_WITHIN_S", 0.2)
    await stage.supervisor.start(stage.preloaded("engine", WELL_BEHAVED))
    pid = stage.supervisor.pids["engine"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().split()[3])
    os.kill(parent, signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        await stage.supervisor.stop()
    assert not alive(parent)
    await until(lambda: not alive(pid))


async def test_a_preloaded_process_that_hangs_is_replaced_at_the_next_fork(
    stage, monkeypatch, caplog
):
    await stage.supervisor.start(stage.preloaded("engine", DEAF))
    first = stage.supervisor.pids["engine"]
    parent = int(Path(f"/proc/{first}/stat").read_text().split()[3])
    os.kill(parent, signal.SIGSTOP)
    await until(lambda: Path(f"/proc/{parent}/stat").read_text().split()[2] == "T")
    monkeypatch.setattr("mesh.supervisor.preloaded.FORKED_WITHIN_S", 0.2)
    with pytest.raises(ProgramFailed) as caught:
        await stage.supervisor.start(stage.preloaded("other", DEAF))
    monkeypatch.setattr("mesh.supervisor.preloaded.FORKED_WITHIN_S", PATIENCE_S)
    assert "the preloaded process ended" in caught.value.death.how
    assert "the preloaded process forks nothing for 0.2 s" in caplog.text
    await until(lambda: stage.supervisor.pids.get("engine", first) != first)
    await until(lambda: not alive(first) and not alive(parent))


async def test_a_preloaded_process_that_can_not_import_says_where_it_is_written(tmp_path):
    supervisor = Supervisor(tmp_path, lambda _: None, ["no_such_module"])
    stage = Stage(tmp_path)
    with pytest.raises(ProgramFailed) as caught:
        await supervisor.start(stage.preloaded("engine", DEAF))
    assert "preloaded.log" in caught.value.death.how
    assert "no_such_module" in (tmp_path / "preloaded.log").read_text()
    await supervisor.stop()


@pytest.mark.parametrize("form", ["program", "preloaded"])
async def test_a_kill_of_the_supervisor_kills_its_programs(tmp_path, form):
    """Nobody is left to end them: the kernel does, whatever they think of SIGTERM."""
    script = textwrap.dedent(f"""
        import asyncio, sys, pathlib
        from mesh.supervisor.supervisor import Supervisor
        from tests.mesh.supervisor.test_supervisor import DEAF, Stage

        async def main():
            stage = Stage(pathlib.Path(sys.argv[1]))
            await stage.supervisor.start(stage.{form}("deaf", DEAF))
            print(stage.supervisor.pids["deaf"], flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            pid = int(await process.stdout.readline())
        assert alive(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await until(lambda: not alive(pid))
