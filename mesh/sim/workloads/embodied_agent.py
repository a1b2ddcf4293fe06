"""An agent in a virtual environment: one task, some fifty steps, each with all before it.

An episode's prompt describes the task and shows how such tasks are solved (its key portion); the
model says an action, the environment answers in a few words, and both are appended. So an episode
is a chain, closed in itself: a step can't be asked before the last one is answered.

Source: Preble (ICLR 2025), Table 1, on ALFWorld: prompts of 2,285 tokens (spread 471), answers of
16 (13), 97% shared, a key portion of 76% that 48 (8) requests share, which is the number of steps.
So the head has 1,737 tokens, and 48 steps add 548 in the mean: 23 a step, 16 said by the model and
7 by the environment. Ours: the 20 tokens of it that all episodes have in common, and that the
environment takes no time.
"""

from collections.abc import Iterator

from mesh.sim.workload import Node, Segment, Workload
from mesh.sim.workloads.chances import Lengths
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 40, RegionId("eu"): 30, RegionId("ap"): 30}
DURATION_S = 600.0
RATE_PER_S = 8.0
COMMON_TOKENS = 20
TASK = Lengths(1717, 370, least=400, most=6000)
OBSERVATION = Lengths(7, 4, least=1, most=60)
ACTION = Lengths(16, 13, least=1, most=100)
STEPS_MEAN = 48
STEPS_SPREAD = 8


def embodied_agent(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    step_s: float = 0.0,
) -> Workload:
    """Episodes that begin open loop, so that there are `rate_per_s` requests (steps) a second.

    `step_s`: what the environment takes for a step.
    """

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        return episodes(seed, region, number, step_s)

    pace = Pace(given(duration_s, DURATION_S), given(rate_per_s, RATE_PER_S), STEPS_MEAN)
    return workload("agent", given(clients, CLIENTS), trees, pace, seed=seed)


def episodes(seed: int, region: RegionId, client: int, step_s: float) -> Iterator[Node]:
    """A client's episodes, without end."""
    rng = seeded(seed, "agent", region, client)
    common = segment(COMMON_TOKENS, "agent", "common")
    number = 0
    while True:
        episode = segment_id(seed, "agent", region, client, number)
        task = segment(TASK.draw(rng), episode, "task")
        steps: list[tuple[Segment, Segment]] = []
        for step in range(max(1, round(rng.gauss(STEPS_MEAN, STEPS_SPREAD)))):
            seen = segment(OBSERVATION.draw(rng), episode, "observation", step)
            steps.append((seen, segment(ACTION.draw(rng), episode, "action", step)))
        yield _chain((common, task), steps, episode, step_s)
        number += 1


def _chain(
    head: tuple[Segment, ...], steps: list[tuple[Segment, Segment]], episode: int, step_s: float
) -> Node:
    prompts: list[tuple[Segment, ...]] = []
    before = head
    for seen, action in steps:
        prompts.append((*before, seen))
        before = (*before, seen, action)
    after: tuple[Node, ...] = ()
    for at in reversed(range(len(steps))):
        pause_s = step_s if at else 0.0
        after = (
            Node(
                prompt=prompts[at],
                answer=steps[at][1],
                pause_s=pause_s,
                children=after,
                session=episode,
            ),
        )
    return after[0]
