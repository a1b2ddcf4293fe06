"""What a tenant gets beside another one's flood, in the twin: with fair shares and without.

    make study-fair [QUICK=1]

Tenant B chats: conversations with a system prompt of its own, at 70 % of its share of the fleet's
engine time. Tenant A floods it: 200 clients with long prompts, each asking again as soon as it is
answered. *Alone*: B without A, on the whole fleet, and on as much of it as B's share is. *One
queue*: both, by routers that don't know whose requests are whose. Throughput counts prompt and
answer tokens of both; what is cached counts B's prompts, as A's are all new.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from statistics import mean

import click

from agents.sim.profile_files import find_profile
from mesh.core.model.settings import RouterSettings
from mesh.replay.tally import RequestOutcome
from mesh.sim.config import WorldConfig
from mesh.sim.workload import (
    Arrival,
    ClosedLoopClient,
    RequestEnd,
    RequestNode,
    Segment,
    SentRequest,
    Workload,
    chain,
)
from mesh.sim.workloads.capacity import offered
from mesh.sim.workloads.content import seeded, segment
from mesh.sim.world import SETTLE_S, run
from schemas.ids import RegionId
from tests.programs.studies.tables.markdown import table
from tests.support.result_page import result_page

PROFILE = "h100-llama3.1-8b"
A, B = "acme", "beta"
FLOOD = 200  # A's clients
A_PROMPT, A_ANSWER = (6_000, 10_000), (100, 300)
B_SYSTEM, B_TURN, B_ANSWER, B_TURNS, B_PAUSE_S = 1_000, (100, 500), (50, 200), 4, 2.0
B_LOAD = 0.7  # of its share
WARM_UP_S = 20.0
ONE, THREE = {"us": 4}, {"us": 4, "eu": 4, "ap": 4}

CONDITIONS = f"""\
In the twin: H100s ({PROFILE}), four in each region, the default policy and limits. B chats
({B_TURNS} turns of {B_TURN[0]} to {B_TURN[1]} tokens after a system prompt of {B_SYSTEM}) in every
region at {B_LOAD:.0%} of its share of the fleet; A has {FLOOD} clients in one region, each of which
sends a prompt of {A_PROMPT[0]:,} to {A_PROMPT[1]:,} new tokens as soon as it has its answer. First
tokens are B's, in seconds; in brackets the least and most of the seeds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table. `a_weight`, `b_weight`: of the tenants."""

    name: str
    fleet: dict[str, int]
    a_weight: float = 1.0
    b_weight: float = 1.0
    floods: bool = True
    is_fair: bool = True  # routers know whose requests are whose
    part: float = 1.0  # of each region's replicas

    @property
    def share(self) -> float:
        return self.b_weight / (self.a_weight + self.b_weight)


def rows_of(fleet: dict[str, int], a_weight: float, b_weight: float) -> list[Row]:
    """B alone, on all and on its share; beside A without and with fair shares."""
    all_of = Row(name="alone", fleet=fleet, a_weight=a_weight, b_weight=b_weight, floods=False)
    flooded = replace(all_of, floods=True)
    return [
        all_of,
        replace(all_of, name="alone on its share", part=all_of.share),
        replace(flooded, name="one queue", is_fair=False),
        replace(flooded, name="fair shares"),
    ]


def chats(region: str, seed: int, rate_per_s: float, until_s: float, tenant: str) -> list[Arrival]:
    """B's conversations, so many a second; their turns share all that was said before."""
    dice, at_s, found = seeded("chats", region, seed), 0.0, list[Arrival]()
    for session in count():
        at_s += dice.expovariate(rate_per_s)
        if at_s > until_s:
            break
        said: tuple[Segment, ...] = (segment(B_SYSTEM, "system"),)
        turns = []
        for turn in range(B_TURNS):
            name = (region, seed, session, turn)
            asked = segment(dice.randint(*B_TURN), "asked", *name)
            answer = segment(dice.randint(*B_ANSWER), "answer", *name)
            turns.append(((*said, asked), answer))
            said = (*said, asked, answer)
        found.append(
            Arrival(at_s, RegionId(region), owned(chain(turns, session, B_PAUSE_S), tenant))
        )
    return found


def owned(node: RequestNode, tenant: str) -> RequestNode:
    """That tree, of that tenant."""
    children = tuple(owned(child, tenant) for child in node.children)
    return replace(node, tenant=tenant, children=children)


def documents(client: int, seed: int, tenant: str) -> Iterator[RequestNode]:
    """A's prompts, none like another."""
    dice = seeded("documents", client, seed)
    for number in count():
        prompt = segment(dice.randint(*A_PROMPT), "document", seed, client, number)
        answer = segment(dice.randint(*A_ANSWER), "summary", seed, client, number)
        yield RequestNode(prompt=(prompt,), answer=answer, tenant=tenant)


def workload(row: Row, seed: int, until_s: float) -> Workload:
    """Both tenants' requests."""
    engines = sum(row.fleet.values()) * row.share * B_LOAD / len(row.fleet)
    profile = find_profile(PROFILE)
    sample = chats("us", 0, 1.0, 600.0, B)
    rate_per_s = engines / offered(Workload(name="sample", arrivals=tuple(sample)), profile)
    tenants = (A, B) if row.is_fair else ("", "")
    arrivals = [
        one for region in row.fleet for one in chats(region, seed, rate_per_s, until_s, tenants[1])
    ]
    clients = tuple(
        ClosedLoopClient(RegionId("us"), documents(number, seed, tenants[0]), number * 0.02)
        for number in range(FLOOD if row.floods else 0)
    )
    in_order = tuple(sorted(arrivals, key=lambda one: one.at_s))
    return Workload(name="fair", arrivals=in_order, clients=clients, until_s=until_s)


class Ends:
    """What both tenants got between the warm-up and the end of the load."""

    def __init__(self, until_s: float) -> None:
        self._until_s = SETTLE_S + until_s
        self.ttft_s: list[float] = []
        self.tokens = self.prompt_tokens = self.cached_tokens = self.lost = 0

    def add(self, sent: SentRequest, end: RequestEnd, now: float) -> None:
        """One request's end."""
        is_whole = end.outcome is RequestOutcome.OK and sent.first_at is not None
        if is_whole and now <= self._until_s:
            self.tokens += sent.node.prompt_tokens + sent.node.answer.tokens
        if sent.node.prompt_tokens >= A_PROMPT[0] or sent.sent_at > self._until_s:
            return
        if not is_whole or sent.first_at is None:
            self.lost += 1
            return
        self.ttft_s.append(sent.first_at - sent.sent_at)
        self.prompt_tokens += sent.node.prompt_tokens
        self.cached_tokens += end.cached_tokens


Figures = dict[str, float]


def play(row: Row, seed: int, until_s: float) -> Figures:
    """One run."""
    weights = ((A, row.a_weight), (B, row.b_weight))
    config = WorldConfig(
        regions={RegionId(name): [PROFILE] * round(n * row.part) for name, n in row.fleet.items()},
        settings=RouterSettings(tenant_weights=weights),
        seed=seed,
        warmup_s=WARM_UP_S,
    )
    ends = Ends(until_s)
    run(workload(row, seed, until_s), config, watch=ends.add)
    times = sorted(ends.ttft_s)
    return {
        "p50": times[len(times) // 2],
        "p99": times[int(len(times) * 0.99)],
        "tokens_per_s": ends.tokens / (until_s - WARM_UP_S),
        "cached": ends.cached_tokens / ends.prompt_tokens,
        "lost": ends.lost / (ends.lost + len(times)),
    }


def line(row: Row, found: list[Figures], first: list[list[Figures]]) -> list[str]:
    """Of the table; `first`: of the rows so far, this one's last."""

    def spread(name: str) -> str:
        values = [one[name] for one in found]
        return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"

    def ratio(name: str, to: list[Figures]) -> str:
        return f"{mean(one[name] for one in found) / mean(one[name] for one in to):.2f}×"

    cells = [row.name, spread("p50"), ratio("p50", first[0]), spread("p99"), ratio("p99", first[0])]
    to = first[2] if len(first) > 2 else found
    return [
        *cells,
        f"{mean(one['tokens_per_s'] for one in found):,.0f}",
        ratio("tokens_per_s", to) if row.floods else "–",
        f"{mean(one['cached'] for one in found):.1%}",
        f"{mean(one['lost'] for one in found):.1%}",
    ]


COLUMNS = (
    *("B", "p50", "to alone", "p99", "to alone"),
    *("tokens/s", "to one queue", "cached of B's", "not answered of B's"),
)
TABLES = (
    ("One region, weights 1 : 1", ONE, 1.0, 1.0),
    ("One region, A 3 : B 1", ONE, 3.0, 1.0),
    ("Three regions, weights 1 : 1", THREE, 1.0, 1.0),
    ("Three regions, A 3 : B 1", THREE, 3.0, 1.0),
)


@result_page("fair", "Fair shares of tenants")
@click.command()
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="One seed, one table.")
def main(seeds: int, quick: bool) -> None:
    """Play a tenant's chats beside another one's flood."""
    print(CONDITIONS)
    until_s, repeat = 60.0, 1 if quick else seeds
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for title, fleet, a_weight, b_weight in TABLES[: 1 if quick else None]:
            rows = rows_of(fleet, a_weight, b_weight)
            plays = [
                [pool.submit(play, row, seed, until_s) for seed in range(repeat)] for row in rows
            ]
            lines, found = [], list[list[Figures]]()
            for row, own in zip(rows, plays, strict=True):
                found.append([one.result() for one in own])
                lines.append(line(row, found[-1], found))
                click.echo(" · ".join(lines[-1]), err=True)
            print(f"**{title}**\n\n{table(COLUMNS, lines)}\n", flush=True)


if __name__ == "__main__":
    main()
