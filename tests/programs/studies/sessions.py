"""What it brings to place a coding agent's next turn by its session's key, in the twin.

    make study-sessions TRACES=folder

Recorded coding agents (kv-cache-tester), lengths scaled down as in the study of the `mesh` policy,
on four simulated replicas of one region. Of each session some turns in a row: of those whose
context was compacted, the turns around the first such moment, after which a prompt no longer begins
like the one before it; of the others, their first turns, so these begin cold. Systems:

- `mesh`, which does not read the key;
- `mesh` with the key: the place of a session's last turn is cheaper by so many seconds, so that
  ties go there, or also dearer turns;
- `consistent-hash` by the first blocks of the prompt, and by the key.

All play the same requests with the same seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean

import click

from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, PolicyMaker, PolicyMakers
from mesh.core.policies.base import Choice, Destination, Target
from mesh.core.policies.consistent_hash import ConsistentHash, ConsistentHashOptions
from mesh.core.policies.mesh import MeshPolicy
from mesh.core.policies.mesh_price import Price, PriceRow, PromptHolders
from mesh.core.policies.mesh_prices import ALL, Prices
from mesh.core.policies.mesh_speeds import SpeedModel
from mesh.replay.report import RunReport
from mesh.replay.trace_formats import AgentSession, Turn, parse_kv_cache_tester, read_lines
from mesh.sim.config import WorldConfig
from mesh.sim.workload import Workload
from mesh.sim.workloads.arrivals import at_speed
from mesh.sim.workloads.traces import session_arrivals
from mesh.sim.world import World, run
from schemas.ids import RegionId
from tests.programs.studies.kv_events import SCALE, TRACE
from tests.programs.studies.tables.markdown import table
from tests.support.result_page import result_page

HOME = RegionId("us")
REPLICAS, PROFILE = 4, "l4-llama3.1-8b"
SESSIONS, BEFORE, AFTER = 24, 8, 12  # of a cell; turns of each
COMPACTED = 0.5  # of the last prompt of its thread a compacted one begins with less
COMPACTS, GROWS = "compacted", "not compacted"
CELLS = ((24_000, 8.0), (38_000, 8.0))  # KV tokens of a replica; how much faster than recorded
BONUS_S = (0.05,)
COLUMNS = (
    *("contexts", "KV tokens, speed", "system", "cached tokens", "TTFT mean s", "TTFT p99 s"),
    *("mean, to without the key", "p99, to without the key"),
)

CONDITIONS = f"""\
In the twin: one region of {REPLICAS} L4 replicas, {SESSIONS} recorded sessions of coding agents,
others for each seed, with {BEFORE + AFTER} turns each, lengths multiplied by {SCALE}.
*Compacted*: the turns around a session's first prompt that begins with less than half of the last
one; the others' sessions have none. *+0.05 s*: the `mesh` policy as it would be if the place of a
session's last turn were so much cheaper; `mesh` itself does not read the key. Means over the seeds;
of TTFT's mean, the least and most in brackets. Ratios are to the same policy without the key, seed
by seed: below 1, the key helps.
"""


class PricesBySession(Prices):
    """The place of the session's last turn is cheaper; what is learned from a price is as ever."""

    bonus_s = 0.0
    last: str | None = None

    def rows(
        self, targets: Sequence[Target], holders: PromptHolders, most: int = ALL
    ) -> list[PriceRow]:
        """All rows."""
        return [self._cheaper(Price._make(row)) for row in super().rows(targets, holders)]

    def _cheaper(self, one: Price) -> Price:
        if one.target.name != self.last:
            return one
        less = self.bonus_s
        return one._replace(seconds=one.seconds - less, others_s=one.others_s - less)


class MeshBySession(MeshPolicy):
    """The `mesh` policy, by the session's key too."""

    def __init__(self, settings: RouterSettings, dice: Random, bonus_s: float) -> None:
        super().__init__(settings, dice)
        self._bonus_s = bonus_s
        self._last: dict[str | None, str] = {}  # where each session's last turn went

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        super().placed(request, spot, now)
        self._last[request.session] = spot.name

    def _prices(self, speeds: SpeedModel, request: Request, now: float) -> Prices:
        prices = PricesBySession(speeds, request, now, self._forwards, self._delays)
        prices.bonus_s, prices.last = self._bonus_s, self._last.get(request.session)
        return prices


class HashByBlocks(ConsistentHash):
    """As if no request had a session."""

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The next target after the place of the prompt's first blocks."""
        return super().choose(replace(request, session=None), targets, now)


MESH, BY_BLOCKS, BY_KEY = "mesh", "consistent-hash by blocks", "consistent-hash by key"
# Each system's policy, and the one without the key that it is compared with.
SYSTEMS: Mapping[str, tuple[PolicyMaker, str]] = {
    MESH: (POLICIES["mesh"], MESH),
    **{
        f"mesh +{bonus_s:g} s": (partial(MeshBySession, bonus_s=bonus_s), MESH)
        for bonus_s in BONUS_S
    },
    BY_BLOCKS: (lambda _, dice: HashByBlocks(dice, ConsistentHashOptions()), BY_BLOCKS),
    BY_KEY: (POLICIES["consistent-hash"], BY_BLOCKS),
}


def makers(_: World) -> PolicyMakers:
    """The systems' policies, by their names."""
    return {name: maker for name, (maker, _) in SYSTEMS.items()}


def first_compacted(session: AgentSession) -> int | None:
    """The first turn that begins with less than half of its thread's last prompt."""
    last: dict[int, Turn] = {}
    for place, turn in enumerate(session.turns):
        before = last.get(turn.thread)
        last[turn.thread] = turn
        if before is not None and shared(before, turn) < COMPACTED * blocks(before):
            return place
    return None


def blocks(turn: Turn) -> int:
    """Of its prompt."""
    return sum(count for _, count in turn.ranges)


def shared(one: Turn, other: Turn) -> int:
    """With how many equal blocks two prompts begin."""
    same = 0
    ours, theirs = ([*turn.ranges] for turn in (one, other))
    while ours and theirs and ours[0][0] == theirs[0][0]:
        (first, count), (_, others) = ours.pop(0), theirs.pop(0)
        least = min(count, others)
        same += least
        ours[:0] = [(first + least, count - least)] if count > least else []
        theirs[:0] = [(first + least, others - least)] if others > least else []
    return same


def chosen(trace: Path, contexts: str, sessions: int, seed: int) -> tuple[AgentSession, ...]:
    """Some turns of each of so many sessions; of each seed, others."""
    found = []
    for session in read_lines(trace, parse_kv_cache_tester):
        at = first_compacted(session)
        if (at is not None) is (contexts == COMPACTS) and len(session.turns) >= BEFORE:
            start = max(0, (BEFORE if at is None else at) - BEFORE)
            found.append(replace(session, turns=session.turns[start : start + BEFORE + AFTER]))
    return tuple(found[seed * sessions :][:sessions])


def play(
    system: str, sessions: tuple[AgentSession, ...], kv_tokens: int, speed: float, seed: int
) -> RunReport:
    """One run."""
    arrivals = session_arrivals(sessions, {str(HOME): 1.0}, Random(seed), None, SCALE)
    config = WorldConfig(
        regions={HOME: [PROFILE] * REPLICAS},
        settings=RouterSettings(policy=system, queue_delay_s_max=0.0),
        kv_tokens=kv_tokens,
        seed=seed,
    )
    return run(at_speed(Workload(name="sessions", arrivals=arrivals), speed), config, makers=makers)


def row(reports: Sequence[RunReport], without: Sequence[RunReport]) -> list[str]:
    """Means over the seeds."""
    means = [report["ttft_s"]["mean"] for report in reports]
    ratios = (
        mean(
            [
                one["ttft_s"][point] / other["ttft_s"][point]
                for one, other in zip(reports, without, strict=True)
            ]
        )
        for point in ("mean", "p99")
    )
    return [
        f"{mean([report['cached_token_ratio'] for report in reports]):.1%}",
        f"{mean(means):.3f} ({min(means):.3f}–{max(means):.3f})",
        f"{mean([report['ttft_s']['p99'] for report in reports]):.3f}",
        *("–" if reports is without else f"{ratio:.3f}" for ratio in ratios),
    ]


@result_page("sessions", "Coding agents' sessions: placed by their key, and without")
@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Recorded traces.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="One seed of a few sessions.")
def main(traces: Path, seeds: int, quick: bool) -> None:
    """Play sessions whose contexts are compacted, and others, by their keys and without."""
    print(CONDITIONS)
    rows = []
    count, dice = (8, range(1)) if quick else (SESSIONS, range(seeds))
    for contexts, (kv_tokens, speed) in product((COMPACTS, GROWS), CELLS):
        sessions = [chosen(traces / TRACE, contexts, count, seed) for seed in dice]
        played: dict[str, list[RunReport]] = {}
        for name, (_, without) in SYSTEMS.items():
            played[name] = [play(name, sessions[seed], kv_tokens, speed, seed) for seed in dice]
            cell = contexts, f"{kv_tokens:,}, {speed:g}×", name
            rows.append([*cell, *row(played[name], played[without])])
            click.echo(" · ".join(rows[-1]), err=True)
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
