"""Preble's workloads: tool use, video QA, long documents, programming, an embodied agent.

Source: Preble (Srivatsa et al., ICLR 2025), Table 1: mean and spread of prompt and answer, share
of the prompt that is shared, share of the *key portion* (the deepest part of a prompt that is
longer than all before it and that many requests share). Spreads are in brackets below. Zipf 1.1 is
the paper's skewed setting (§4.3). Clients are ours: 40/30/30.

- Toolbench, video QA, LooGLE: a short common instruction, a piece of content (a tool's manual, a
  video's tokens, a document) that is popular by Zipf, and a question of its own. The spread of a
  prompt is its content's; sizes from appendix A (16,000 tools, 1,000 videos, 776 documents after
  13 tokens of instruction). Table 1's shares below 100% come from content that is requested once,
  and so do ours. A request's session is its content, as routers that hash sessions would be given.
- Programming, on APPS: prompts of 3,871 tokens (1,656), answers of 190 (343), 97% shared, a key
  portion of 78%. The demonstration that all prompts begin with is the key portion wherever the
  problem is shorter: 2,900 tokens, and problems of 971 with all the spread; 10,000 problems, by
  Zipf. Several candidates are requested at once with the same prompt; ours: eight.
- Agent, on ALFWorld: prompts of 2,285 tokens (471), answers of 16 (13), 97% shared, a key portion
  of 76% that 48 (8) requests share, which is the number of steps. So the task has 1,737 tokens,
  and 48 steps add 548: 23 a step, 16 of the model and 7 of the environment. Each step's prompt
  holds all before it. Ours: the 20 tokens that all episodes share, and a step of no duration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from mesh.sim.workload import RequestNode, Segment, Workload, chain
from mesh.sim.workloads.arrivals import LoadOptions, endless, workload, workload_maker
from mesh.sim.workloads.content import Lengths, Zipf, segment, segment_id

CLIENTS = {"us": 40, "eu": 30, "ap": 30}
ZIPF = 1.1

DEMONSTRATION_TOKENS = 2900
PROBLEMS = 10_000
PROBLEM = Lengths(971, 1656, least=60, most=20_000)
PROGRAM = Lengths(190, 343, least=8, most=2048)
CANDIDATES = 8

COMMON_TOKENS = 20
TASK = Lengths(1717, 370, least=400, most=6000)
OBSERVATION = Lengths(7, 4, least=1, most=60)
ACTION = Lengths(16, 13, least=1, most=100)
STEPS_MEAN = 48
STEPS_SPREAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions about popular content, in tokens."""

    instruction: int
    contents: int
    content: Lengths
    question: Lengths
    answer: Lengths


# 1,835 tokens: 9% instruction, 76% key portion, the rest the question's. 39 requests a tool in
# 210,000 queries leave about 5,400 tools that are in use.
TOOLS = QuestionSet(
    instruction=165,
    contents=5400,
    content=Lengths(1395, 720, least=200, most=8000),
    question=Lengths(275, 120, least=20, most=2000),
    answer=Lengths(43, 16, least=4, most=300),
)
# 9,865 tokens, 99% of them the video. The answer is a choice's letter: 4 tokens.
VIDEOS = QuestionSet(
    instruction=13,
    contents=1000,
    content=Lengths(9766, 5976, least=1000, most=60_000),
    question=Lengths(86, 20, least=20, most=400),
    answer=Lengths(4, 1.5, least=1, most=16),
)
# 23,474 tokens: 13 of instruction, the rest a document and a question of a few sentences.
DOCUMENTS = QuestionSet(
    instruction=13,
    contents=776,
    content=Lengths(23_300, 6105, least=4000, most=60_000),
    question=Lengths(161, 60, least=20, most=1000),
    answer=Lengths(16, 9.9, least=1, most=128),
)


@workload_maker("toolbench", CLIENTS, rate_per_s=8.0)
def toolbench(load: LoadOptions) -> Workload:
    """Tool use: a tool's manual, and a task for it. Open loop."""
    return _questions(load, TOOLS)


@workload_maker("video-qa", CLIENTS, rate_per_s=4.0)
def video_qa(load: LoadOptions) -> Workload:
    """Multiple choice about videos: long prompts, four tokens of answer. Open loop."""
    return _questions(load, VIDEOS)


@workload_maker("loogle", CLIENTS, rate_per_s=2.0)
def loogle(load: LoadOptions) -> Workload:
    """Questions about long documents. Open loop."""
    return _questions(load, DOCUMENTS)


def _questions(load: LoadOptions, kind: QuestionSet) -> Workload:
    name, popularity = load.name, Zipf(kind.contents, ZIPF)
    instruction = segment(kind.instruction, name, "instruction", kind.instruction)

    def node(rng: Random, request: int) -> Iterator[RequestNode]:
        rank = popularity.draw(rng)
        tokens = kind.content.of_rank(rank)
        yield RequestNode(
            prompt=(
                instruction,
                segment(tokens, name, "content", rank, tokens),
                segment(kind.question.draw(rng), request, "question"),
            ),
            answer=segment(kind.answer.draw(rng), request, "answer"),
            session=segment_id(name, "session", rank),
        )

    return workload(load, endless(load, node), zipf=ZIPF)


@workload_maker("programming", CLIENTS, rate_per_s=4.0)
def programming(load: LoadOptions) -> Workload:
    """Open loop: each arrival requests all CANDIDATES of a problem at the same moment."""
    popularity = Zipf(PROBLEMS, ZIPF)
    demonstration = segment(DEMONSTRATION_TOKENS, "programming", "demonstration")

    def nodes(rng: Random, job: int) -> Iterator[RequestNode]:
        rank = popularity.draw(rng)
        tokens = PROBLEM.of_rank(rank)
        prompt = (demonstration, segment(tokens, "programming", "problem", rank, tokens))
        for candidate in range(CANDIDATES):
            answer = segment(PROGRAM.draw(rng), job, "answer", candidate)
            yield RequestNode(prompt=prompt, answer=answer, session=job)

    trees = endless(load, nodes)
    return workload(load, trees, trees_at_once=CANDIDATES, candidates=CANDIDATES, zipf=ZIPF)


@workload_maker("agent", CLIENTS, rate_per_s=8.0)
def embodied_agent(load: LoadOptions) -> Workload:
    """Episodes that begin open loop, so that there are `rate_per_s` requests (steps) a second."""
    common = segment(COMMON_TOKENS, "agent", "common")

    def tree(rng: Random, episode: int) -> Iterator[RequestNode]:
        prompt: tuple[Segment, ...] = (common, segment(TASK.draw(rng), episode, "task"))
        steps: list[tuple[tuple[Segment, ...], Segment]] = []
        for step in range(max(1, round(rng.gauss(STEPS_MEAN, STEPS_SPREAD)))):
            seen = segment(OBSERVATION.draw(rng), episode, "observation", step)
            action = segment(ACTION.draw(rng), episode, "action", step)
            steps.append(((*prompt, seen), action))
            prompt = (*prompt, seen, action)
        yield chain(steps, episode)

    return workload(load, endless(load, tree), requests_per_tree=STEPS_MEAN)
