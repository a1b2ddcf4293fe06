"""Tree of thoughts: a question is planned, executed, reflected on and answered, with branches.

A tree has four levels; each complete thought is followed by as many next thoughts as the tree has
branches, which may run beside each other. Two branches make 1+2+4+8 = 15 requests, four make
1+4+16+64 = 85. A request's prompt is its parent's prompt, the parent's answer and the next step's
instruction; siblings ask the very same and differ by sampling. So nearly all of a prompt was
computed before, if the router finds where.

Source: SkyWalker (Xia et al., EuroSys 2026) §5.1: its branches, levels and clients (40/20/20;
mixed: 2 clients with four branches in the US, 20/20 with two elsewhere), on GSM8K, answers of at
most 256 tokens. GSM8K's questions have 60 tokens in the mean, spread 24 (its test set, four
characters a token); 7,473 is the size of its training set. Ours: the lengths of the common
instruction, of a step's instruction and of an answer below its limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mesh.sim.workload import Node, Segment, Workload
from mesh.sim.workloads.chances import Lengths
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 40, RegionId("eu"): 20, RegionId("ap"): 20}
MIXED_CLIENTS: Clients = {RegionId("us"): 2, RegionId("eu"): 20, RegionId("ap"): 20}
DURATION_S = 600.0


QUESTION = Lengths(60, 24, least=12, most=250)
ANSWER = Lengths(180, 60, least=16, most=256)


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
        """Requests in a tree."""
        return sum(self.branches**level for level in range(self.levels))


def tot(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    shape: TreeShape | None = None,
) -> Workload:
    """Every client thinks in the same trees: two branches, 15 requests."""
    shape = shape or TreeShape()
    return _forest("tot", given(clients, CLIENTS), {}, shape, seed, duration_s, rate_per_s)


def mixed_tree(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    wide: RegionId | None = None,
    wide_branches: int = 4,
    shape: TreeShape | None = None,
) -> Workload:
    """One region, `wide` (by default the first), thinks in wider trees: 85 requests of four."""
    clients, shape = given(clients, MIXED_CLIENTS), shape or TreeShape()
    if wide is None:
        wide = next(iter(clients), RegionId(""))
    elif wide not in clients:
        raise ValueError(f"wide={wide!r} has no clients: use one of {', '.join(clients)}")
    branches = {wide: wide_branches}
    return _forest("mixed-tree", clients, branches, shape, seed, duration_s, rate_per_s)


def _forest(
    name: str,
    clients: Clients,
    branches: dict[RegionId, int],
    shape: TreeShape,
    seed: int,
    duration_s: float | None,
    rate_per_s: float | None,
) -> Workload:
    shapes = {
        region: replace(shape, branches=branches.get(region, shape.branches)) for region in clients
    }
    people = sum(clients.values()) or 1
    requests = sum(shapes[region].requests * count for region, count in clients.items()) / people

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        return thoughts(shapes[region], seed, region, number)

    pace = Pace(given(duration_s, DURATION_S), rate_per_s, requests)
    return workload(name, clients, trees, pace, seed=seed, branches=dict(branches) or None)


def thoughts(shape: TreeShape, seed: int, region: RegionId, client: int) -> Iterator[Node]:
    """A client's trees, without end: each on a question of the set, taken at random."""
    rng = seeded(seed, "tot", region, client)
    instruction = segment(shape.instruction, "tot", "instruction", shape.instruction)
    tree = 0
    while True:
        question = rng.randrange(shape.questions)
        tokens = shape.question.draw(seeded("tot", "question", question))
        name = segment_id(seed, "tot", region, client, tree)
        prompt = (instruction, segment(tokens, "tot", "question", question, tokens))
        yield _Grower(shape, name).node(prompt, "", 0)
        tree += 1


@dataclass(frozen=True, slots=True)
class _Grower:
    shape: TreeShape
    tree: int

    def node(self, before: tuple[Segment, ...], path: str, level: int) -> Node:
        shape = self.shape
        prompt = (*before, segment(shape.step, "tot", "step", level, shape.step))
        tokens = shape.answer.draw(seeded(self.tree, path))
        answer = segment(tokens, self.tree, "answer", path)
        children: tuple[Node, ...] = ()
        if level + 1 < shape.levels:
            children = tuple(
                self.node((*prompt, answer), f"{path}.{branch}", level + 1)
                for branch in range(shape.branches)
            )
        return Node(prompt=prompt, answer=answer, children=children, session=self.tree)
