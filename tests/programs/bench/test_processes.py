import asyncio
import os
import signal
import sys

import pytest

from tests.programs.bench.processes import Absent, Processes, output_of
from tests.support.until import until


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def python(code):
    return (sys.executable, "-c", code)


async def no():
    return False


async def test_what_was_started_is_ended_with_all_that_it_started(tmp_path):
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); child.wait()"
    )

    async def has_written():
        return (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != ""

    async with Processes(tmp_path / "logs", end_within_s=0.2) as processes:
        pid = await processes.start("stubborn", python(code), ready=has_written)
        child = int((tmp_path / "pid").read_text())
        assert alive(pid)
        assert alive(child)
    assert not alive(pid)
    await until(lambda: not alive(child))


async def test_who_ends_instead_of_being_ready_is_absent_with_its_last_words(tmp_path):
    code = "import sys; sys.exit('no such option')"
    async with Processes(tmp_path) as processes:
        with pytest.raises(Absent, match="x ended with status 1: no such option"):
            await processes.start("x", python(code), ready=no)


async def test_a_program_that_is_not_there_is_absent(tmp_path):
    async with Processes(tmp_path) as processes:
        with pytest.raises(Absent, match="nowhere"):
            await processes.start("x", (str(tmp_path / "nowhere"),), ready=no)


async def test_who_never_answers_is_absent(tmp_path):
    async with Processes(tmp_path, ready_within_s=0.2) as processes:
        with pytest.raises(Absent, match=r"did not answer within 0\.2 s"):
            await processes.start("x", python("import time; time.sleep(600)"), ready=no)


async def test_environment_and_directory_reach_the_program(tmp_path):
    code = "import os; print(os.environ['WORD'], os.getcwd(), flush=True); input()"
    async with Processes(tmp_path / "logs") as processes:
        await processes.start("x", python(code), environment={"WORD": "hello"}, directory=tmp_path)
        log = tmp_path / "logs" / "x.log"
        await until(lambda: log.read_text().endswith("\n"))  # not unbuffered, word by word
    assert log.read_text().startswith(f"hello {tmp_path}")


async def test_a_program_that_ends_by_itself_gives_its_output():
    code = "import sys; print(sys.stdin.read().upper())"
    assert await output_of(python(code), given=b"words", within_s=20.0) == b"WORDS\n"


@pytest.mark.parametrize(
    ("code", "within_s", "why"),
    [
        ("import sys; sys.exit('broken')", 30.0, "status 1: broken"),
        ("input()\nwhile True: pass", 1.0, "end"),
    ],
)
async def test_a_program_that_does_not_end_well_is_absent(code, within_s, why):
    with pytest.raises(Absent, match=why):
        await output_of(python(code), given=b"\n", within_s=within_s)


async def test_cancelling_ends_the_program_too(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    task = asyncio.create_task(output_of(python(code), within_s=600.0))
    await until(lambda: pid_file.exists() and pid_file.read_text())
    pid = int(pid_file.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)


async def test_ctrl_c_ends_everything(tmp_path):
    """A bench in a process of its own, as a terminal has it."""
    code = f"""
import asyncio, signal, sys
from pathlib import Path
from tests.programs.bench.processes import Processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
async def main():
    async with Processes(Path({str(tmp_path)!r}) / "logs") as processes:
        pid = await processes.start("x", (sys.executable, "-c", "import time; time.sleep(600)"))
        print(pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    bench = await asyncio.create_subprocess_exec(
        *python(code), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    pid = int(await bench.stdout.readline())
    assert alive(pid)
    bench.send_signal(signal.SIGINT)
    await bench.wait()
    assert not alive(pid)
