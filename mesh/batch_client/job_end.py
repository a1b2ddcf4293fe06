"""When a job's last line will be answered: as the mesh estimates it, else by the pace seen.

Pure: times are arguments. A pace needs two looks at the job and at least one line answered between
them; without, there is no forecast. While no line is answered the pace falls with every look, and
after a minute it gives no end: lines may wait for a replica, or for a runner that has died.
"""

from collections import deque
from dataclasses import dataclass

from mesh.batch_client.job_answers import JobAnswer

PACE_S = 300.0  # a pace is that of the last five minutes: long answers come in waves
LOOKS_MAX = 64
STILL_S = 60.0  # longer than until another runner takes over the lines of a dead one (30 s)


@dataclass(frozen=True, slots=True)
class Estimate:
    """`end_at`: seconds since 1970; None: not known yet. `lines_per_s`: as seen; None: unknown."""

    end_at: float | None
    by_mesh: bool
    lines_per_s: float | None


class ObservedPace:
    """The looks at one job. `now`: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=LOOKS_MAX)
        self._answered = 0
        self._changed_s = 0.0

    def looked(self, now: float, answered: int) -> None:
        if self._looks and answered < self._looks[-1][1]:
            self._looks.clear()  # the lines are counted anew
        if not self._looks or answered != self._answered:
            self._answered, self._changed_s = answered, now
        spacing_s = PACE_S / (LOOKS_MAX - 1)
        if len(self._looks) > 1 and now - self._looks[-2][0] < spacing_s:
            self._looks.pop()  # too near: else the looks kept would cover a few seconds only
        self._looks.append((now, answered))
        while len(self._looks) > 2 and now - self._looks[1][0] >= PACE_S:
            self._looks.popleft()

    def answers_lately(self, now: float) -> bool:
        """Whether a line was answered in the last STILL_S, or the looks began in them."""
        return now - self._changed_s < STILL_S

    @property
    def lines_per_s(self) -> float | None:
        """None before two looks, or if nothing was answered between them."""
        if len(self._looks) < 2:
            return None
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None


def pace_of_whole(job: JobAnswer, now_at: float) -> float | None:
    """Lines a second since the job's lines were queued; `now_at`: seconds since 1970."""
    if job.in_progress_at is None or not job.lines.answered:
        return None
    lasted_s = (job.ended_at or job.finalizing_at or now_at) - job.in_progress_at
    return job.lines.answered / lasted_s if lasted_s > 0 else None


def estimate(
    job: JobAnswer, lines_per_s: float | None, now_at: float, *, answers_lately: bool
) -> Estimate:
    """The end of a job. `lines_per_s`: its pace, as far as it was seen. A mesh that says no end
    knows none: lines of the job can't be placed, or nobody does them."""
    end_at = job.estimated_end_at
    if job.is_over:
        return Estimate(None, False, lines_per_s)
    if end_at is not None and end_at >= now_at:
        return Estimate(end_at, True, lines_per_s)
    left = job.lines.total - job.lines.answered
    is_unknown = not answers_lately or (job.mesh is not None and end_at is None)
    if lines_per_s and left > 0 and not is_unknown:
        return Estimate(now_at + left / lines_per_s, False, lines_per_s)
    return Estimate(None, False, lines_per_s)
