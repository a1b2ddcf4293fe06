"""Questions about popular content: Toolbench, video QA and LooGLE.

A prompt is a short instruction that everyone has, a piece of content (a tool's manual, a video's
tokens, a document) and a question of its own. Content is popular by Zipf. These are Preble's
"key portions": the deepest part of a prompt that is longer than all before it and that many
requests share.

Source: Preble (Srivatsa et al., ICLR 2025), Table 1: mean and spread of prompt and answer, share
of the prompt that is shared, share of the key portion; sizes from its appendix A (16,000 tools,
1,000 videos, 776 documents after 13 tokens of instruction). The spread of a prompt is its
content's. Zipf 1.1 is its skewed setting (§4.3); Table 1 counts the data sets themselves, where
a tool has 39 requests, a video 8.6 and a document 18.

Rejected: making one request in ten unique, as Table 1's shares below 100% suggest. They come from
content that is asked about once, and so do ours.

A request's session is its content: what routers that hash sessions would be given.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.sim.workload import Node, Workload
from mesh.sim.workloads.chances import Lengths, Zipf
from mesh.sim.workloads.loops import Clients, Pace, given, workload
from mesh.sim.workloads.names import seeded, segment, segment_id
from schemas.ids import RegionId

CLIENTS: Clients = {RegionId("us"): 40, RegionId("eu"): 30, RegionId("ap"): 30}
DURATION_S = 600.0
ZIPF = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is asked about, in tokens."""

    instruction: int
    contents: int
    content: Lengths
    question: Lengths
    answer: Lengths
    rate_per_s: float


# 1,835 tokens: 9% instruction, 76% key portion, the rest the question's. 39 requests a tool in
# 210,000 queries leave about 5,400 tools that are in use.
TOOLS = Subject(
    instruction=165,
    contents=5400,
    content=Lengths(1395, 720, least=200, most=8000),
    question=Lengths(275, 120, least=20, most=2000),
    answer=Lengths(43, 16, least=4, most=300),
    rate_per_s=8.0,
)
# 9,865 tokens, 99% of them the video. The answer is a choice's letter: 4 tokens.
VIDEOS = Subject(
    instruction=13,
    contents=1000,
    content=Lengths(9766, 5976, least=1000, most=60_000),
    question=Lengths(86, 20, least=20, most=400),
    answer=Lengths(4, 1.5, least=1, most=16),
    rate_per_s=4.0,
)
# 23,474 tokens: 13 of instruction, the rest a document and a question of a few sentences.
DOCUMENTS = Subject(
    instruction=13,
    contents=776,
    content=Lengths(23_300, 6105, least=4000, most=60_000),
    question=Lengths(161, 60, least=20, most=1000),
    answer=Lengths(16, 9.9, least=1, most=128),
    rate_per_s=2.0,
)


def toolbench(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    zipf: float = ZIPF,
) -> Workload:
    """Tool use: a tool's manual, and a task for it. Open loop."""
    return _asked("toolbench", TOOLS, clients, seed, duration_s, rate_per_s, zipf)


def video_qa(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    zipf: float = ZIPF,
) -> Workload:
    """Multiple choice about videos: long prompts, four tokens of answer. Open loop."""
    return _asked("video-qa", VIDEOS, clients, seed, duration_s, rate_per_s, zipf)


def loogle(
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    zipf: float = ZIPF,
) -> Workload:
    """Questions about long documents. Open loop."""
    return _asked("loogle", DOCUMENTS, clients, seed, duration_s, rate_per_s, zipf)


def _asked(
    name: str,
    subject: Subject,
    clients: Clients | None,
    seed: int,
    duration_s: float | None,
    rate_per_s: float | None,
    exponent: float,
) -> Workload:
    zipf = Zipf(subject.contents, exponent)

    def trees(region: RegionId, number: int) -> Iterator[Node]:
        return questions(name, subject, zipf, seed, region, number)

    pace = Pace(given(duration_s, DURATION_S), given(rate_per_s, subject.rate_per_s))
    return workload(name, given(clients, CLIENTS), trees, pace, seed=seed, zipf=exponent)


def questions(
    name: str, subject: Subject, zipf: Zipf, seed: int, region: RegionId, client: int
) -> Iterator[Node]:
    """A client's questions, without end."""
    rng = seeded(seed, name, region, client)
    instruction = segment(subject.instruction, name, "instruction", subject.instruction)
    asked = 0
    while True:
        rank = zipf.draw(rng)
        tokens = subject.content.of_rank(rank)
        request = segment_id(seed, name, region, client, asked)
        yield Node(
            prompt=(
                instruction,
                segment(tokens, name, "content", rank, tokens),
                segment(subject.question.draw(rng), request, "question"),
            ),
            answer=segment(subject.answer.draw(rng), request, "answer"),
            session=segment_id(name, "session", rank),
        )
        asked += 1
