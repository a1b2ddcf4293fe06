"""The options that every study has: who asks, with which engines, over which network."""

from pathlib import Path

import click

from agents.sim.profiles import PROFILES
from mesh.cli.modelled import option
from mesh.core.waiting.hold_order import HoldOrder
from mesh.replay.schedule import ASSIGNMENTS
from mesh.sim.study.scenario import DEFAULT_PROFILE
from mesh.sim.workloads import WORKLOADS
from mesh.sim.workloads.from_trace import TRACE_FORMATS

FILE = click.Path(path_type=Path)

SCENARIO_OPTIONS = (
    option("--trace", "Play this recorded trace; or else give --workload.", type=FILE),
    option(
        "--format",
        f"How the trace is written: {', '.join(TRACE_FORMATS)}.",
        metavar="FORMAT",
        default="mooncake",
    ),
    option(
        "--workload",
        f"Play made requests instead of a trace: {', '.join(WORKLOADS)}.",
        metavar="WORKLOAD",
    ),
    option(
        "--clients",
        "How many people ask, per region, in a workload.",
        metavar="REGION=N,…",
        default="its source's own",
    ),
    option(
        "--rate-per-s",
        "So many of a workload's requests come a second, whatever the mesh does (an open loop). "
        "Without it most workloads are closed loops: who has an answer asks again.",
        metavar="X",
    ),
    option(
        "--duration-s",
        "For how long a workload's people begin new requests.",
        metavar="S",
        default="its source's own",
    ),
    option(
        "--weight", "Regions' shares of a trace's requests.", metavar="REGION=X,…", default="equal"
    ),
    option(
        "--assign",
        f"How a trace's requests are given to regions: {', '.join(ASSIGNMENTS)}.",
        metavar="HOW",
        default="hash",
    ),
    option(
        "--speed",
        "Requests come so many times as fast as recorded or made.",
        metavar="X",
        default="1",
    ),
    option(
        "--scale-lengths",
        "Make a trace's prompts and answers so many times as long, up to 1.",
        metavar="X",
        default="1",
    ),
    option("--limit", "Play only this many requests, the first ones.", metavar="N"),
    option("--seed", "Fixes all that chance decides.", metavar="N", default="0"),
    option(
        "--hold-order",
        f"Whose turn it is among held requests: {', '.join(HoldOrder)}.",
        metavar="ORDER",
        default=HoldOrder.FIRST_COME.value,
    ),
    option(
        "--setting",
        "Any other setting of the routers, by its name in mesh/core/settings.py. Repeatable.",
        metavar="NAME=VALUE",
        multiple=True,
    ),
    option(
        "--profile",
        f"What engines stand there: {', '.join(PROFILES)}. A mix is written A*3+B and dealt out "
        "in turn; REGION=PROFILE is for one region. Repeatable.",
        metavar="[REGION=]PROFILE",
        multiple=True,
        default=DEFAULT_PROFILE,
    ),
    option(
        "--rtt",
        "Round trips between regions: a file with two regions and milliseconds a line, as "
        'us,eu,80, or JSON, as {"us-eu": 80}. Each pair once, both directions.',
        metavar="default|FILE",
        default="us,eu,80 us,ap,150 eu,ap,220",
    ),
    option(
        "--heartbeat-ms",
        "How often replicas tell their router how they are.",
        metavar="MS",
        default="100",
    ),
    option(
        "--gossip-ms",
        "How often regions tell each other how they are and which prefixes they hold; 0: at once.",
        metavar="MS",
        default="100",
    ),
    option(
        "--loss",
        "Share of heartbeats, digests and pings that never arrive.",
        metavar="X",
        default="0",
    ),
    option(
        "--jitter-ms", "Mean extra delay between regions, exponential.", metavar="MS", default="0"
    ),
    option("--timeout-s", "A client hangs up after this.", metavar="S", default="600"),
    option(
        "--warmup-s",
        "Requests that begin earlier are played and not reported.",
        metavar="S",
        default="0",
    ),
)
