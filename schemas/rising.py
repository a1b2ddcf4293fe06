"""Every number of the mesh that only rises: who raises it, how far one claim of it is believed, and
how it comes down again where somebody lied.

A number that orders messages ("the higher one is newer") makes deaf whoever believes too high a
one: what honest ones say is old from then on. So a claim is believed by a bounded step, or only by
who can check it, or for a bounded time. `by` names who can say it, as the bus's permissions have
it; a lie about oneself harms oneself and is only kept from lasting.

Rows whose `step` or `for_s` is set are used by the code that they are about; the others say by
which rule the number needs none.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rising:
    """One number. `step`: how far one claim raises it at most, in `step_s` seconds or, if that is
    None, with each write of a lease. `for_s`: seconds after which an unrepeated claim is forgotten;
    None: it is kept."""

    name: str
    by: str
    rule: str
    step: int | None = None
    step_s: float | None = None
    for_s: float | None = None


# At four writes a second all terms (2^48) would last for two years; an honest claim that is a year
# of writes ahead is caught up with in a minute.
TERM_STEP = 2**20

AGENT_TERM = Rising(
    name="term that an agent knows",
    by="routers of any region, with their signs of life",
    rule="The claim decides who owns the replica while it is repeated; what is left of it is a "
    "step, and the region's lease is ahead of that with its next write.",
    step=TERM_STEP,
    step_s=1.0,
    for_s=1.5,  # three signs of life of an adopter; longer than its lease
)
ROUTER_TERM = Rising(
    name="term that a router hears of from agents",
    by="agents, and an adopter's, with their heartbeats",
    rule="It raises the next write of the lease by a step.",
    step=TERM_STEP,
)
PREFIX_STREAM = Rising(
    name="epoch and number of an origin's prefix gossip",
    by="routers of the region that it is of",
    rule="Deltas and signs of life repeat the last number twice a second: one that nobody repeats "
    "was none, and after a silence any epoch counts.",
    for_s=3.0,
)
RISING: tuple[Rising, ...] = (
    AGENT_TERM,
    ROUTER_TERM,
    PREFIX_STREAM,
    Rising(
        name="term and number of a lease's write",
        by="routers of the region and of its peers, as the stream takes them",
        rule="The stream takes a write after the last one alone, and numbers it. At the highest "
        "term its numbers go on deciding.",
    ),
    Rising(
        name="epoch and number of heartbeats",
        by="the agent of that replica, on a subject of its own",
        rule="Forgotten with the replica, when no newer one came for `heartbeat_lost_s`.",
    ),
    Rising(
        name="epoch and number of digests",
        by="routers of the region that it is of, or a region that was asked and refuses",
        rule="Forgotten with the router, when no newer one came for `digest_lost_s`.",
    ),
    Rising(
        name="epoch of a router's signs of life",
        by="routers of the region that it is of",
        rule="Any other than the last one is a restart: nothing is compared.",
    ),
    Rising(
        name="number of the last hand-off that an agent took",
        by="whoever hands over work",
        rule="The agent keeps the last, not the highest; a router takes none for true that it has "
        "not given.",
    ),
    Rising(
        name="number of a frame",
        by="who knows the answer's inbox",
        rule="A hole that is not filled ends that answer, after 3.5 s.",
    ),
    Rising(
        name="bytes credited to an answer",
        by="who knows the answer's inbox",
        rule="None beyond what was sent is believed.",
    ),
)
