"""Load that follows each region's day: SkyWalker's skew, a day of chat, one product worldwide.

`diurnal` without a rate is SkyWalker's experiment (§5.2, "Diurnal pattern", Figure 10): closed-loop
chat with 120 clients in the US and 40 each in Europe and Asia, the US' working hours. With a rate
it is the day itself: open-loop chat at that mean rate over all regions, each following one measured
curve by its own clock. `duration_s` is then one day, whatever its length.

The curve is the hourly rate, over seven days and 162 clients, of ServeGen's `language/m-large`
(Xiang et al. 2025, Alibaba's production traffic; data Apache-2.0), divided by its mean. Its top
is 1.19 at 20:00 and its trough 0.83 at 07:00: traffic of services. A region's own demand varies
more (SkyWalker Figure 3a: 2.9 to 32.6 times between its hours), so `swing` multiplies the curve's
distance from its mean; 1 is the measured shape, and the rate never goes below 0.

`world_product`: prompts of a system prompt, a document and a question. Documents are popular by
Zipf; at each rank one document follows another after `life` of a day, at another moment for each
rank: today's articles, releases, incidents. A share of them belongs to all regions, and the others
to one. So a morning's documents are cached where it is noon, and not at home. Sizes are ours: a
system prompt of 1,500 tokens, documents of 6,000 tokens on average (Preble's Table 1 has 1,835 for
tools and 23,474 for documents), questions and answers of Toolbench. With its swing of 5 the trough
of the day is 0.21 of its mean, and its top 1.95.
"""

from collections.abc import Mapping
from dataclasses import replace

from mesh.sim.workload import Arrival, RequestNode, Workload
from mesh.sim.workloads.arrivals import ClientCounts, LoadOptions, workload, workload_maker
from mesh.sim.workloads.content import Lengths, Zipf, seeded, segment, segment_id
from mesh.sim.workloads.skywalker import WILDCHAT, conversations
from schemas.ids import RegionId

HOURLY = (  # from 00:00 to 23:00
    *(0.979, 0.955, 0.957, 0.907, 0.902, 0.891, 0.841, 0.828),
    *(0.832, 0.916, 1.021, 1.090, 1.013, 1.038, 1.087, 1.057),
    *(1.044, 1.045, 1.018, 1.166, 1.189, 1.078, 1.074, 1.070),
)
CHAT_SWING = 3.0  # ours: the day's top is 3.2 times its trough, the least of SkyWalker's Figure 3a
PRODUCT_SWING = 5.0
UTC_OFFSETS_H: Mapping[str, float] = {"us": -5.0, "eu": 1.0, "ap": 8.0}

DOCUMENTS = 60
LIFE_DAYS = 0.5
WORLD_SHARE = 0.8
ZIPF = 1.1
SYSTEM_TOKENS = 1500
DOCUMENT = Lengths(6000, 4000, least=1000, most=20_000)
QUESTION = Lengths(275, 120, least=80, most=2000)
ANSWER = Lengths(120, 80, least=8, most=400)


class Day:
    """24 hours in `day_s` seconds, by each region's own clock. The run begins at 00:00 UTC."""

    def __init__(self, day_s: float, offsets_h: Mapping[RegionId, float], swing: float) -> None:
        self._day_s = day_s
        self._offsets_h = offsets_h
        self._hourly = tuple(max(0.0, 1 + swing * (rate - 1)) for rate in HOURLY)

    def peak(self, region: RegionId) -> float:
        """The day's highest rate, as a multiple of its mean."""
        return max(self._hourly)

    def at(self, region: RegionId, at_s: float) -> float:
        """The rate at a time, as a multiple of the day's mean; straight lines between hours."""
        hour = (at_s / self._day_s * 24 + self._offsets_h[region]) % 24
        place = int(hour) % 24
        here, following = self._hourly[place], self._hourly[(place + 1) % 24]
        return here + (hour - int(hour)) * (following - here)


def offsets_of(clients: ClientCounts) -> dict[RegionId, float]:
    """Each region's hours from UTC: known ones by name, others spread around the globe."""
    return {
        region: UTC_OFFSETS_H.get(region.split("-")[0], 24.0 * place / len(clients))
        for place, region in enumerate(clients)
    }


@workload_maker("diurnal", {"us": 120, "eu": 40, "ap": 40})
def diurnal(
    load: LoadOptions,
    utc_offsets_h: Mapping[RegionId, float] | None = None,
    swing: float = CHAT_SWING,
) -> Workload:
    """The skewed closed loop, or with `rate_per_s` a day of `duration_s` seconds, open loop."""
    offsets_h = offsets_of(load.clients) | dict(utc_offsets_h or {})
    day = None if load.rate_per_s is None else Day(load.duration_s, offsets_h, swing)
    return conversations(load, WILDCHAT, day)


@workload_maker("world-product", {"us": 40, "eu": 40, "ap": 40}, rate_per_s=4.0, duration_s=1800.0)
def world_product(load: LoadOptions) -> Workload:
    """A day of `duration_s` seconds, whatever its length. Open loop."""
    day = Day(load.duration_s, offsets_of(load.clients), PRODUCT_SWING)
    blank = RequestNode(prompt=(segment(1, "blank"),), answer=segment(1, "blank"))
    timed = workload(
        load,
        lambda region, number: iter(lambda: blank, None),
        curve=day,
        life_days=LIFE_DAYS,
        world_share=WORLD_SHARE,
        swing=PRODUCT_SWING,
    )
    zipf, life_s = Zipf(DOCUMENTS, ZIPF), LIFE_DAYS * load.duration_s
    system = segment(SYSTEM_TOKENS, "world-product", "system")
    rng = seeded(load.seed, "world-product")
    arrivals = []
    for number, (at_s, region, _) in enumerate(timed.arrivals):
        rank = zipf.draw(rng)
        where = "world" if rng.random() < WORLD_SHARE else str(region)
        issue = int(at_s / life_s + rank * 0.618 % 1.0)
        tokens = DOCUMENT.of_rank(rank + DOCUMENTS * issue)
        names = ("world-product", "document", where, rank, issue, tokens)
        request = segment_id(load.seed, "world-product", number)
        question = segment(QUESTION.draw(rng), request, "question")
        node = RequestNode(
            prompt=(system, segment(tokens, *names), question),
            answer=segment(ANSWER.draw(rng), request, "answer"),
            session=segment_id(*names),
        )
        arrivals.append(Arrival(at_s, region, node))
    return replace(timed, arrivals=tuple(arrivals))
