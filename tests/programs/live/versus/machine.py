"""Whether this machine kept up: its cores' use, and how late an event loop woke.

A simulated engine that waits for a core is slower than its profile, in one system as in another;
beyond these limits the times are the machine's and not the systems'.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from mesh.replay.tally import percentile

STAT = Path("/proc/stat")
LOOK_EVERY_S = 0.02
BUSY_MAX, LAG_P99_MAX_S = 0.85, 0.020
_IDLE = (3, 4)  # idle and iowait, of /proc/stat's first line: proc(5)


@dataclass(frozen=True, slots=True)
class MachineUse:
    """`busy`: the share of all cores' time, whoever used it. `lag_p99_s`: of the clients' loop."""

    busy: float
    lag_p99_s: float

    @property
    def is_too_busy(self) -> bool:
        return self.busy > BUSY_MAX or self.lag_p99_s > LAG_P99_MAX_S


class MachineWatch:
    """An async context manager; `use` is there afterwards."""

    use: MachineUse

    async def __aenter__(self) -> "MachineWatch":
        self._lags_s: list[float] = []
        self._before = _times()
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        busy, total = (after - before for before, after in zip(self._before, _times(), strict=True))
        lags_s = sorted(self._lags_s) or [0.0]
        self.use = MachineUse(busy / total if total else 0.0, percentile(lags_s, 0.99))

    async def _look(self) -> None:
        while True:
            due_s = time.monotonic() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self._lags_s.append(max(0.0, time.monotonic() - due_s))


def _times() -> tuple[int, int]:
    """Busy and all time of the cores since the machine started, in the kernel's ticks."""
    fields = [int(text) for text in STAT.read_text().splitlines()[0].split()[1:]]
    total = sum(fields[:8])  # the others are counted in these
    return total - sum(fields[at] for at in _IDLE), total
