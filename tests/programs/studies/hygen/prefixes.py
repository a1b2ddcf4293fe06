"""What prefix sharing maximization brings, and how long it lets others wait.

Questions after MMLU beside Azure's conversations, on the memory that the paper's GPU has (40 GB:
0.9 of it, less 13.5 GB of Llama-2-7B's weights, at 0.5 MB a token 45,000 tokens) and the profile's.
2,000 questions wait at any time; for each that is taken another comes. The paper's own figure is a
simulation that "deducted the shared prompt prefix length between consecutive offline requests": the
last column here, prompt tokens over those left after that, with all 14,042 questions in the queue.

Who starves: of a stream of questions faster than the engine, 19 in 20 share one prefix, so that it
never runs out. The others' longest wait is what the utility ratio bounds.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

from agents.core.latency_predictor import LatencyPredictor
from agents.sim.events import SimRequest
from agents.sim.kv_cache import BLOCK_TOKENS
from agents.sim.profiling_run import profiling_run
from mesh.core.offline.offline_queue import OfflineQueue
from mesh.replay.trace import Trace
from tests.programs.studies.hygen.grid import PROFILE, queue
from tests.programs.studies.hygen.runs import Outcome, Supply, play
from tests.programs.studies.hygen.two_phase import TwoPhaseEngine
from tests.programs.studies.hygen.workloads import (
    AZURE,
    Stretch,
    online,
    prefix_key,
    questions,
    subjects,
)
from tests.programs.studies.tables.markdown import share, table, times

SEED = 7
QUESTIONS = 14_042
BACKLOG = 2000
MEMORIES = (45_000, PROFILE.kv_tokens)
RATIOS = {
    "arrival (FCFS)": 0.0,
    "utility ratio 0.5": 0.5,
    "utility ratio 0.8": 0.8,
    "utility ratio 0.95": 0.95,
    "prefix only (PSM)": 1.0,
}
BUDGET_S = 0.030  # about what a tolerance of 10 % of the mean TTFT allows
RATE_PER_S = 1.5
HOT_SHARE, HOT_RATE_PER_S = 0.95, 80.0
LATE_S = 120.0  # the stream goes on while the last online requests end


def run(trace: Trace | None, ratio: float, kv_tokens: int, duration_s: float) -> Outcome:
    """One order, with as many questions as the engine takes."""
    supply = Supply(questions(subjects(SEED), SEED), backlog=BACKLOG)
    return _beside(trace, ratio, kv_tokens, duration_s, supply)


def _beside(
    trace: Trace | None, ratio: float, kv_tokens: int, duration_s: float, supply: Supply
) -> Outcome:
    engine = TwoPhaseEngine(
        PROFILE,
        queue(ratio),
        predictor=LatencyPredictor(profiling_run(PROFILE)),
        budget_s=BUDGET_S,
        kv_tokens=kv_tokens,
    )
    asked = online(AZURE, trace, Stretch(AZURE.span_s / 2, duration_s), RATE_PER_S)
    return play(engine, asked, supply, duration_s)


def consecutive_gain(ratio: float) -> float:
    """The paper's accounting: tokens of all prompts over those after the deduction."""
    asked = {request.id: request for request in islice(questions(subjects(SEED), SEED), QUESTIONS)}
    order = OfflineQueue(random.Random(1), utility_ratio=ratio)
    for request in asked.values():
        order.add(request.id, request.keys)
    taken: list[SimRequest] = []
    while (key := order.first()) is not None:
        order.take(key)
        order.forget(key)
        taken.append(asked[key])
    whole = sum(request.prompt_tokens for request in taken)
    shared = sum(BLOCK_TOKENS * _shared(one.keys, next_.keys) for one, next_ in pairwise(taken))
    return whole / (whole - shared)


def written(trace: Trace | None, duration_s: float) -> str:
    """The table, and the gains."""
    rows, gains = [], []
    for kv_tokens in MEMORIES:
        outcomes = {
            name: run(trace, ratio, kv_tokens, duration_s) for name, ratio in RATIOS.items()
        }
        first, *_, last = outcomes.values()
        for name, outcome in outcomes.items():
            rows.append(
                [
                    f"{kv_tokens:,} tokens of KV: {name}",
                    f"{outcome.offline_requests_s:.2f}",
                    times(outcome.offline_requests_s / first.offline_requests_s),
                    share(outcome.hit_ratio),
                    f"{outcome.wait_mean_s():.0f}",
                    f"{outcome.wait_max_s():.0f}",
                    times(consecutive_gain(RATIOS[name])),
                ]
            )
        gains.append(last.offline_requests_s / first.offline_requests_s)
    head = [
        *("order of offline requests", "requests/s", "to FCFS", "hits", "wait mean s"),
        *("wait longest s", "prompt tokens, shared deducted"),
    ]
    said = (
        f"The paper: up to 4 times FCFS, by its accounting. Here PSM is {times(gains[0])} with "
        f"{MEMORIES[0]:,} tokens of memory and {times(gains[1])} with {MEMORIES[1]:,}, where the "
        f"cache holds all {len(subjects(SEED))} prefixes whatever the order."
    )
    return f"{table(head, rows)}\n\n{said}\n\n{starved(trace, duration_s)}"


def starved(trace: Trace | None, duration_s: float) -> str:
    """The table of waits where one prefix never runs out."""
    hot, *others = (replace(subject, weight=1.0) for subject in subjects(SEED))
    hot = replace(hot, weight=HOT_SHARE / (1 - HOT_SHARE) * len(others))
    count = round(HOT_RATE_PER_S * (duration_s + LATE_S))
    asked = list(islice(questions([hot, *others], SEED), count))
    lonely = {request.id for request in asked if request.keys[0] != prefix_key(hot)}
    rows = []
    for name, ratio in RATIOS.items():
        supply = Supply(iter(asked), rate_per_s=HOT_RATE_PER_S)
        outcome = _beside(trace, ratio, MEMORIES[0], duration_s, supply)
        rows.append(
            [
                name,
                f"{outcome.offline_requests_s:.1f}",
                share(outcome.hit_ratio),
                f"{outcome.wait_max_s(lonely):.0f}",
                f"{outcome.wait_max_s():.0f}",
            ]
        )
    head = [
        "a prefix that never runs out",
        "requests/s",
        "hits",
        "others' longest wait s",
        "all's s",
    ]
    said = (
        f"{HOT_RATE_PER_S:.0f} questions a second, {HOT_SHARE:.0%} of them with one prefix, for "
        f"{duration_s:.0f} s: a wait of nearly that long is a question that was never taken."
    )
    return f"{table(head, rows)}\n\n{said}"


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
