"""Programs of ours as forks of one process that has imported them: an import takes a second.

In a process that called `install`, `python -m MODULE …` of PROGRAMS starts so by itself, with
whatever starts processes, if nothing of what the interpreter and libraries read at their start is
changed. The program becomes a child of whoever asked (PR_SET_CHILD_SUBREAPER), with a pid, streams,
folder, environment, session, signals and status of its own; only /proc/PID/cmdline shows another
command. A test that is about the start itself runs the installed script.
"""

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from mesh.demo.commands import PRELOADED
from mesh.supervisor import parent_death, preloaded

# Its start has a deadline: it is a fork only once others were, so that all is imported.
LARGE_BODIES = "mesh.http.large_body_process"
PROGRAMS = ("mesh.cli.main", "agents.cli", "mesh.supervisor.preloaded", LARGE_BODIES)
MODULES = (*PRELOADED, "mesh.cli.up", *PROGRAMS)
AT_START = ("PYTHON", "OTEL_", "LD_", "LC_", "LANG", "TZ", "SSL_")
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES_MAX = 131072
DESCRIPTORS_MAX = 64
ANSWER_WITHIN_S = 120.0
SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
PLAIN = {"preexec_fn": None, "shell": False, "gid": None, "gids": None, "uid": None, "umask": -1,
         "process_group": -1, "executable": None}  # fmt: skip


class Forks:
    """Our side of the process that forks, which starts with the first program if not before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.has_forked = False

    def use(self, control: socket.socket) -> None:
        """That process runs already."""
        control.settimeout(ANSWER_WITHIN_S)
        self._socket = control

    def fork(self, message: list[Any], descriptors: Sequence[int]) -> int:
        """The pid of our new child."""
        with self._lock:
            if self._socket is None:
                self.start()
            assert self._socket is not None
            _take_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
                answer = self._socket.recv(64)
            except TimeoutError:  # it hangs; its late answer would be taken for the next one's
                self._end()
                raise
            finally:
                _take_orphans(False)
        assert answer, "the process that forks programs has ended"
        self.has_forked = True
        return int(answer)

    def start(self) -> None:
        """Returns before it has imported anything."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_WITHIN_S)
        with theirs:
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=Path(__file__).parents[2],
                env=ENVIRONMENT,
            )
        self._socket, self.has_forked = ours, False
        atexit.register(self._end)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()  # whatever it does, it holds nothing
            self._process.wait()


FORKS = Forks()
ENVIRONMENT = dict(os.environ)


def _take_orphans(yes: bool) -> None:
    """Whether processes below us whose parents end become children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes))


def install(*, now: bool = False) -> None:
    """Let our programs start as forks, where the machine can do that. `now`: begin to import."""
    if sys.platform == "linux":
        ENVIRONMENT.clear()
        ENVIRONMENT.update(os.environ)
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
        if now:
            FORKS.start()


def _execute_child(self: subprocess.Popen[bytes], *given: Any, **named: Any) -> None:
    wanted = SIGNATURE.bind(self, *given, **named).arguments
    found = _program(wanted)
    if found is None or (found[2] == LARGE_BODIES and not FORKS.has_forked):
        execute(self, *given, **named)
        return
    streams = [wanted["p2cread"], wanted["c2pwrite"], wanted["errwrite"]]
    streams = [number if fd == -1 else fd for number, fd in enumerate(streams)]
    kept = [int(fd) for fd in wanted["pass_fds"]]
    environment = dict(os.environ if wanted["env"] is None else wanted["env"])
    folder = os.path.realpath(wanted["cwd"] or ".")
    message = [*found, folder, environment, wanted["start_new_session"], kept]
    self.pid = FORKS.fork(message, [*streams, *kept])
    self._child_created = True  # type: ignore[attr-defined]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(wanted[name] for name in pipes))  # type: ignore[attr-defined]


def _program(wanted: dict[str, Any]) -> tuple[int | None, bool, str, list[str]] | None:
    """Whom it dies with, whether it prints at once, its module and its arguments; None for what
    has to be executed."""
    words, parent = wanted["args"], None
    if isinstance(words, str | bytes | os.PathLike) or not wanted["close_fds"]:
        return None
    words = [os.fspath(word) for word in words]
    launcher = [sys.executable, "-I", "-S", parent_death.__file__]
    if words[:4] == launcher:
        parent, words = int(words[4]), words[5:]
    at_once = words[1:2] == ["-u"]
    words = words[:1] + words[1 + (words[1:2] in (["-u"], ["-P"])) :]
    if words[:2] != [sys.executable, "-m"] or words[2] not in PROGRAMS:
        return None
    if any(wanted[name] != usual for name, usual in PLAIN.items()):
        return None
    environment = os.environ if wanted["env"] is None else wanted["env"]
    for name in {*environment, *ENVIRONMENT}:
        if name.startswith(AT_START) and environment.get(name) != ENVIRONMENT.get(name):
            return None
    return parent, at_once, words[2], words[3:]


def serve(control: socket.socket) -> None:
    """Fork what is asked for until nobody asks any more; returns in each fork too, at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the whole group
    while True:
        message, descriptors, *_ = socket.recv_fds(control, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not message:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            _become(control, descriptors, *json.loads(message))
            return
        os.waitpid(between, 0)
        for fd in descriptors:
            os.close(fd)


def _become(
    control: socket.socket,
    descriptors: list[int],
    parent: int | None,
    at_once: bool,
    module: str,
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    own_session: bool,
    kept: list[int],
) -> None:
    """Run the program in this fork as if the interpreter had been started with it."""
    if parent is not None:
        parent_death.die_with(parent)
    if own_session:
        os.setsid()
    targets = (0, 1, 2, *kept)
    above = max(targets) + 1
    free = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in descriptors]
    answer = socket.socket(fileno=fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    for fd, target in zip(free, targets, strict=True):
        os.dup2(fd, target)
    open_now = {int(fd.name) for fd in Path("/proc/self/fd").iterdir()}
    for fd in open_now - {*targets, answer.fileno()}:
        with contextlib.suppress(OSError):  # of the listing itself
            os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if at_once or os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if arguments[:1] == ["up"]:  # it starts programs of its own, with asyncio's own loop by Popen
        FORKS.use(_sibling(answer))
        install()
        uvloop.run = asyncio.run
    answer.send(str(os.getpid()).encode())
    answer.close()
    program = importlib.import_module(module)
    sys.modules["__main__"] = program
    sys.argv = [str(program.__file__), *arguments]
    if program is preloaded:
        preloaded.serve(socket.socket(fileno=int(arguments[0])), arguments[1:])
    else:
        program.main()


def _sibling(answer: socket.socket) -> socket.socket:
    """Another process that forks, for this one: it is as we are now, and ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        answer.close()
        serve(theirs)
        sys.exit()
    theirs.close()
    return ours


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all that is shared, and so copy it
    serve(socket.socket(fileno=int(sys.argv[1])))
