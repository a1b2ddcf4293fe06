"""A forked program is what an executed one would be."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import Forks
from tests.support.until import PATIENCE_S

SIMULATED = (sys.executable, "-m", "agents.cli", "engine-sim", "--port", "0")
PIPED = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}


def is_forked(process: asyncio.subprocess.Process) -> bool:
    return b"forked_programs" in Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize(("added", "forked"), [({}, True), ({"PYTHONHASHSEED": "1"}, False)])
async def test_it_has_what_it_was_started_with_and_is_our_child(tmp_path, added, forked):
    given = os.environ | {"MESH_OF_THIS_TEST": "x"} | added
    held, other = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *SIMULATED,
        **PIPED,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=tmp_path,
        env=given if forked else given | {"PYTHONPATH": str(Path.cwd())},
        pass_fds=(held,),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert b"serves" in await process.stdout.readline()
        assert is_forked(process) == forked
        proc = Path(f"/proc/{process.pid}")
        assert (proc / "cwd").resolve() == tmp_path
        assert int((proc / "stat").read_text().split()[3]) == os.getpid()
        assert os.getsid(process.pid) == process.pid
        assert (proc / "fd" / str(held)).exists() and not (proc / "fd" / str(other)).exists()
        assert (proc / "fd" / "0").readlink() == Path("/dev/null")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.communicate() == (b"", b"")
        assert process.returncode == 0
    finally:
        os.close(held)
        os.close(other)
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_one_that_forks_nothing_is_waited_for_no_longer_and_replaced(monkeypatch):
    monkeypatch.setattr("tests.support.forked_programs.ANSWER_WITHIN_S", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forks = Forks()
    forks.use(ours)
    with theirs, pytest.raises(TimeoutError):
        forks.fork(["anything"], [0])
    assert forks._socket is None and ours.fileno() == -1


@pytest.mark.parametrize("started", [SIMULATED, (sys.executable, *SIMULATED[1:], "--no-such")])
async def test_its_status_says_how_it_ended(started):
    process = await asyncio.create_subprocess_exec(*started, **PIPED)
    if started is SIMULATED:
        process.kill()
    async with asyncio.timeout(PATIENCE_S):
        _, said = await process.communicate()
    assert process.returncode == (-signal.SIGKILL if started is SIMULATED else 2)
    assert (b"No such option" in said) == (started is not SIMULATED)
