"""One product for the whole world: each region asks by its own day, of documents that come and go.

A prompt is the product's system prompt, a document and a question. Documents are popular by Zipf,
and at each rank one is followed by another after `life` of a day, at another moment for each rank:
today's articles, releases, incidents. A share of them belongs to all regions, and the others to
one. So what a region's morning asks for is warm where it is noon, and cold at home.

Sizes are ours: a system prompt of 1,500 tokens, documents of 6,000 tokens on average (Preble's
Table 1 has 1,835 for tools and 23,474 for documents), questions and answers of Toolbench. The day
is the measured one of `diurnal`, with a swing of 5: its trough is 0.21 of its mean, and its
top 1.95.
"""

from mesh.sim.workload import Arrival, Node, Workload
from mesh.sim.workloads.chances import Lengths, Zipf
from mesh.sim.workloads.diurnal import Day, offsets_of
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 40, RegionId("eu"): 40, RegionId("ap"): 40}
DAY_S = 1800.0
RATE_PER_S = 4.0
SWING = 5.0
DOCUMENTS = 60
LIFE_DAYS = 0.5
WORLD_SHARE = 0.8
ZIPF = 1.1
SYSTEM_TOKENS = 1500
DOCUMENT = Lengths(6000, 4000, least=1000, most=20_000)
QUESTION = Lengths(275, 120, least=80, most=2000)
ANSWER = Lengths(120, 80, least=8, most=400)


def world_product(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    life_days: float = LIFE_DAYS,
    document: Lengths = DOCUMENT,
    world_share: float = WORLD_SHARE,
    documents: int = DOCUMENTS,
    swing: float = SWING,
) -> Workload:
    """A day of `duration_s` seconds, whatever its length. Open loop."""
    clients = given(clients, CLIENTS)
    day_s, rate = given(duration_s, DAY_S), given(rate_per_s, RATE_PER_S)
    day = Day(day_s, offsets_of(clients), swing)
    blank = Node(prompt=(segment(1, "blank"),), answer=segment(1, "blank"))
    timed = workload(
        "world-product",
        clients,
        lambda region, number: iter(lambda: blank, None),
        Pace(day_s, rate),
        seed=seed,
        rhythm=day,
        life_days=life_days,
        world_share=world_share,
        swing=swing,
    )
    zipf, life_s = Zipf(documents, ZIPF), life_days * day_s
    system = segment(SYSTEM_TOKENS, "world-product", "system")
    rng = seeded(seed, "world-product")
    arrivals = []
    for number, (at_s, region, _) in enumerate(timed.arrivals):
        rank = zipf.draw(rng)
        where = "world" if rng.random() < world_share else str(region)
        issue = int(at_s / life_s + rank * 0.618 % 1.0)
        tokens = document.of_rank(rank + documents * issue)
        names = ("world-product", "document", where, rank, issue, tokens)
        request = segment_id(seed, "world-product", number)
        node = Node(
            prompt=(
                system,
                segment(tokens, *names),
                segment(QUESTION.draw(rng), request, "question"),
            ),
            answer=segment(ANSWER.draw(rng), request, "answer"),
            session=segment_id(*names),
        )
        arrivals.append(Arrival(at_s, region, node))
    return Workload(name=timed.name, arrivals=tuple(arrivals), facts=timed.facts)
