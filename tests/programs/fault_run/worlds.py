"""Worlds of `tests.seeds` on real processes: each on a fresh mesh of its shape, its faults at their
times, overlapping as they do there.

    make fault-run WORLDS=30 [FROM=31] [MINUTES=10]

Clients, and what must not happen, are those of the other fault run; of each world all must be well
after its last fault. Left out are misbehaving engines, lost messages, streams that fail alone,
clocks that step and batch runners, and worlds for which `world_plan` has a reason.
"""

import asyncio
import itertools
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import click
import uvloop

from mesh.demo import local_mesh
from mesh.demo.options import DemoOptions
from tests.programs.fault_run.clients import PATIENCE_S, Request
from tests.programs.fault_run.links import FaultyWan
from tests.programs.fault_run.reading import End
from tests.programs.fault_run.report import VIOLATIONS_SHOWN
from tests.programs.fault_run.run import TIME_SCALE, Result, Run, Settings, started
from tests.programs.fault_run.schedule import Shape
from tests.programs.fault_run.world_mesh import WorldMesh
from tests.programs.fault_run.world_plan import Plan, plan_of
from tests.seeds.world import BEGINS_S, Line, world_of
from tests.support.mesh_up import write_config

DURING = "the world's faults"
TRACEBACK = "Traceback (most recent call last)"


class WorldRun(Run):
    """A world's faults at the world's times."""

    plan: Plan

    async def _faults(self) -> None:
        begins_at = self._now() - BEGINS_S
        async with asyncio.TaskGroup() as group:
            for line in self.plan.faults:
                group.create_task(self._one(line, begins_at))
        await self._broken.all_back()
        self._clients.patience_s = PATIENCE_S
        self._account(DURING)

    async def _one(self, line: Line, begins_at: float) -> None:
        await asyncio.sleep(begins_at + line.at - self._now())
        try:
            await self._broken.play(line, self._killed)
        except TimeoutError:
            self._result.problems.append(f"not acknowledged in time: {line}")
        except Exception:
            self._result.problems.append(f"not played: {line}\n{traceback.format_exc()}")


async def play(plan: Plan, place: Path) -> Result:
    """Play it; the mesh's files are left in `place`. An error on the way is a problem of it."""
    shape = Shape(regions=tuple(plan.routers), routers=(), replicas=0)
    settings = Settings(seed=plan.seed, shape=shape, requests=0, faults=0, streams=plan.streams)
    try:
        result = await _played(plan, settings, place)
    except Exception:
        result = Result(settings, problems=[f"not played to its end:\n{traceback.format_exc()}"])
    logs = (place / ".mesh" / "logs").glob("*.log")
    wrong = [log.name for log in logs if TRACEBACK in log.read_text(errors="replace")]
    result.problems += [f"an error of its own in {name}" for name in sorted(wrong)]
    return result


async def _played(plan: Plan, settings: Settings, place: Path) -> Result:
    config = write_config(
        place,
        regions=tuple(plan.routers),
        replicas=plan.replicas,
        routers=plan.routers,
        rtt_ms=plan.rtt_ms,
    )
    options = DemoOptions(
        config=config, state=place / ".mesh", time_scale=TIME_SCALE, policy=plan.policy
    )
    links = partial(FaultyWan, dice=random.Random(plan.seed))
    with patch.object(local_mesh, "WanProxy", links):
        async with started(options, plan.seed, WorldMesh) as (mesh, routers, clients):
            mesh.hold_starts()
            clients.patience_s += plan.routers_stop_s
            run = WorldRun(settings, mesh, routers, clients, lambda _: None)
            run.plan = plan
            return await run.play()


def counted(requests: Sequence[Request]) -> str:
    """How they ended, in words."""
    ends = Counter(one.end for one in requests)
    codes = Counter(one.detail for one in requests if one.end is End.REFUSED)
    words = ", ".join(f"{ends[end]} {end}" for end in End if ends[end])
    return f"{len(requests)} requests: {words}" + (f" ({_listed(codes)})" if codes else "")


@click.command()
@click.option("--worlds", type=click.IntRange(1), default=30, show_default=True, help="To play.")
@click.option(
    "--from", "first", type=click.IntRange(0), default=1, show_default=True, help="The first seed."
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="After so many no further world begins.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Leave the files of meshes with violations, logs among them, in this directory.",
)
def main(worlds: int, first: int, minutes: float, keep: Path | None) -> None:
    """Play worlds and print a line of each; exit 1 if anything happened that must not."""
    until = time.monotonic() + 60.0 * minutes
    skipped, left_out, faults = Counter(), Counter(), 0
    results: list[Result] = []
    for seed in itertools.count(first):
        if len(results) == worlds or time.monotonic() > until:
            break
        plan = plan_of(world_of(seed))
        if plan.why_not:
            skipped[plan.why_not] += 1
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            results.append(result := uvloop.run(play(plan, Path(place))))
            if keep is not None and result.violations:
                shutil.copytree(place, keep / f"seed-{seed}", dirs_exist_ok=True)
        faults += len(plan.faults)
        left_out += plan.left_out
        click.echo(
            f"seed {seed}: {len(plan.faults)} faults, {counted(result.requests)}; "
            f"{len(result.violations)} violations; {time.monotonic() - began:.0f} s"
        )
        for violation in result.violations[:VIOLATIONS_SHOWN]:
            click.echo(f"- {violation}")
        if result.violations:
            click.echo(f"again: make fault-run WORLDS=1 FROM={seed}")
    violations = sum(len(result.violations) for result in results)
    click.echo(
        f"{len(results)} worlds from seed {first} on; not played: {_listed(skipped)}\n"
        f"played {faults} of {faults + left_out.total()} faults; not: {_listed(left_out)}\n"
        f"{counted([one for result in results for one in result.requests])}\n"
        f"violations: {violations}"
    )
    sys.exit(bool(violations))


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} × {what}" for what, number in counts.most_common()) or "none"


if __name__ == "__main__":
    main()
