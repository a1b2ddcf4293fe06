"""SkyWalker's workloads: multi-turn chat and trees of thoughts (Xia et al., EuroSys 2026).

Chat (§3.2, Figure 5). A client plays one user after another. A user has a few conversations;
a conversation begins with an *opening* (a template used worldwide, in the region or by this user,
or none) and goes on for a few turns, each with the whole conversation before it as its prompt. So
prompts share most within a conversation, some within a user, a little within a region and across
the world. Published figures are used as they are: turns, tokens of question and answer (WildChat,
Zhao et al. 2024: 2.54, 296, 441; Chatbot Arena in LMSYS-Chat-1M, Zheng et al. 2024: 1.2, 52, 190),
conversations per user (1,039,785 of 204,736 and 33,000 of 13,000), clients (40/30/30 and
80/80/80). The spread of WildChat's questions (1,609) comes from rare pasted books; questions are
cut at 4,096 tokens, answers at 1,024 and 512. The shares of openings are fitted: two prompts of one
user have 7.60 (WildChat) and 2.47 (Arena) times the similarity, `common prefix / shorter prompt`,
of two prompts of different users; a test checks these ratios. The next turn contains this answer as
it was generated, so an endless cache hits four fifths of the tokens; SkyWalker reports 37 to 47% at
most on its replicas, and doesn't report whether its clients sent recorded answers back.

Trees (§5.1). A question is planned, executed, reflected on and answered: four levels, each thought
followed by as many as the tree has branches, which may run beside each other. Two branches make
1+2+4+8 = 15 requests, four make 1+4+16+64 = 85. A prompt is the parent's prompt, the parent's
answer and the next step's instruction; siblings have equal prompts and differ by sampling.
Branches, levels and clients are the paper's (40/20/20; mixed: 2 clients with four branches in the
US, 20/20 with two elsewhere), on GSM8K: questions of 60 tokens in the mean, spread 24 (its test
set, four characters a token), 7,473 of them (its training set), answers of at most 256 tokens.
Ours: the lengths of the common instruction, of a step's instruction and of an answer below its
limit.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from mesh.sim.workload import RequestNode, Segment, Workload, chain
from mesh.sim.workloads.arrivals import LoadOptions, RateCurve, workload, workload_maker
from mesh.sim.workloads.content import Lengths, Zipf, geometric, seeded, segment, segment_id
from schemas.ids import RegionId

TURNS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHabits:
    """How users chat. Shares are of conversations; the remaining ones have no opening."""

    turns: float
    conversations: float  # of one user
    question: Lengths
    answer: Lengths
    opening: Lengths
    world_share: float
    region_share: float
    own_share: float
    templates: int = 10  # of the world, and of each region
    zipf: float = 1.1
    reading_s: float = 0.0  # from an answer to the next turn: SkyWalker's clients don't wait


WILDCHAT = ChatHabits(
    turns=2.54,
    conversations=5.1,
    question=Lengths(296, 1609, least=4, most=4096),
    answer=Lengths(441, 411, least=4, most=1024),
    opening=Lengths(250, 200, least=30, most=2000),
    world_share=0.48,
    region_share=0.15,
    own_share=0.2,
)
ARENA = ChatHabits(
    turns=1.2,
    conversations=2.5,
    question=Lengths(52, 90, least=4, most=1024),
    answer=Lengths(190, 140, least=4, most=512),
    opening=Lengths(40, 30, least=8, most=500),
    world_share=0.7,
    region_share=0.05,
    own_share=0.1,
)


@workload_maker("chat", {"us": 40, "eu": 30, "ap": 30})
def chat(load: LoadOptions) -> Workload:
    """Chat as in WildChat; closed loop, or at `rate_per_s` requests (turns) a second."""
    return conversations(load, WILDCHAT)


@workload_maker("arena", {"us": 80, "eu": 80, "ap": 80})
def arena(load: LoadOptions) -> Workload:
    """Chat as in Chatbot Arena: shorter, mostly of one turn, more alike between users."""
    return conversations(load, ARENA)


def conversations(
    load: LoadOptions, habits: ChatHabits, curve: RateCurve | None = None
) -> Workload:
    """A chat workload of any habits and load."""
    zipf = Zipf(habits.templates, habits.zipf)

    def trees(region: RegionId, number: int) -> Iterator[RequestNode]:
        return ChatUsers(habits, zipf, load.seed, region, number).conversations()

    return workload(load, trees, requests_per_tree=habits.turns, curve=curve)


class ChatUsers:
    """The users of one client, one after another."""

    def __init__(
        self, habits: ChatHabits, zipf: Zipf, seed: int, region: RegionId, number: int
    ) -> None:
        self._habits = habits
        self._zipf = zipf
        self._region = region
        self._names = (seed, "chat", region, number)

    def conversations(self) -> Iterator[RequestNode]:
        """All users' conversations, without end."""
        for number in count():
            yield from self.user(number)

    def user(self, number: int) -> Iterator[RequestNode]:
        names = (*self._names, number)
        rng = seeded(*names)
        own = segment(self._habits.opening.draw(rng), *names, "opening")
        for conversation in range(geometric(rng, self._habits.conversations)):
            opening = self._opening(rng, own)
            yield self._conversation(rng, opening, segment_id(*names, conversation))

    def _conversation(
        self, rng: random.Random, prompt: tuple[Segment, ...], session: int
    ) -> RequestNode:
        habits = self._habits
        turns: list[tuple[tuple[Segment, ...], Segment]] = []
        for turn in range(min(geometric(rng, habits.turns), TURNS_MAX)):
            question = segment(habits.question.draw(rng), session, "question", turn)
            answer = segment(habits.answer.draw(rng), session, "answer", turn)
            turns.append(((*prompt, question), answer))
            prompt = (*prompt, question, answer)
        return chain(turns, session, habits.reading_s)

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


QUESTION = Lengths(60, 24, least=12, most=250)
ANSWER = Lengths(180, 60, least=16, most=256)
WIDE_BRANCHES = 4


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree grows, and how long its texts are in tokens."""

    branches: int = 2
    levels: int = 4
    questions: int = 7473
    instruction: int = 60
    question: Lengths = QUESTION
    step: int = 45
    answer: Lengths = ANSWER

    @property
    def requests(self) -> int:
        return sum(self.branches**level for level in range(self.levels))


@workload_maker("tot", {"us": 40, "eu": 20, "ap": 20})
def tot(load: LoadOptions, shape: TreeShape | None = None) -> Workload:
    """All trees are alike: two branches, 15 requests."""
    return _forest(load, shape or TreeShape(), {})


@workload_maker("mixed-tree", {"us": 2, "eu": 20, "ap": 20})
def mixed_tree(load: LoadOptions) -> Workload:
    """The first region has wider trees: 85 requests of four branches."""
    first = next(iter(load.clients), RegionId(""))
    return _forest(load, TreeShape(), {first: WIDE_BRANCHES})


def _forest(load: LoadOptions, shape: TreeShape, branches: dict[RegionId, int]) -> Workload:
    shapes = {
        region: replace(shape, branches=branches.get(region, shape.branches))
        for region in load.clients
    }
    clients = sum(load.clients.values()) or 1
    requests = sum(shapes[region].requests * n for region, n in load.clients.items()) / clients

    def trees(region: RegionId, number: int) -> Iterator[RequestNode]:
        return _trees(shapes[region], load.seed, region, number)

    return workload(load, trees, requests_per_tree=requests, branches=branches or None)


def _trees(shape: TreeShape, seed: int, region: RegionId, client: int) -> Iterator[RequestNode]:
    """A client's trees, without end: each on a random question of the set."""
    rng = seeded(seed, "tot", region, client)
    instruction = segment(shape.instruction, "tot", "instruction", shape.instruction)
    for tree in count():
        question = rng.randrange(shape.questions)
        tokens = shape.question.draw(seeded("tot", "question", question))
        name = segment_id(seed, "tot", region, client, tree)
        prompt = (instruction, segment(tokens, "tot", "question", question, tokens))
        yield _thought(shape, name, prompt, "", 0)


def _thought(
    shape: TreeShape, tree: int, before: tuple[Segment, ...], path: str, level: int
) -> RequestNode:
    prompt = (*before, segment(shape.step, "tot", "step", level, shape.step))
    answer = segment(shape.answer.draw(seeded(tree, path)), tree, "answer", path)
    branches = range(shape.branches if level + 1 < shape.levels else 0)
    children = tuple(
        _thought(shape, tree, (*prompt, answer), f"{path}.{branch}", level + 1)
        for branch in branches
    )
    return RequestNode(prompt=prompt, answer=answer, children=children, session=tree)
