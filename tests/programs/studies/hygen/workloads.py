"""The paper's workloads: online requests by trace, offline documents, and a shared-prefix set.

Online (HyGen §5.1): of a stretch of T seconds of the recorded trace, T x Q requests are drawn, each
at its recorded time. Without a folder of traces the same kind is generated: lengths by the
quantiles of that trace, arrivals at a rate that changes every two minutes within a factor of two,
as the Azure trace's does. Mooncake's lengths are scaled to a quarter: at 12,000 tokens a prompt one
GPU could take so few requests that a 99th percentile would be one of them.

Offline: documents as long as arXiv papers (Cohan et al., NAACL 2018) with summaries as long as
their abstracts. In tokens: Zaheer et al., "Big Bird", NeurIPS 2020, appendix, table of
summarization sets: input median 6,151, 90th percentile 14,405; output median 171, 90th percentile
352. We draw log-normal lengths with these.

MMLU (Hendrycks et al., ICLR 2021): 57 subjects, each with a prompt of five examples that all its
questions share. The lengths in tokens are ours: 300 to 1,500 of examples, 40 to 200 of question.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from agents.sim.events import SimRequest
from agents.sim.kv_cache import BLOCK_TOKENS
from mesh.replay.schedule import spread
from mesh.replay.trace import Trace, TraceRequest
from mesh.replay.trace_formats import load_trace

OFFLINE_IDS = 1_000_000_000  # offline requests are numbered from here
TOKENS_MAX = 32_000  # a longer prompt is cut, as a service would
MOONCAKE_SCALE = 0.25
SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
RATE_EVERY_S = 120.0


@dataclass(frozen=True, slots=True)
class TraceKind:
    """A recorded trace, and its quantiles at SHARES for when it isn't there."""

    name: str
    folder: str
    pattern: str
    format: str
    scale: float
    span_s: float
    prompt_tokens: Sequence[int]
    answer_tokens: Sequence[int]


AZURE = TraceKind(
    "Azure conversation",
    "azure",
    "*conv*.csv",
    "azure",
    1.0,
    3500.0,
    (2, 29, 207, 396, 1020, 1189, 2735, 4083, 4142, 14_050),
    (7, 16, 54, 85, 129, 395, 424, 451, 601, 1000),
)
MOONCAKE = TraceKind(
    "Mooncake conversation, lengths x 0.25",
    "mooncake",
    "*conversation*.jsonl",
    "mooncake",
    MOONCAKE_SCALE,
    1800.0,
    (891, 894, 969, 2505, 7640, 16_256, 28_641, 41_829, 91_305, 123_192),
    (1, 3, 24, 151, 356, 476, 609, 708, 1105, 2000),
)


class Stretch(NamedTuple):
    """A piece of a trace."""

    start_s: float
    duration_s: float


class Arrival(NamedTuple):
    """One request and when it comes."""

    at_s: float
    request: SimRequest


def recorded(kind: TraceKind, traces: Path | None) -> Trace | None:
    """The trace, in its own order and scaled, if the folder has it."""
    if traces is None:
        return None
    files = sorted((traces / kind.folder).glob(kind.pattern))
    return load_trace(files[0], kind.format).scaled(kind.scale) if files else None


def online(
    kind: TraceKind, trace: Trace | None, stretch: Stretch, rate_per_s: float, seed: int = 0
) -> list[Arrival]:
    """Requests of a stretch of a trace, sampled to a rate; times count from its beginning."""
    dice = random.Random(f"{kind.name} {stretch} {seed}")
    if trace is None:
        requests = list(_generated(kind, dice, stretch.duration_s, rate_per_s))
        block_tokens = 0
    else:
        requests = _sampled(kind, trace, dice, stretch, rate_per_s)
        block_tokens = trace.block_tokens
    return [
        Arrival(request.at_s, _online_request(number, request, block_tokens))
        for number, request in enumerate(requests)
    ]


def documents(seed: int) -> Iterator[SimRequest]:
    """Documents to summarize, without end; no two share a prefix."""
    dice = random.Random(f"documents {seed}")
    number = OFFLINE_IDS
    while True:
        prompt = _log_normal(dice, 6151, 14_405, 256, 30_000)
        answer = _log_normal(dice, 171, 352, 16, 1000)
        yield _with_keys(SimRequest(number, prompt, answer, offline=True), number)
        number += 1


@dataclass(frozen=True, slots=True)
class Subject:
    """One of MMLU's: the tokens of the examples that its questions share."""

    number: int
    example_tokens: int
    weight: float


def subjects(seed: int, count: int = 57) -> list[Subject]:
    """The subjects; the weights say how many questions each has (some have ten times others')."""
    dice = random.Random(f"subjects {seed}")
    return [
        Subject(number, BLOCK_TOKENS * dice.randint(19, 94), dice.paretovariate(1.5))
        for number in range(count)
    ]


def prefix_key(subject: Subject) -> int:
    """The key of the first block of its questions."""
    return -1 - subject.number * 1000


def questions(of: Sequence[Subject], seed: int) -> Iterator[SimRequest]:
    """Questions of random subjects, without end; the answer is a letter and its end."""
    dice = random.Random(f"questions {seed}")
    weights = [subject.weight for subject in of]
    number = OFFLINE_IDS
    while True:
        subject = dice.choices(of, weights)[0]
        prompt = subject.example_tokens + dice.randint(40, 200)
        shared = subject.example_tokens // BLOCK_TOKENS
        own = prompt // BLOCK_TOKENS - shared
        keys = [prefix_key(subject) - block for block in range(shared)]
        keys += [number * 1000 + block for block in range(own)]
        yield SimRequest(number, prompt, 2, keys, offline=True)
        number += 1


def _sampled(
    kind: TraceKind, trace: Trace, dice: random.Random, stretch: Stretch, rate_per_s: float
) -> list[TraceRequest]:
    times = spread([request.at_s for request in trace.requests], random.Random(kind.name))
    start_s = times[0] + stretch.start_s
    first, last = bisect_left(times, start_s), bisect_left(times, start_s + stretch.duration_s)
    count = min(round(stretch.duration_s * rate_per_s), last - first)
    chosen = sorted(dice.sample(range(first, last), count))
    return [replace(trace.requests[place], at_s=times[place] - start_s) for place in chosen]


def _generated(
    kind: TraceKind, dice: random.Random, duration_s: float, rate_per_s: float
) -> Iterator[TraceRequest]:
    at_s, until_s, rate = 0.0, 0.0, rate_per_s
    while True:
        while at_s >= until_s:
            rate = rate_per_s * dice.uniform(0.67, 1.33)
            until_s += RATE_EVERY_S
        at_s += dice.expovariate(rate)
        if at_s >= duration_s:
            return
        prompt = kind.scale * _quantile(kind.prompt_tokens, dice.random())
        answer = kind.scale * _quantile(kind.answer_tokens, dice.random())
        yield TraceRequest(at_s, max(round(prompt), 1), max(round(answer), 1))


def _quantile(values: Sequence[int], share: float) -> float:
    place = min(bisect_left(SHARES, share), len(SHARES) - 1) or 1
    low, high = SHARES[place - 1], SHARES[place]
    part = (share - low) / (high - low)
    return values[place - 1] + part * (values[place] - values[place - 1])


def _online_request(number: int, request: TraceRequest, block_tokens: int) -> SimRequest:
    prompt = min(max(request.input_tokens, 1), TOKENS_MAX)
    sim = SimRequest(number, prompt, max(request.output_tokens, 1))
    # A trace's block names everything before it, so the pieces of it do too.
    pieces = block_tokens // BLOCK_TOKENS
    keys = [-(block + 1) * 10_000 - piece for block in request.blocks for piece in range(pieces)]
    shared = keys[: prompt // BLOCK_TOKENS]
    return _with_keys(sim, number, shared)


def _with_keys(request: SimRequest, number: int, shared: Sequence[int] = ()) -> SimRequest:
    blocks = request.total_tokens // BLOCK_TOKENS
    own = [number * 10_000 + block for block in range(len(shared), blocks)]
    return replace(request, keys=[*shared, *own])


def _log_normal(dice: random.Random, median: float, p90: float, least: int, most: int) -> int:
    sigma = math.log(p90 / median) / 1.2816  # the standard normal's 90th percentile
    return min(max(round(median * math.exp(dice.gauss(0.0, sigma))), least), most)
