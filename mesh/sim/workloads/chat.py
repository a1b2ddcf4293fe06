"""Multi-turn chat: people who come back, talk for a few turns, and often begin alike.

A client stands for one person after another. A person has a few conversations; a conversation
begins with an *opening* (a template that everyone pastes, one that the region pastes, one that
the person always pastes, or none) and goes on for a few turns, each with the whole talk before
it as its prompt. So prompts share most within a conversation, some within a person, a little
within a region and across the world, which is what SkyWalker found (§3.2, Figure 5).

The two sets it measured are here. What their papers publish is taken as it is: turns, tokens of
question and answer (WildChat, Zhao et al. 2024: 2.54, 296, 441; Chatbot Arena in LMSYS-Chat-1M,
Zheng et al. 2024: 1.2, 52, 190), conversations per person (1,039,785 of 204,736 and 33,000 of
13,000). The spread of WildChat's questions (1,609) is that of rare pasted books; they are cut
at 4,096 tokens. Answers end at 1,024 and 512 tokens. SkyWalker's clients: 40/30/30 and 80/80/80.

How openings are shared is fitted, because Figure 5 gives no table: the text says that two prompts
of one person have 7.60 (WildChat) and 2.47 (Arena) times the similarity, `common prefix / shorter
prompt`, of two prompts of different people. The shares below give those ratios; a test holds them.

The next turn contains this answer as it was generated, so an endless cache hits four fifths of
the tokens, which follows from turns and lengths alone. SkyWalker reports 37 to 47% at most on its
replicas; whether its clients sent recorded answers back, the paper does not say.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from mesh.sim.workload import Node, Segment, Workload
from mesh.sim.workloads.chances import Lengths, Zipf, geometric
from mesh.sim.workloads.loops import Clients, Pace, Rhythm, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

WILDCHAT_CLIENTS: Clients = {RegionId("us"): 40, RegionId("eu"): 30, RegionId("ap"): 30}
ARENA_CLIENTS: Clients = {RegionId("us"): 80, RegionId("eu"): 80, RegionId("ap"): 80}
DURATION_S = 600.0
TURNS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How people talk. Shares are of conversations; what they leave begins without an opening."""

    turns: float
    conversations: float  # of one person
    question: Lengths
    answer: Lengths
    opening: Lengths
    world_share: float
    region_share: float
    own_share: float
    templates: int = 10  # of the world, and of each region
    zipf: float = 1.1
    reading_s: float = 0.0  # from an answer to the next turn: SkyWalker's clients don't wait


WILDCHAT = Habits(
    turns=2.54,
    conversations=5.1,
    question=Lengths(296, 1609, least=4, most=4096),
    answer=Lengths(441, 411, least=4, most=1024),
    opening=Lengths(250, 200, least=30, most=2000),
    world_share=0.48,
    region_share=0.15,
    own_share=0.2,
)
ARENA = Habits(
    turns=1.2,
    conversations=2.5,
    question=Lengths(52, 90, least=4, most=1024),
    answer=Lengths(190, 140, least=4, most=512),
    opening=Lengths(40, 30, least=8, most=500),
    world_share=0.7,
    region_share=0.05,
    own_share=0.1,
)


def chat(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    habits: Habits = WILDCHAT,
) -> Workload:
    """Chat as in WildChat; closed loop, or at `rate_per_s` requests (turns) a second."""
    clients = given(clients, WILDCHAT_CLIENTS)
    return talk("chat", clients, habits, given(duration_s, DURATION_S), rate_per_s, seed)


def arena(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    habits: Habits = ARENA,
) -> Workload:
    """Chat as in Chatbot Arena: shorter, mostly of one turn, more alike between people."""
    clients = given(clients, ARENA_CLIENTS)
    return talk("arena", clients, habits, given(duration_s, DURATION_S), rate_per_s, seed)


def talk(
    name: str,
    clients: Clients,
    habits: Habits,
    duration_s: float,
    rate_per_s: float | None,
    seed: int,
    rhythm: Rhythm | None = None,
) -> Workload:
    """A chat workload of any habits, clients and rhythm."""
    zipf = Zipf(habits.templates, habits.zipf)

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        return People(habits, zipf, seed, region, number).conversations()

    pace = Pace(duration_s, rate_per_s, habits.turns)
    return workload(name, clients, trees, pace, seed=seed, rhythm=rhythm)


class People:
    """Whoever sits at one client's place, one after another."""

    def __init__(
        self, habits: Habits, zipf: Zipf, seed: int, region: RegionId, number: int
    ) -> None:
        self._habits = habits
        self._zipf = zipf
        self._region = region
        self._place = (seed, "chat", region, number)

    def conversations(self) -> Iterator[Node]:
        """What is asked from this place, without end."""
        for number in count():
            yield from self.person(number)

    def person(self, number: int) -> Iterator[Node]:
        """One person's conversations."""
        names = (*self._place, number)
        rng = seeded(*names)
        own = segment(self._habits.opening.draw(rng), *names, "opening")
        for conversation in range(geometric(rng, self._habits.conversations)):
            opening = self._opening(rng, own)
            yield self._conversation(rng, opening, segment_id(*names, conversation))

    def _conversation(self, rng: random.Random, prompt: tuple[Segment, ...], session: int) -> Node:
        """A chain of turns, drawn forwards and linked backwards."""
        habits = self._habits
        turns: list[tuple[tuple[Segment, ...], Segment]] = []
        for turn in range(min(geometric(rng, habits.turns), TURNS_MAX)):
            question = segment(habits.question.draw(rng), session, "question", turn)
            answer = segment(habits.answer.draw(rng), session, "answer", turn)
            turns.append(((*prompt, question), answer))
            prompt = (*prompt, question, answer)
        after: tuple[Node, ...] = ()
        for at, (asked, answer) in reversed(list(enumerate(turns))):
            pause_s = habits.reading_s if at else 0.0
            node = Node(
                prompt=asked, answer=answer, pause_s=pause_s, children=after, session=session
            )
            after = (node,)
        return after[0]

    def _opening(self, rng: random.Random, own: Segment) -> tuple[Segment, ...]:
        habits = self._habits
        point = rng.random()
        if point < habits.world_share:
            return (self._template(rng, "world"),)
        if point < habits.world_share + habits.region_share:
            return (self._template(rng, self._region),)
        if point < habits.world_share + habits.region_share + habits.own_share:
            return (own,)
        return ()

    def _template(self, rng: random.Random, where: str) -> Segment:
        rank = self._zipf.draw(rng)
        tokens = self._habits.opening.of_rank(rank)
        return segment(tokens, "chat", "template", where, rank, tokens)
