"""What tracing, the access log and the ring of ended requests cost the router and the agent.

    make bench-tracing

Six meshes over one scripted engine, each a router, a nats-server and an agent of its own: tracing
off, twice; 1, 10 and 100 % of requests sampled, by OpenTelemetry's standard variables alone, with
spans by OTLP to collectors in this process; and a router without access log that keeps one ended
request, the least there is. Figures are CPU time of the two processes for a request. A ratio is to
another mesh in the same round; that of the two alike is what chance does. All are asked at once: in
turns, two alike were 14 % apart on a machine with other work. Every round has new processes, since
each keeps some percent that it was born with, and starts them in another order.
Spans leave every 5 s: a round must be some times as long, so that it pays for as many as it makes.

What tracing costs that is off can't be seen from outside: there is no router without it. So the
bytecodes are counted that a request spends in the tracing modules and in OpenTelemetry.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import opentelemetry.trace

from infra import span_conventions, trace_context, tracing
from mesh.adapters import span_attributes, spans, tail_rule
from tests.gate import bytecodes
from tests.programs.bench.cells import Cell, Client
from tests.programs.bench.measure import Figures, Meter
from tests.programs.bench.processes import Absent, Processes
from tests.programs.bench.report import shown
from tests.programs.bench.results import Results
from tests.programs.bench.run import engines
from tests.programs.bench.spread import quartiles, ratios
from tests.programs.bench.systems.mesh import mesh
from tests.programs.bench.systems.system import Place, System
from tests.programs.studies.tables.markdown import table
from tests.support.nats_server import running_nats_server
from tests.support.otlp_collector import Collector, otlp_collector
from tests.support.result_page import result_page


class Setting(NamedTuple):
    """How one mesh is run. `sampled`: the share of requests; None: tracing is off."""

    sampled: float | None = None
    router_options: tuple[str, ...] = ()


OFF, AGAIN, NO_LOG = "off", "off again", "off, no log"
SETTINGS = {
    NO_LOG: Setting(router_options=("--access-log", "off", "--requests-kept", "1")),
    OFF: Setting(),
    AGAIN: Setting(),
    "1 %": Setting(0.01),
    "10 %": Setting(0.1),
    "100 %": Setting(1.0),
}
COMPARED_TO = {OFF: NO_LOG, **dict.fromkeys((AGAIN, "1 %", "10 %", "100 %"), OFF)}
CONNECTIONS = 8  # of each mesh
EXPORT_EVERY_S = 5.0  # OpenTelemetry's default
FIGURES = {"router_cpu_us": "router", "agents_cpu_us": "agent"}
OPENTELEMETRY = Path(opentelemetry.trace.__file__).parents[1]
TRACING = (
    *(module.__file__ for module in (tracing, trace_context, span_conventions)),
    *(module.__file__ for module in (spans, span_attributes, tail_rule)),
    str(OPENTELEMETRY),
)

Counted = Mapping[str, tuple[float, float]]


def cells(seconds: float) -> tuple[Cell, ...]:
    """A plain request, and a stream of 32 chunks; each as long."""
    return (
        Cell("plain", Client.WRK, 200, 0, 0, CONNECTIONS, seconds),
        Cell("stream", Client.WRK, 200, 32, 5, CONNECTIONS, seconds),
    )


def environment(sampled: float | None, collector_url: str) -> Mapping[str, str]:
    """The variables of a process that traces such a share of requests; None: tracing is off."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "" if sampled is None else collector_url,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": f"{sampled or 0}",
        "OTEL_BSP_SCHEDULE_DELAY": f"{1000 * EXPORT_EVERY_S:.0f}",
    }


@dataclass(frozen=True, slots=True)
class Side:
    """One of the meshes, and the collector of its spans."""

    system: System
    collector: Collector
    meter: Meter

    async def turn(self, cell: Cell, number: int) -> Figures:
        """CPU of each process for a request, and spans received for one. Raises Absent."""
        self.collector.spans.clear()
        figures = await self.meter.measure(cell, self.system, number)
        received = Counter(span.service for span in self.collector.spans)
        return figures | {f"{name} spans": n / figures["answered"] for name, n in received.items()}


async def play(rounds: int, seconds: float, show: Callable[[str], None]) -> Results:
    """Figures by cell and setting, one a round. Raises Absent without wrk."""
    found = Results()
    warm, _ = cells(1.2 * EXPORT_EVERY_S)
    for number in range(rounds):
        async with _raised(_rotated(number)) as sides:
            await _turns(sides, warm, 0)  # connections, imports and first exports: left out
            for turn, cell in enumerate(cells(seconds), 1):
                for setting, figures in (await _turns(sides, cell, turn)).items():
                    found.add(cell.name, setting, figures)
                    show(f"round {number + 1}, {cell.name}, {setting}: {_line(figures)}")
    return found


def _rotated(number: int) -> Sequence[str]:
    """The settings, in the order of that round."""
    names = list(SETTINGS)
    first = number % len(names)
    return names[first:] + names[:first]


@asynccontextmanager
async def _raised(names: Sequence[str]) -> AsyncIterator[Mapping[str, Side]]:
    """A mesh of each of these settings, running."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = await stack.enter_async_context(Processes(directory / "logs"))
        place = Place(processes, await engines(processes, 1), directory)
        meter = Meter(directory, directory)
        sides = {}
        for number, name in enumerate(names):
            collector = await stack.enter_async_context(otlp_collector())
            system = await mesh(
                place,
                name=f"mesh-{number}",
                environment=environment(SETTINGS[name].sampled, collector.url),
                router_options=SETTINGS[name].router_options,
            )
            sides[name] = Side(system, collector, meter)
        yield sides


async def _turns(sides: Mapping[str, Side], cell: Cell, number: int) -> Mapping[str, Figures]:
    turns = [side.turn(cell, number * len(sides) + n) for n, side in enumerate(sides.values())]
    return dict(zip(sides, await asyncio.gather(*turns), strict=True))


def _line(figures: Figures) -> str:
    return ", ".join(f"{process} {figures[figure]:.0f} us" for figure, process in FIGURES.items())


async def count_off() -> Counted:
    """Bytecodes of a request at the router in tracing that is off, and in all of our code."""
    with tempfile.TemporaryDirectory() as name:
        async with running_nats_server(Path(name) / "nats") as server:
            in_tracing = await bytecodes.count_edge(server.url, TRACING)
            in_all = await bytecodes.count_edge(server.url, (*bytecodes.OURS, *TRACING))
    return {name: (in_tracing[name], in_all[name]) for name in in_all}


def report(found: Results, counted: Counted) -> str:
    """Two tables."""
    rows = [
        _row(found, cell, figure, setting)
        for cell in found.rounds
        for figure in FIGURES
        for setting in SETTINGS
    ]
    head = ("", "mesh", "CPU of a request, µs", "ratio", "to", "spans of a request")
    off = [
        (act, f"{part:,.0f}", f"{whole:,.0f}", f"{part / whole:.2%}")
        for act, (part, whole) in counted.items()
    ]
    off_head = ("the router, tracing off", "bytecodes in tracing", "in all", "share")
    return f"{table(head, rows)}\n\n{table(off_head, off)}"


def _row(found: Results, cell: str, figure: str, setting: str) -> Sequence[str]:
    process, values = FIGURES[figure], found.values(cell, setting, figure)
    row = [f"{cell}: {process}", setting, shown(quartiles(values))]
    base = COMPARED_TO.get(setting)
    if base is None:
        return [*row, "", "", ""]
    ratio = shown(quartiles(ratios(values, found.values(cell, base, figure))))
    received = quartiles(found.values(cell, setting, f"mesh-{process} spans"))
    return [*row, ratio, base, "" if received is None else shown(received)]


@result_page("tracing-cost", "What tracing and the access log cost")
@click.command()
@click.option("--rounds", type=click.IntRange(1), default=12, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.5), default=10.0, show_default=True)
def main(rounds: int, seconds: float) -> None:
    """Measure and print tables: medians with quartiles."""
    try:
        found = asyncio.run(play(rounds, seconds, lambda line: print(line, file=sys.stderr)))
    except Absent as problem:
        raise click.ClickException(str(problem)) from None
    print(report(found, asyncio.run(count_off())))


if __name__ == "__main__":
    main()
