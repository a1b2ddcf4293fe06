"""The kernel's figures of a process: CPU time and peak memory, of it and of all that it started.

CPU time is that of all threads, ended ones too, in nanoseconds: /proc/PID/stat has the same sum
in steps of 10 ms, too coarse for two seconds of a router.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_FORGET_PEAK = "5"  # proc(5), clear_refs


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of CPU that these processes and their children have used so far."""
    return sum(time.clock_gettime(_clock_of(pid)) for root in pids for pid in family(root))


def peak_mb(pids: Sequence[int]) -> float:
    """Peak resident memory since `forget_peak`, in units of 1e6 bytes, summed over processes."""
    texts = (_read(PROC / str(pid) / "status") for root in pids for pid in family(root))
    return sum(peak_bytes(text) for text in texts) / 1e6


def peak_bytes(status: str) -> int:
    """VmHWM of a /proc/PID/status page; 0 for a process that has no memory any more."""
    found = _PEAK.search(status)
    return int(found[1]) * 1024 if found else 0


def forget_peak(pids: Sequence[int]) -> None:
    """Let peaks be counted from now on."""
    for root in pids:
        for pid in family(root):
            (PROC / str(pid) / "clear_refs").write_text(_FORGET_PEAK)


def family(pid: int) -> list[int]:
    """The process and all that it started, as far as they live."""
    found = [pid]
    for task in (PROC / str(pid) / "task").glob("*/children"):
        for child in _read(task).split():
            found += family(int(child))
    return found


def _clock_of(pid: int) -> int:
    return (~pid << 3) | 2  # clock_getcpuclockid(3), of a whole process


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""
