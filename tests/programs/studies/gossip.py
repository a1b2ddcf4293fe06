"""What prefix gossip brings and costs: cached tokens with it, without it, and with one index.

    make study-gossip [QUICK=1 | FULL=1] [TRACES=folder]

Three regions of two routers each, whose clients come to either router and, of the trace, to any
region. The reference is `mesh-everywhere`: the same policy with one index over all replicas, which
receives everything at once. Bytes are those of the busiest direction of a link, over the whole run.
Without siblings' deltas a router knows only what it placed itself.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model.settings import RouterSettings
from schemas.gossip import size_bytes
from schemas.ids import RegionId, RouterId
from tests.programs.studies.tables.case import Case, System, case, fleet
from tests.programs.studies.tables.command import Size, command
from tests.programs.studies.tables.figures import hit_ratio, ttft
from tests.programs.studies.tables.markdown import mark, seconds, share, table
from tests.programs.studies.tables.result_files import Result
from tests.programs.studies.tables.results import Results

ROUTERS = 2
MESH = System(name="mesh", policy="mesh")
EVERYWHERE = System(name="mesh-everywhere", policy="mesh-everywhere")
NOTHING, INSIDE, GOSSIP, ALL = "nothing told", "siblings only", "gossip", "one index of all"
SILENT = {"trie_bytes_per_s": 0, "siblings_bytes_per_s": 0}
FORMS: dict[str, tuple[System, dict[str, int]]] = {
    NOTHING: (MESH, SILENT),
    INSIDE: (MESH, {"trie_bytes_per_s": 0}),
    GOSSIP: (MESH, {}),
    ALL: (EVERYWHERE, {}),
}
REACHED_MIN = 0.95  # of what one index of all comes to
LINK_BYTES_MAX = 65_536
BUDGETS = (1024, 4096, 16_384, 65_536, 262_144)
H100, L4 = "h100-llama3.1-8b", "l4-llama3.1-8b"
RATES = (10, 100, 400)  # requests a second and region
PATH_BLOCKS, PROMPTS, GROWTH_S = 50, 40, 60.0


def declare(size: Size) -> list[Case]:
    """Every workload in every form, and the budgets on the one that has most to publish."""
    cases = []
    for seed in range(size.seeds):
        for name, asked in _workloads(size).items():
            for form, (system, settings) in FORMS.items():
                cases.append(_case((name, form), system, asked, settings, seed))
            for budget in BUDGETS:
                settings = {"trie_bytes_per_s": budget}
                cases.append(_case((name, budget), MESH, asked, settings, seed))
    return cases


def _workloads(size: Size) -> dict[str, dict[str, Any]]:
    busy_s = size.pick(5.0, 20.0, 60.0)
    requests = int(size.pick(300, 900, 3000))
    found: dict[str, dict[str, Any]] = {
        "chat, 10 requests/s": {
            "workload": "chat",
            "rate_per_s": 10.0,
            "duration_s": requests / 10.0,
            "profile": (L4,),
            "replicas": 6,
        },
        "chat, 100 requests/s in each region": {
            "workload": "chat",
            "rate_per_s": 300.0,
            "duration_s": busy_s,
            "profile": (H100,),
            "replicas": 18,
        },
    }
    if size.traces is not None:
        found["mooncake conversation"] = {
            "trace": size.traces / "mooncake" / "conversation_first30min.jsonl",
            "limit": requests,
            "profile": (H100,),
            "replicas": 6,
        }
    return found


def _case(
    tags: tuple[Any, ...],
    system: System,
    asked: dict[str, Any],
    settings: dict[str, int],
    seed: int,
) -> Case:
    fields = {key: value for key, value in asked.items() if key != "replicas"}
    world = {"routers": ROUTERS}
    setting = tuple(f"{name}={value}" for name, value in settings.items())
    replicas = fleet(asked["replicas"])
    return case(tags, system, replicas, world=world, setting=setting, seed=seed, **fields)


def write(cases: Sequence[Case], results: Sequence[Result]) -> str:
    """The forms side by side, the curve of budgets, and how bytes grow."""
    found = Results(cases, results)
    names = list(dict.fromkeys(place[0] for place in found.places()))
    return "\n\n".join([_forms(found, names), _budgets(found, names), _growth()])


def _forms(found: Results, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        best = found.mean(hit_ratio, name, ALL)
        for form in FORMS:
            hits, ttft_s = (found.mean(read, name, form) for read in (hit_ratio, ttft("mean")))
            link = found.mean(link_bytes_per_s, name, form)
            is_ours = form == GOSSIP
            met = mark(hits >= REACHED_MIN * best and link <= LINK_BYTES_MAX) if is_ours else ""
            row = [f"{name}: {form}", share(hits), share(hits / best), seconds(ttft_s)]
            rows.append([*row, f"{link / 1024:.1f}", met])
    head = ["", "cached tokens", "of one index's", "TTFT mean s", "KiB/s on a link", "≥ 95 %, ≤ 64"]
    return table(head, rows)


def _budgets(found: Results, names: Sequence[str]) -> str:
    rows = [
        [
            f"{name}: {budget / 1024:g} KiB/s",
            share(found.mean(hit_ratio, name, budget)),
            share(found.mean(hit_ratio, name, budget) / found.mean(hit_ratio, name, ALL)),
            f"{found.mean(link_bytes_per_s, name, budget) / 1024:.1f}",
        ]
        for name in names
        for budget in BUDGETS
    ]
    return table(["budget of a link", "cached tokens", "of one index's", "KiB/s told"], rows)


def link_bytes_per_s(result: Result) -> float:
    """Of the busiest direction."""
    return max(result["trie_bytes_per_s"].values(), default=0.0)


def _growth() -> str:
    rows = []
    for rate in RATES:
        again, new = (_told_per_s(rate, is_new) for is_new in (False, True))
        rows.append([f"{rate} requests/s", f"{again:.0f}", f"{new:.0f}", f"{new / rate:.0f}"])
    head = [
        "bytes/s told to a peer, without a budget",
        f"{PROMPTS} prompts again and again",
        "every prompt ends in two new blocks",
        "of these, a request",
    ]
    return table(head, rows)


def _told_per_s(rate: int, is_new: bool) -> float:
    """One router's deltas and signs while it places so many prompts a second."""
    effects: list[fx.Effect] = []
    settings = RouterSettings(trie_bytes_per_s=10**8)
    origin = Origin(RegionId("us"), RouterId("r1"))
    gossip = Gossip(origin, 1, settings, effects.append)
    assert gossip.outgoing is not None
    dice = Random(7)
    paths = [[dice.getrandbits(64) for _ in range(PATH_BLOCKS)] for _ in range(PROMPTS)]
    told_bytes = 0
    for number in range(int(GROWTH_S * rate)):
        now = number / rate
        tail = [dice.getrandbits(64) for _ in range(2)] if is_new else []
        gossip.outgoing.used([*paths[number % PROMPTS], *tail], now)
        gossip.tick(now)
        told_bytes += sum(size_bytes(e.delta) for e in effects if isinstance(e, fx.PublishTrie))
        effects.clear()
    return told_bytes / GROWTH_S


main = command("gossip", declare, write, "What prefix gossip brings and costs.", seeds=1)

if __name__ == "__main__":
    main()
