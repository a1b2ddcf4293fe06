"""Whether this machine kept up: how long our processes waited for a core.

A simulated engine that waits for a core is slower than its profile, in one system as in another.
The kernel counts, for every thread, how long it could have run and did not, and how often it ran:
/proc/PID/task/TID/schedstat (Documentation/scheduler/sched-stats). A first token takes some ten
such turns of clients, routers, agents and engines; with the limit here that is 20 ms.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.programs.bench.proc import PROC, family

STAT = PROC / "stat"
WAIT_MAX_S = 0.002
_IDLE = (3, 4)  # idle and iowait, of /proc/stat's first line: proc(5)


@dataclass(frozen=True, slots=True)
class MachineUse:
    """`busy`: cores in use by anybody; `ours`: by this program and all that it started.

    `wait_s`: how long one of these waited for a core each time, in the mean.
    """

    busy: float
    ours: float
    wait_s: float

    @property
    def is_too_busy(self) -> bool:
        return self.wait_s > WAIT_MAX_S


@dataclass(frozen=True, slots=True)
class _Turns:
    """A process's CPU time, its time of waiting for a core (nanoseconds), and how often it ran."""

    cpu_ns: int
    wait_ns: int
    turns: int


class MachineWatch:
    """A context manager; `use` is there afterwards. Processes that ended meanwhile don't count."""

    use: MachineUse

    def __enter__(self) -> "MachineWatch":
        self._began_s = time.monotonic()
        self._busy_before, self._before = _busy_s(), _ours()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began_s
        none = _Turns(0, 0, 0)
        pairs = [(after, self._before.get(pid, none)) for pid, after in _ours().items()]
        cpu_ns = sum(after.cpu_ns - before.cpu_ns for after, before in pairs)
        wait_ns = sum(after.wait_ns - before.wait_ns for after, before in pairs)
        turns = sum(after.turns - before.turns for after, before in pairs)
        self.use = MachineUse(
            busy=(_busy_s() - self._busy_before) / seconds,
            ours=cpu_ns / 1e9 / seconds,
            wait_s=wait_ns / 1e9 / max(1, turns),
        )


def _ours() -> dict[int, _Turns]:
    """By thread, of this process and all that it started."""
    found = {}
    for pid in family(os.getpid()):
        for file in (PROC / str(pid) / "task").glob("*/schedstat"):
            numbers = _read(file).split()
            if len(numbers) == 3:
                found[int(file.parent.name)] = _Turns(*map(int, numbers))
    return found


def _busy_s() -> float:
    """Seconds of all cores since the machine started."""
    fields = [int(text) for text in STAT.read_text().splitlines()[0].split()[1:]]
    total = sum(fields[:8])  # the others are counted in these
    return (total - sum(fields[at] for at in _IDLE)) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""
