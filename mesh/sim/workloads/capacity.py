"""The work of a workload in engine seconds, and the speed that gives a fleet a certain load.

*Load* is work per second over the fleet's engines: at 1, engines that never idle, never compute a
shared prefix twice and always run the batch that memory allows would just keep up. Real engines,
with several caches and bursts of arrivals, fill up somewhat below 1.

*Work* counts iterations of one engine at that operating point:

- A decoding batch is as large as memory and `max_seqs` allow for sequences of their mean length
  while they decode: the prompt and half the answer. Sequences that share memory are not counted.
- A prompt's uncached tokens are computed in chunks beside the decoding batch, as many prompts at
  once as the token budget takes.
- An iteration that does both pays its floor (the weights read once) once. So the total is mixed
  iterations while there is both to do, and then pure ones for the rest. Seconds per prefill token
  plus seconds per output token would count the floor twice: a third too much for a chat on an L4.

What is cached is a property of the workload: one endless cache that holds every prompt and answer
from the moment it is requested. Trees are walked in their nominal time (arrival plus pauses,
answers take none).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from agents.sim.profiles import Profile
from mesh.sim.workload import Arrival, RequestNode, Segment, Workload


class TimedRequest(NamedTuple):
    """A request at its nominal time, and how many leading tokens of its prompt are cached."""

    at_s: float
    node: RequestNode
    shared_tokens: int


class EndlessCache:
    """Remembers every sequence of segments, in a trie of pairs (node, segment)."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def add(self, prompt: tuple[Segment, ...], answer: Segment) -> int:
        """How many leading tokens of the prompt were cached; then it and its answer are."""
        place = shared = 0
        known = True
        for part in (*prompt, answer):
            step = (place, part.id)
            following = self._next.get(step)
            if following is None:
                known = False
                following = self._next[step] = len(self._next) + 1
            elif known:
                shared += part.tokens
            place = following
        return min(shared, sum(part.tokens for part in prompt))


def in_order(arrivals: Iterable[Arrival]) -> Iterator[tuple[float, RequestNode]]:
    """Every node of every tree by its nominal time in seconds."""
    heap = [(arrival.at_s, place, arrival.node) for place, arrival in enumerate(arrivals)]
    heapify(heap)
    place = len(heap)
    while heap:
        at_s, _, node = heappop(heap)
        yield at_s, node
        for child in node.children:
            heappush(heap, (at_s + child.pause_s, place, child))
            place += 1


def shared(arrivals: Iterable[Arrival]) -> Iterator[TimedRequest]:
    """Every request with what an endless cache holds of it."""
    cache = EndlessCache()
    for at_s, node in in_order(arrivals):
        yield TimedRequest(at_s, node, cache.add(node.prompt, node.answer))


@dataclass(frozen=True, slots=True)
class WorkloadDemand:
    """Sums over a workload's requests."""

    requests: int
    duration_s: float
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    decode_context_tokens: float  # summed over output tokens: the context of each
    prefill_context_tokens: float  # summed over uncached tokens, likewise


def demand(workload: Workload) -> WorkloadDemand:
    """Sums of an open loop. Raises ValueError for a closed one, which has no rate of its own.

    The duration runs to the last request's nominal time and one mean gap beyond it.
    """
    if not workload.arrivals or workload.clients:
        raise ValueError(
            f"{workload.name} is a closed loop, whose load follows the mesh: "
            "give a rate, or change the number of clients"
        )
    requests = prompt = uncached = output = 0
    decode_context = prefill_context = 0.0
    first_s = workload.arrivals[0].at_s
    last_s = first_s
    for request in shared(workload.arrivals):
        tokens, answer = request.node.prompt_tokens, request.node.answer.tokens
        fresh = max(1, tokens - request.shared_tokens)  # the last token is always computed
        requests += 1
        prompt += tokens
        uncached += fresh
        output += answer
        decode_context += answer * (tokens + answer / 2)
        prefill_context += fresh * (tokens - fresh / 2)
        last_s = request.at_s
    gaps = requests - 1
    duration_s = (last_s - first_s) * (requests / gaps if gaps else 1.0)
    return WorkloadDemand(
        requests, duration_s, prompt, uncached, output, decode_context, prefill_context
    )


def batch_size(sums: WorkloadDemand, profile: Profile) -> int:
    """How many sequences of this workload decode together in an engine that is full."""
    length = sums.decode_context_tokens / sums.output_tokens
    return max(1, min(profile.max_seqs, int(profile.kv_tokens / length)))


def work_s(sums: WorkloadDemand, profile: Profile) -> float:
    """Engine seconds that the whole workload takes."""
    batch = batch_size(sums, profile)
    attended = round(batch * sums.decode_context_tokens / sums.output_tokens)
    # The first token of an answer comes out of the prefill.
    decodes = max(0, sums.output_tokens - sums.requests) / batch
    budget = max(1, profile.batch_tokens - batch)
    beside = _chunks(sums, budget, batch)
    alone = _chunks(sums, profile.batch_tokens, batch)
    mixed = min(decodes, sums.uncached_tokens / _tokens(beside))
    left_tokens = sums.uncached_tokens - mixed * _tokens(beside)
    return (
        mixed * profile.iteration_s(beside, batch, attended)
        + (decodes - mixed) * profile.decode_s(batch, attended)
        + left_tokens / _tokens(alone) * profile.iteration_s(alone, 0, 0)
    )


def offered(workload: Workload, profile: Profile) -> float:
    """Engine seconds of work per second: how many engines the workload keeps busy at speed 1."""
    sums = demand(workload)
    if sums.duration_s <= 0:
        raise ValueError(f"{workload.name}: all requests come at once, so there is no rate")
    return work_s(sums, profile) / sums.duration_s


def speed_for_load(workload: Workload, profile: Profile, replicas: int, load: float) -> float:
    """The speed at which the workload is `load` (1 = full) of so many engines.

    The caller makes the workload again at that speed, or `at_speed` does.
    """
    if replicas < 1 or not load > 0:
        raise ValueError(f"load {load} of {replicas} replicas: both must be above 0")
    return load * replicas / offered(workload, profile)


def _chunks(sums: WorkloadDemand, budget: int, batch: int) -> tuple[tuple[int, int], ...]:
    """A full iteration's prefill: the mean prompt's, as often as budget and batch allow."""
    tokens = min(budget, max(1, round(sums.uncached_tokens / sums.requests)))
    context = max(tokens, round(sums.prefill_context_tokens / sums.uncached_tokens))
    return ((tokens, context),) * max(1, min(batch, budget // tokens))


def _tokens(chunks: tuple[tuple[int, int], ...]) -> int:
    return sum(tokens for tokens, _ in chunks)
