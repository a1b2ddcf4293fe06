"""`mesh plan`: how few replicas meet a target, with the mesh and without."""

from functools import partial

import click
from rich.console import Console
from rich.status import Status

from agents.sim.profile_files import find_profile
from mesh.cli.modelled import given, options_of, validated, with_options
from mesh.cli.unusable import Unusable
from mesh.replay.report import RunReport, table_console, write_report
from mesh.sim.config import CENTRAL, MESH, REGION_LOCAL
from mesh.sim.offline.config import MESH as OFFLINE_SCOPE
from mesh.sim.study.cells import Cell, config_of, workload_of
from mesh.sim.study.plan import Plan, Planner, PlanTarget, ReplicaCounts, Simulations, demand_of
from mesh.sim.study.results import plan_file, print_plan
from mesh.sim.study.scenario import EVERYWHERE, deal
from mesh.sim.study.settings import PlanSettings
from mesh.sim.workload import Workload
from mesh.sim.world import run

EXIT_NO_FLEET = 1


@click.command()
@with_options(options_of(PlanSettings))
@click.pass_context
def command(ctx: click.Context, /, **options: object) -> None:
    """Find the fewest replicas that meet a target, with the mesh and without.

    \b
      mesh plan --trace conv.csv --format azure --ttft-p90 1.5 --gpu-hour-price 0.8
      mesh plan --workload chat --ttft-p90 1 --throughput 3

    The trace or workload is played in the twin (see `mesh sim`) with fewer and fewer replicas, in
    regions that serve their own clients alone and in a mesh of them. Every fleet that comes out
    was played whole and met the target. A smaller fleet may still answer fewer requests a second
    than a larger one; the plan says so, and --throughput sets how many it must.

    With --offline every line of the batch jobs must be answered in its window, too: in its own
    region without the mesh, in any with it.

    A target that no fleet meets is given up once the most replicas have missed it, too.

    Exit code 0: a fleet was found for every topology; 1: no fleet meets the target, or the file
    can't be written; 2: bad input, nothing was played.
    """
    settings = validated(PlanSettings, given(options))
    try:
        plans, simulations = _planned(settings)
    except ValueError as error:
        raise Unusable(str(error)) from error
    print_plan(settings, plans, simulations, table_console())
    if settings.out is not None:
        try:
            write_report(settings.out, plan_file(settings, plans, simulations))
        except OSError as error:
            raise click.ClickException(f"can't write {settings.out}: {error.strerror}") from error
        click.echo(f"wrote {settings.out}")
    if any(plan.replicas is None for plan in plans):
        ctx.exit(EXIT_NO_FLEET)


def _planned(settings: PlanSettings) -> tuple[list[Plan], int]:
    """The plans, region-local first because the others begin where it ended."""
    regions = settings.region_names
    topologies = [REGION_LOCAL, MESH]
    if settings.central is not None:
        topologies.append(f"{CENTRAL}:{settings.central}")
    console = Console(stderr=True)
    with console.status("reading the workload") as status:
        workload = workload_of(settings)
        first = find_profile(settings.patterns[EVERYWHERE][0])
        simulations = Simulations(
            lambda: workload_of(settings) if workload.clients else workload,
            partial(_play, settings),
            limit=settings.simulations_max,
            show=lambda number, what: _show(status, number, what),
        )
        planner = Planner(
            simulations,
            PlanTarget(
                ttft_p90_s=settings.ttft_p90,
                throughput_per_s=settings.throughput,
                lost_max=settings.lost_max,
            ),
            demand_of(workload, regions, first, settings.offline_regions),
            regions,
            replicas_max=settings.replicas_max,
        )
        plans: list[Plan] = []
        for topology in topologies:
            if plans and plans[-1].replicas is None:  # at once, for the others may take long
                console.print(f"{plans[-1].topology}: no fleet; going on with {topology}")
            plans.append(planner.plan(topology))
        return plans, simulations.count


def _show(status: Status, number: int, what: str) -> None:
    status.update(f"simulation {number}: {what}")


def _play(
    settings: PlanSettings, workload: Workload, topology: str, replicas: ReplicaCounts
) -> RunReport:
    cell = Cell(
        policy=settings.policy,
        topology=topology,
        pushing=settings.pushing,
        offline=OFFLINE_SCOPE if settings.offline else None,
        replicas=replicas,
    )
    return run(workload, config_of(settings, cell, deal(settings.patterns, replicas)))
