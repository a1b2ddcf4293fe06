"""What it brings to know which replica has which LoRA adapter loaded, in the twin.

    make study-lora [QUICK=1]

Chats with fine-tuned variants of one model, some of them far more popular than others (Zipf, 1.0),
on six replicas of one region. Each replica may have a few adapters at once and loads one in a
second when a request asks for it. Each adapter has a system prompt of its own. Three systems: the
`mesh` policy; the same without knowledge of adapters, which places a request as if every replica
had all of them and loads wherever it lands; and `least-load`, which takes a replica with the
adapter first. A replica all of whose adapters are in use is no candidate in any of them.
"""

from collections.abc import Iterator
from random import Random
from statistics import mean

import click

from mesh.core.model.request import Request
from mesh.core.model.served_names import work_name
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, PolicyMakers
from mesh.core.policies.mesh import MODELS_MAX, MeshPolicy
from mesh.core.policies.mesh_caches import keep
from mesh.core.policies.mesh_speeds import SpeedModel
from mesh.replay.report import RunReport
from mesh.sim.config import SimAdapters, WorldConfig
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload
from mesh.sim.world import World, run
from schemas.ids import RegionId
from tests.programs.studies.tables.markdown import table
from tests.support.result_page import result_page

HOME = RegionId("us")
REPLICAS, PROFILE = 6, "l4-llama3.1-8b"
LOAD_S = 1.0
SYSTEM_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 600, (50, 400), (30, 200)
TABLES = ((4, 2), (16, 4))  # adapters, and how many a replica may have at once
RATES_PER_S = (2.0, 6.0)
BLIND = "mesh-without-adapters"
SYSTEMS = {"mesh": "mesh", "mesh, blind to adapters": BLIND, "least-load": "least-load"}
COLUMNS = (
    *("requests/s", "system", "TTFT mean s", "TTFT p50 s", "TTFT p99 s"),
    *("loads per 100 requests", "cached tokens", "not answered"),
)

CONDITIONS = """\
In the twin: one region of six L4 replicas, chats for fine-tuned variants of one model (Zipf,
1.0), each with a system prompt of 600 tokens; a load takes 1 s. Two seeds of 200 s, the mean's
least and most in brackets. *Blind*: placed as if every replica had every adapter, and loaded
wherever that is; in no system is a replica chosen all of whose adapters are in use.
"""


class BlindMesh(MeshPolicy):
    """The `mesh` policy as if each replica had every adapter."""

    def _speeds(self, request: Request) -> SpeedModel:
        work = work_name(request.model)
        if work not in self._models:
            speeds = SpeedModel(generates=request.answer_tokens != 0)
            self._weigh(speeds)
            keep(self._models, work, speeds, MODELS_MAX)
        return self._models[work]


def makers(_: World) -> PolicyMakers:
    return {**POLICIES, BLIND: BlindMesh}


def arrivals(adapters: int, rate_per_s: float, duration_s: float, seed: int) -> Iterator[Arrival]:
    """Requests at random times, each for an adapter by its popularity."""
    dice, at_s, number = Random(f"lora {seed}"), 0.0, 0
    weights = [1.0 / rank for rank in range(1, adapters + 1)]
    while (at_s := at_s + dice.expovariate(rate_per_s)) < duration_s:
        number += 1
        [of] = dice.choices(range(adapters), weights)
        prompt = Segment(of, SYSTEM_TOKENS), Segment(number << 16, dice.randint(*PROMPT_TOKENS))
        answer = Segment((number << 16) + 1, dice.randint(*ANSWER_TOKENS))
        yield Arrival(at_s, HOME, RequestNode(prompt=prompt, answer=answer, adapter=f"a{of}"))


def play(
    system: str, adapters: int, most: int, rate_per_s: float, duration_s: float, seed: int
) -> RunReport:
    """One run."""
    names = tuple(f"a{number}" for number in range(adapters))
    config = WorldConfig(
        regions={HOME: [PROFILE] * REPLICAS},
        settings=RouterSettings(policy=SYSTEMS[system], queue_delay_s_max=0.0),
        adapters=SimAdapters(names=names, most=most, load_s=LOAD_S),
        seed=seed,
    )
    asked = tuple(arrivals(adapters, rate_per_s, duration_s, seed))
    return run(Workload(name="lora", arrivals=asked), config, makers=makers)


def row(system: str, rate_per_s: float, reports: list[RunReport]) -> list[str]:
    """Means over the seeds, and the least and most of the mean time to first token."""
    means = [report["ttft_s"]["mean"] for report in reports]
    spread = f"{mean(means):.3f} ({min(means):.3f}–{max(means):.3f})"
    points = [
        f"{mean([report['ttft_s'][point] for report in reports]):.3f}" for point in ("p50", "p99")
    ]
    sent = sum(report["requests"] for report in reports)
    loads = sum(report["adapter_loads"] for report in reports)
    answered = sum(report["ok"] for report in reports)
    hits = mean([report["cached_token_ratio"] for report in reports])
    return [
        *(f"{rate_per_s:g}", system, spread, *points),
        *(f"{100 * loads / sent:.1f}", f"{hits:.1%}", f"{1 - answered / sent:.2%}"),
    ]


@result_page("lora", "LoRA adapters: where to load them")
@click.command()
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="One seed of a minute.")
def main(seeds: int, quick: bool) -> None:
    """Play chats with adapters, knowing of them and blind to them."""
    print(CONDITIONS)
    duration_s = 60.0 if quick else 200.0
    for adapters, most in TABLES:
        rows = []
        for rate_per_s in RATES_PER_S:
            for system in SYSTEMS:
                reports = [
                    play(system, adapters, most, rate_per_s, duration_s, seed)
                    for seed in range(1 if quick else seeds)
                ]
                rows.append(row(system, rate_per_s, reports))
                click.echo(" · ".join(rows[-1]), err=True)
        print(f"**{adapters} adapters, at most {most} at a replica**\n\n{table(COLUMNS, rows)}\n")


if __name__ == "__main__":
    main()
