"""`oracle`: the quickest first token by the true state of all engines of all regions. Twin only.

It sees what each engine has cached, is computing and has queued, when each running answer will end
and free its memory, and what it placed itself and has not arrived. It takes the replica with the
least

    rtt_s + memory or prompts before ours + our prefill + cost to others

in seconds. A prompt that extends one that is queued or computed there counts as cached as far as
that one is published when ours is scheduled. While memory lasts, its prediction is exact to the
millisecond.

The cost to others is what `mesh` charges: a share of the stall that our prefill causes to each
running answer. Without it, each request's own minimum is not the best for all: `oracle:0` loses to
`oracle:0.08` where prefill fills the engines and wins by a little where it doesn't. So a bound is
the best of several weights, cell by cell.

It bounds placing each request on arrival, one at a time. It is greedy and never holds, so a policy
that decides later or on several requests at once may beat it, above all when memory is full. It
foresees neither later arrivals nor preemption for want of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from agents.sim.batch import EngineInternals, SequenceState
from agents.sim.engine import EngineSim
from agents.sim.kv_cache import BLOCK_TOKENS
from agents.sim.profiles import Publishing
from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Destination, Layered, Target
from mesh.core.policies.mesh_speeds import STALL_WEIGHT
from schemas.ids import ReplicaId

if TYPE_CHECKING:
    from mesh.sim.world import World

TIE_S = 0.001
HOP_S = 0.000_5  # over buses and HTTP, beside the round trip


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """`stall_weight`: the cost of a second of our prefill for each answer that runs there."""

    stall_weight: float = STALL_WEIGHT

    def __post_init__(self) -> None:
        if not 0.0 <= self.stall_weight <= 1.0:
            raise ValueError(f"stall_weight is from 0 to 1, not {self.stall_weight}")


class Sent(NamedTuple):
    """A prompt on its way to an engine."""

    arrives_at: float
    keys: Sequence[int]
    tokens: int
    missing: int  # tokens


class OracleCost(NamedTuple):
    """One candidate's cost in seconds; `missing`: prompt tokens to compute there."""

    seconds: float
    target: Target
    missing: int


class Oracle(Layered):
    """Chooses among replicas; a `GlobalView` gives it those of all regions."""

    def __init__(self, world: "World", dice: Random, options: OracleOptions) -> None:
        self._world = world
        self._dice = dice
        self._options = options
        self._sent: dict[str, list[Sent]] = {}
        self._missing: dict[str, dict[int, int]] = {}  # of those queued, by the engine's number
        self._chosen: OracleCost | None = None

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The least cost; ties at random."""
        sent_request = self._world.clients.sent(request)
        tokens, keys = sent_request.node.prompt_tokens, sent_request.keys.blocks
        costs = [self._cost(target, tokens, keys, now) for target in targets]
        least_s = min(costs).seconds + TIE_S
        best = self._dice.choice([cost for cost in costs if cost.seconds <= least_s])
        self._chosen = best
        reason = f"first token in {best.seconds:.3f} s, by the engines' true state"
        held = min(request.prompt.tokens - 1, tokens - best.missing)
        return Choice(best.target, reason, held_tokens=held)

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """Count it from now on, though its engine has not received it."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return
        sent_request = self._world.clients.sent(request)
        arrives_at = now + (chosen.target.rtt_s or 0.0) / 2 + HOP_S
        sent = Sent(
            arrives_at, sent_request.keys.blocks, sent_request.node.prompt_tokens, chosen.missing
        )
        self._sent.setdefault(spot.name, []).append(sent)

    def _cost(self, target: Target, tokens: int, keys: Sequence[int], now: float) -> OracleCost:
        engine = self._world.replicas[ReplicaId(target.name)].engine
        sim = engine.sim
        inside = engine.inside()
        sent = self._on_the_way(target.name, now)
        before = [(seq.request.keys, left) for seq, left in self._queue(target.name, sim, inside)]
        before += [(one.keys, one.missing) for one in sent]
        missing = tokens - _held(sim, keys, tokens, before)
        running = len(inside.decoding)
        own_s = _prefill_s(sim, missing, tokens, running)
        before_s = _prefill_s(sim, sum(left for _, left in before), tokens, running)
        memory_s = _memory_s(sim, inside, [one.tokens for one in sent], tokens, missing)
        rtt_s = target.rtt_s or 0.0
        before_s += inside.iteration_left_s
        waits_s = max(0.0, before_s - rtt_s / 2, memory_s - rtt_s / 2)
        others_s = self._options.stall_weight * running * own_s
        ttft_s = rtt_s + sim.profile.arriving_s(tokens) + waits_s + own_s
        return OracleCost(ttft_s + others_s, target, missing)

    def _on_the_way(self, name: str, now: float) -> list[Sent]:
        sent = [one for one in self._sent.get(name, []) if one.arrives_at > now]
        self._sent[name] = sent
        return sent

    def _queue(
        self, name: str, sim: EngineSim, inside: EngineInternals
    ) -> list[tuple[SequenceState, int]]:
        """Prompts to be computed before ours, and how many tokens of each."""
        found = list(inside.prefilling)
        known, still = self._missing.get(name, {}), {}
        for seq in inside.queued:
            number = seq.request.id
            left = known.get(number)
            if left is None:
                before = [(one.request.keys, tokens) for one, tokens in found]
                left = seq.length - _held(sim, seq.request.keys, seq.length, before)
            still[number] = left
            found.append((seq, left))
        self._missing[name] = still
        return found


def _held(
    sim: EngineSim,
    keys: Sequence[int],
    tokens: int,
    before: Sequence[tuple[Sequence[int], int]],
) -> int:
    """Leading tokens that will be cached: now, or by the prompts before ours."""
    cacheable = keys[: (tokens - 1) // BLOCK_TOKENS]
    held = sim.cache.matched(cacheable) * BLOCK_TOKENS
    after = 0  # tokens computed between that prompt and ours
    for others, left in reversed(before):
        common = _common(cacheable, others) * BLOCK_TOKENS
        unsure = 0  # published when it is scheduled, which is before ours
        if sim.profile.publishing is Publishing.COMPUTED:
            unsure = max(0, min(left, sim.profile.batch_tokens) - after)
        held = max(held, common - unsure)
        after += left
    return held


def _common(keys: Sequence[int], others: Sequence[int]) -> int:
    """How many leading keys are equal. Keys are chained, so an equal one implies all before."""
    low, high = 0, min(len(keys), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keys[middle - 1] == others[middle - 1] else (low, middle - 1)
    return low


def _prefill_s(sim: EngineSim, tokens: int, context: int, running: int) -> float:
    """Seconds of iterations that compute so many prompt tokens beside the decoding batch."""
    if tokens <= 0:
        return 0.0
    profile = sim.profile
    budget = max(1, profile.batch_tokens - running)
    whole, rest = divmod(tokens, budget)
    seconds = whole * profile.iteration_s(((budget, max(budget, context)),), running, 0)
    if rest:
        seconds += profile.iteration_s(((rest, max(rest, context)),), running, 0)
    return seconds


def _memory_s(
    sim: EngineSim, inside: EngineInternals, on_the_way: Sequence[int], tokens: int, missing: int
) -> float:
    """Seconds until ending answers have freed the memory for the prompts before ours and ours."""
    sizes = [seq.length for seq in inside.queued] + [*on_the_way, missing]
    needed = sum(-(-size // BLOCK_TOKENS) for size in sizes) + len(inside.decoding) + 1
    if needed <= inside.available_blocks:
        return 0.0
    left = sorted((seq.remaining - inside.rounds_ahead, seq.blocks) for seq in inside.decoding)
    freed, running = inside.available_blocks, len(left)
    context = sum(seq.length for seq in inside.decoding)
    round_s = sim.profile.decode_s(running, context)
    rounds = 0
    for ends, blocks in left:
        freed -= (ends - rounds) * running // BLOCK_TOKENS  # what the others grow meanwhile
        freed += blocks
        running, rounds = running - 1, ends
        if freed >= needed:
            break
    return rounds * round_s
