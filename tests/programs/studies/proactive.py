"""What computing hot prefixes before they are asked for brings and costs (GORGO section 8).

    make study-proactive [QUICK=1 | FULL=1]

A day of ten minutes in three regions that peak at different hours, with and without warming: for
one product of the whole world (documents that come and go, shared by all regions), on large GPUs
and on small ones whose memory holds five documents; and for what it should not help: chat, short
prompts, tools whose popularity is constant. A gain is a lower time to first token at no cost to
its tail.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import hit_ratio, lost_ratio, ttft
from tests.programs.studies.tables.markdown import seconds, share, table
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

MESH = System(name="mesh", policy="mesh")
L4, H100 = "l4-llama3.1-8b", "h100-llama3.1-8b"
DAY_S = 600.0
TREND_S = DAY_S / 12  # two hours of that day
SHARES = (0.0, 0.1)
EVEN = {"us": 40, "eu": 40, "ap": 40}
WORKLOADS: dict[str, dict[str, Any]] = {
    "world product, 6 H100": {
        "workload": "world-product",
        "rate_per_s": 4.0,
        "profile": (H100,),
        "replicas": 6,
    },
    "world product, 6 H100, busy": {
        "workload": "world-product",
        "rate_per_s": 16.0,
        "profile": (H100,),
        "replicas": 6,
    },
    "world product, 9 L4": {
        "workload": "world-product",
        "rate_per_s": 0.8,
        "profile": (L4,),
        "replicas": 9,
    },
    "chat by day, 6 L4": {
        "workload": "diurnal",
        "clients": EVEN,
        "rate_per_s": 3.0,
        "profile": (L4,),
        "replicas": 6,
    },
    "tools, 6 L4": {
        "workload": "toolbench",
        "rate_per_s": 3.0,
        "profile": (L4,),
        "replicas": 6,
    },
    "short, 6 L4": {"workload": "short", "rate_per_s": 6.0, "profile": (L4,), "replicas": 6},
}


def declare(size: Size) -> list[Case]:
    """Every workload with and without."""
    duration_s = size.pick(DAY_S / 4, DAY_S, 4 * DAY_S)
    return [
        case(
            (name, idle_share),
            MESH,
            fleet(asked["replicas"]),
            seed=seed,
            duration_s=duration_s,
            setting=(
                f"warm_idle_share={idle_share}",
                f"warm_trend_s={TREND_S * duration_s / DAY_S}",
            ),
            **{key: value for key, value in asked.items() if key != "replicas"},
        )
        for seed in range(size.seeds)
        for name, asked in WORKLOADS.items()
        for idle_share in SHARES
    ]


def warm(name: str) -> Callable[[Result], float]:
    """One of the counts of warming."""
    return lambda result: float(result["warm_ups"][name])


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """With beside without, and what was spent."""
    found = Results(cases, results)
    rows = []
    for name in dict.fromkeys(place[0] for place in found.places()):
        for idle_share in SHARES:
            means = [
                seconds(found.mean(ttft(point), name, idle_share))
                for point in ("mean", "p50", "p90", "p99")
            ]
            hits, lost, spent_s, idle_s, tokens, forwarded = (
                found.mean(read, name, idle_share)
                for read in (
                    hit_ratio,
                    lost_ratio,
                    warm("spent_s"),
                    warm("idle_s"),
                    warm("tokens"),
                    lambda result: float(result["forwarded"]),
                )
            )
            part = share(spent_s / idle_s) if idle_s else "–"
            label = f"{name}: {'warmed' if idle_share else 'as it is'}"
            rows.append(
                [label, *means, share(hits), f"{forwarded:.0f}", f"{tokens:.0f}", part, share(lost)]
            )
    head = [
        "",
        *(f"TTFT {point} s" for point in ("mean", "p50", "p90", "p99")),
        "cached tokens",
        "forwarded",
        "tokens warmed",
        "of idle time",
        "lost",
    ]
    return table(head, rows)


main = command("proactive", declare, write, "What warming brings and costs.", seeds=2)

if __name__ == "__main__":
    main()
