"""smg (Shepherd Model Gateway): the longest prefix, unless its holder is busier than most.

Source: lightseekorg/smg, `model_gateway/src/policies/cache_aware.rs` (`select_matched_candidate`,
`candidate_requires_spill`) and `least_load.rs`, states of August 2026 and later. It descends from
SGLang's router (`cache_aware.py`), whose one switch for all requests it replaced by a gate for each
request. If the longest match is more than `cache_threshold` of the prompt, the least loaded of its
holders gets the request, unless that has more than `balance_rel` times *and* more than
`balance_abs` above the mean number of requests. Then, and without a match, the request goes to the
replica with the least

    queued prompt tokens · seconds per token + 0.15 s · k / (1 - k),    k: KV memory in use

or, with `expected_wait` 0, to the one with the fewest requests, as in the first states that have
the gate. The prompt is entered for the chosen one, so a prefix whose holder is busy gets another.

As published, tokens are divided by the generated tokens a second; the prefill speed here is the
better guess. Unreported signals put a replica behind the others instead of counting as 0. Ties are
broken at random. Not here, because off by default: triggers by KV usage, decay by waiting prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mesh.core.model.request import Request
from mesh.core.policies.base import Choice, Target, least_loaded, prefill_s_per_token
from mesh.core.policies.cache_aware import CacheAwareOptions
from mesh.core.policies.indexed import Indexed, part

KV_PRESSURE_S = 0.15  # DEFAULT_KV_PRESSURE_WEIGHT
KV_USED_MAX = 0.999  # the barrier stays finite


@dataclass(frozen=True, slots=True)
class SmgOptions(CacheAwareOptions):
    """`balance_abs` in requests above the mean, `balance_rel` times it. `expected_wait`: 0 or 1."""

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    expected_wait: int = 1

    def __post_init__(self) -> None:
        super(SmgOptions, self).__post_init__()
        if self.expected_wait not in (0, 1):
            raise ValueError(f"expected_wait is 0 or 1, not {self.expected_wait}")


class Smg(Indexed):
    """The holder of the longest prefix, if the gate lets it."""

    def __init__(self, dice: Random, blocks_max: int, options: SmgOptions) -> None:
        super().__init__(dice, blocks_max)
        self._options = options

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The least loaded holder, or the quickest of all."""
        holders, blocks = self._holders(request, targets)
        ratio = part(blocks, request)
        if not ratio > self._options.cache_threshold:
            return self._without_prefix(request, targets, now, f"best match {ratio:.0%}")
        holder = least_loaded(holders, self._dice)
        mean = sum(target.load for target in targets) / len(targets)
        if self._is_overloaded(holder.load, mean):
            why = f"spill: load {holder.load} where it is cached, {mean:.1f} on average"
            return self._without_prefix(request, targets, now, why)
        return Choice(holder, f"holds {ratio:.0%} of the prompt", blocks)

    def _is_overloaded(self, load: int, mean: float) -> bool:
        options = self._options
        return load > options.balance_rel * mean and load > mean + options.balance_abs

    def _without_prefix(
        self, request: Request, targets: Sequence[Target], now: float, why: str
    ) -> Choice:
        waits_s = [expected_wait_s(one, now) for one in targets]
        known_s = [wait_s for wait_s in waits_s if wait_s is not None]
        if not self._options.expected_wait or not known_s:
            target = least_loaded(targets, self._dice)
            reason = f"{why}, least load {target.load}"
        else:
            least_s = min(known_s)
            ties = [one for one, wait_s in zip(targets, waits_s, strict=True) if wait_s == least_s]
            target = least_loaded(ties, self._dice)
            reason = f"{why}, least wait {least_s:.3f} s"
        return Choice(target, reason, self._held_by(request, target))


def expected_wait_s(target: Target, now: float) -> float | None:
    """Seconds until a prompt is computed there, with the price of full memory; None if unknown."""
    replica = target.replica
    used = None if replica is None else replica.heartbeat.kv_used_ratio
    if replica is None or used is None:
        return None
    s_per_token = prefill_s_per_token(target)
    queued_tokens = replica.prefill_queue_tokens(now, s_per_token)
    if queued_tokens is None:
        return None
    used = min(used, KV_USED_MAX)
    return queued_tokens * s_per_token + KV_PRESSURE_S * used / (1.0 - used)
