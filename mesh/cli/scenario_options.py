"""The options that every study has: who asks, with which engines, over which network."""

from pathlib import Path

import click

from agents.sim.profiles import PROFILES
from mesh.cli.modelled import option
from mesh.core.hold_order import HoldOrder
from mesh.replay.schedule import ASSIGNMENTS
from mesh.sim.study.scenario import DEFAULT_PROFILE
from mesh.sim.workloads import WORKLOADS
from mesh.sim.workloads.from_trace import TRACE_FORMATS

FILE = click.Path(path_type=Path)

SCENARIO_OPTIONS = (
    option("--trace", "Play this recorded trace.", type=FILE),
    option("--format", f"How it is written: {', '.join(TRACE_FORMATS)}.", default="mooncake"),
    option("--workload", f"Or play a made workload: {', '.join(WORKLOADS)}."),
    option(
        "--clients",
        "A workload's people per region.",
        metavar="REGION=N,…",
        default="its source's own",
    ),
    option("--rate-per-s", "Make it an open loop of so many requests a second."),
    option("--duration-s", "How long its requests begin.", default="its source's own"),
    option("--weight", "Regions' shares of a trace.", metavar="REGION=X,…", default="equal"),
    option(
        "--assign",
        f"How a trace's requests are given to regions: {', '.join(ASSIGNMENTS)}.",
        default="hash",
    ),
    option("--speed", "How many times as fast as recorded or made.", default="1"),
    option("--scale-lengths", "Shrink a trace's prompts and answers by this factor.", default="1"),
    option("--limit", "Play only this many requests, the first ones."),
    option("--seed", "Fixes all that chance decides.", default="0"),
    option(
        "--hold-order",
        f"How held requests are tried: {', '.join(HoldOrder)}.",
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
        f"The engines: {', '.join(PROFILES)}; a mix as A*3+B, dealt out in turn; one region's "
        "own as REGION=PROFILE. Repeatable.",
        metavar="[REGION=]PROFILE",
        multiple=True,
        default=DEFAULT_PROFILE,
    ),
    option(
        "--rtt",
        "Round trips between regions: a file with two regions and milliseconds a line, as "
        'us,eu,80, or JSON, as {"us-eu": 80}. Each pair once, both directions.',
        metavar="default|FILE",
        default="us-eu 80, us-ap 150, eu-ap 220",
    ),
    option("--heartbeat-ms", "How often replicas say how they are.", default="100"),
    option("--gossip-ms", "How often regions do, and tell prefixes; 0: at once.", default="100"),
    option("--loss", "Share of heartbeats, digests and pings that never arrive.", default="0"),
    option("--jitter-ms", "Mean extra delay between regions, exponential.", default="0"),
    option("--timeout-s", "A client hangs up after this.", default="600"),
    option("--warmup-s", "Requests that begin earlier are played and not reported.", default="0"),
)
