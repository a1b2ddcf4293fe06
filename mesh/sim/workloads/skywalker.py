"""SkyWalker's workloads: multi-turn chat and trees of thoughts (Xia et al., EuroSys 2026).

Chat (§3.2, Figure 5). A client plays one user after another. A user has a few conversations;
a conversation begins with an *opening* (a template used worldwide, in the region or by this user,
or none) and goes on for a few turns, each with the whole conversation before it as its prompt and
at once after its answer. So
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
from dataclasses import dataclass
from itertools import count

from mesh.sim.workload import RequestNode, Segment, Workload, chain
from mesh.sim.workloads.arrivals import LoadOptions, RateCurve, workload, workload_maker
from mesh.sim.workloads.content import Lengths, Zipf, geometric, seeded, segment, segment_id
from schemas.ids import RegionId

TURNS_MAX = 40
TEMPLATES = Zipf(10, 1.1)  # of the world, and of each region


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

    def trees(region: RegionId, number: int) -> Iterator[RequestNode]:
        return ChatUsers(habits, load.seed, region, number).conversations()

    return workload(load, trees, requests_per_tree=habits.turns, curve=curve)


class ChatUsers:
    """The users of one client, one after another."""

    def __init__(self, habits: ChatHabits, seed: int, region: RegionId, number: int) -> None:
        self._habits = habits
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
        return chain(turns, session)

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
        rank = TEMPLATES.draw(rng)
        tokens = self._habits.opening.of_rank(rank)
        return segment(tokens, "chat", "template", where, rank, tokens)


BRANCHES, WIDE_BRANCHES = 2, 4
LEVELS = 4
QUESTIONS = 7473
INSTRUCTION_TOKENS, STEP_TOKENS = 60, 45
QUESTION = Lengths(60, 24, least=12, most=250)
ANSWER = Lengths(180, 60, least=16, most=256)


@workload_maker("tot", {"us": 40, "eu": 20, "ap": 20})
def tot(load: LoadOptions) -> Workload:
    """All trees are alike: two branches, 15 requests."""
    return _forest(load, {})


@workload_maker("mixed-tree", {"us": 2, "eu": 20, "ap": 20})
def mixed_tree(load: LoadOptions) -> Workload:
    """The first region has wider trees: 85 requests of four branches."""
    return _forest(load, dict.fromkeys(list(load.clients)[:1], WIDE_BRANCHES))


def _forest(load: LoadOptions, wide: dict[RegionId, int]) -> Workload:
    """`wide`: the branches of regions that have not BRANCHES."""
    branches = {region: wide.get(region, BRANCHES) for region in load.clients}
    requests = sum(
        users * sum(branches[region] ** level for level in range(LEVELS))
        for region, users in load.clients.items()
    )

    def trees(region: RegionId, client: int) -> Iterator[RequestNode]:
        rng = seeded(load.seed, "tot", region, client)
        instruction = segment(INSTRUCTION_TOKENS, "tot", "instruction", INSTRUCTION_TOKENS)
        for tree in count():
            question = rng.randrange(QUESTIONS)
            tokens = QUESTION.draw(seeded("tot", "question", question))
            name = segment_id(load.seed, "tot", region, client, tree)
            prompt = (instruction, segment(tokens, "tot", "question", question, tokens))
            yield _thought(branches[region], name, prompt, "", 0)

    requests_per_tree = requests / (sum(load.clients.values()) or 1)
    return workload(load, trees, requests_per_tree=requests_per_tree, branches=wide or None)


def _thought(
    branches: int, tree: int, before: tuple[Segment, ...], path: str, level: int
) -> RequestNode:
    prompt = (*before, segment(STEP_TOKENS, "tot", "step", level, STEP_TOKENS))
    answer = segment(ANSWER.draw(seeded(tree, path)), tree, "answer", path)
    children = tuple(
        _thought(branches, tree, (*prompt, answer), f"{path}.{branch}", level + 1)
        for branch in range(branches if level + 1 < LEVELS else 0)
    )
    return RequestNode(prompt=prompt, answer=answer, children=children, session=tree)
