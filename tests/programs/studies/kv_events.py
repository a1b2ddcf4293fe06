"""KV events against estimates on recorded agent sessions, in the twin.

    make study-kv-events TRACES=folder

Coding agents' sessions (kv-cache-tester), lengths scaled down as in the study of the `mesh` policy,
on four simulated replicas, some with less KV memory: with agents that follow their engines' events,
and without. A prediction is what the router took for cached when it placed a request; it is wrong
if that differs from what was cached by more than 96 tokens and by more than a tenth of the prompt.
Both arms play the same requests with the same seeds.
"""

from dataclasses import dataclass
from pathlib import Path

import click

from mesh.core.model.settings import RouterSettings
from mesh.sim.config import WorldConfig
from mesh.sim.workloads.traces import AGENT_SESSIONS, from_trace
from mesh.sim.world import World, report
from schemas.ids import RegionId
from tests.programs.studies.tables.markdown import table
from tests.support.result_page import result_page

HERE = Path(__file__).parents[2] / "data" / "kv-cache-tester" / "four_sessions.jsonl"
TRACE = Path("agent_traces") / "kv-cache-tester" / "dev.jsonl"
HOME = RegionId("us")
SCALE = 0.03
REPLICAS = 4
PROFILE = "l4-llama3.1-8b"
KV_TOKENS = (10_000, 16_000, 38_000)
WRONG_TOKENS, WRONG_SHARE = 96, 0.1
EXACT, ESTIMATED = "KV events", "estimates"


@dataclass(slots=True)
class Predictions:
    """Of one run. Tokens."""

    count: int = 0
    wrong: int = 0
    too_many: int = 0
    prompt: int = 0
    cached: int = 0
    blocks: int = 0  # in agents' deltas
    ttft_s: float | None = None

    def add(self, prompt: int, predicted: int, cached: int) -> None:
        """One answer."""
        off = abs(predicted - cached)
        is_wrong = off > WRONG_TOKENS and off > WRONG_SHARE * prompt
        self.count += 1
        self.wrong += is_wrong
        self.too_many += is_wrong and predicted > cached
        self.prompt += prompt
        self.cached += cached

    def row(self, *names: str) -> list[str]:
        """Of the report's table."""
        count = max(1, self.count)
        return [
            *names,
            f"{self.count:,}",
            f"{self.wrong / count:.2%}",
            f"{self.too_many:,} / {self.wrong - self.too_many:,}",
            f"{self.cached / max(1, self.prompt):.3f}",
            "–" if self.ttft_s is None else f"{self.ttft_s:.3f}",
            f"{self.blocks / count:.1f}",
        ]


COLUMNS = (
    *("KV tokens of a replica", "agents with", "requests", "wrong predictions"),
    *("too many / too few cached", "cached tokens / prompt tokens", "first token p50, s"),
    "blocks in deltas for a request",
)


def play(trace: Path, requests: int, kv_tokens: int, seed: int, *, exact: bool) -> Predictions:
    """One run."""
    config = WorldConfig(
        regions={HOME: [PROFILE] * REPLICAS},
        settings=RouterSettings(policy="mesh"),
        kv_tokens=kv_tokens,
        kv_events=exact,
        seed=seed,
    )
    workload = from_trace(
        trace, AGENT_SESSIONS, regions={HOME: 1.0}, limit=requests, scale=SCALE, seed=seed
    )
    world, found = World(workload, config), Predictions()
    world.watch_cached = found.add
    world.run()
    found.ttft_s = report(world, workload)["ttft_s"]["p50"]
    for replica in world.replicas.values():
        found.blocks += 0 if replica.kv_events is None else replica.kv_events.published
    return found


@result_page("kv-events-twin", "KV events against estimates, recorded agents")
@click.command()
@click.option("--traces", type=click.Path(exists=True, path_type=Path), help="Recorded traces.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="One seed of 150 requests.")
@click.option("--full", is_flag=True, help="3,000 requests.")
def main(traces: Path | None, seeds: int, quick: bool, full: bool) -> None:
    """Play agent sessions with KV events and without."""
    requests = 150 if quick else 3000 if full else 1000
    trace = HERE if traces is None else traces / TRACE
    rows = []
    for kv_tokens in KV_TOKENS:
        for seed in range(1 if quick else seeds):
            for name, exact in ((EXACT, True), (ESTIMATED, False)):
                found = play(trace, requests, kv_tokens, seed, exact=exact)
                rows.append(found.row(f"{kv_tokens:,}", name))
                click.echo(" ".join(rows[-1]), err=True)
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
