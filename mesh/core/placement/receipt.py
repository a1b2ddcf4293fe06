"""The receipt of one placement: its candidates, each with its price, the best first.

Order: the one that is chosen or waited for, then those that the policy scored, cheapest first, then
the other available ones, then the unavailable with the reason why. Only the first CANDIDATES_MAX
are listed, all are counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from mesh.core.model.prompt import Prompt
from mesh.core.placement.candidates import CandidateLayer
from mesh.core.policies.base import Choice, Score, Target
from schemas.decision import Candidate, CandidateKind

CANDIDATES_MAX = 8  # listed in a receipt; writing one down costs as much as pricing it
SCORES_MAX = 2 * CANDIDATES_MAX  # kept of a decision that is not listed


def receipt(
    layers: Sequence[CandidateLayer], choice: Choice, prompt: Prompt
) -> tuple[tuple[Candidate, ...], int]:
    """The candidates to list, and how many there are."""
    listed = islice(_ordered(layers, choice, prompt), CANDIDATES_MAX)
    return tuple(listed), sum(map(len, layers))


LayerParts = tuple[CandidateKind, list[Target], list[tuple[Target, str]]]


class UnlistedCandidates(NamedTuple):
    """What a receipt is made from, as it was at the decision, and no more: of the choice what its
    candidates need, of the prompt no hashes, of which a long one has thousands."""

    layers: Sequence[LayerParts]  # of each the first few; empty where all are scored
    target: Target | None  # that is chosen or waited for
    scores: Sequence[Score]
    matched_blocks: int
    block_tokens: float
    parts: tuple[tuple[int, float], ...]
    considered: int

    def candidates(self) -> tuple[Candidate, ...]:
        """As `receipt` lists them, but for `pending`, which has changed since."""
        layers = [CandidateLayer(*parts) for parts in self.layers]
        choice = Choice(self.target, "", self.matched_blocks, self.scores)
        listed, _ = receipt(layers, choice, Prompt(0, (), self.block_tokens, self.parts))
        return tuple([replace(one, pending=None) for one in listed])


def unlisted(
    layers: Sequence[CandidateLayer], choice: Choice, prompt: Prompt
) -> UnlistedCandidates | None:
    """The candidates, to be listed later; None of a policy that scores too many to be kept."""
    scores, considered = choice.scores, 0
    scored = len(scores)
    if scored > SCORES_MAX:
        return None
    for layer in layers:
        considered += len(layer.free) + len(layer.busy)
    few: Sequence[LayerParts] = ()
    if scored < considered:  # a layer is valid until the next decision only
        few = [
            (layer.kind, layer.free[:CANDIDATES_MAX], layer.busy[:CANDIDATES_MAX])
            for layer in layers
        ]
    return UnlistedCandidates(
        few, choice.target or choice.waits_for, scores, choice.matched_blocks,
        prompt.block_tokens, prompt.parts, considered,
    )  # fmt: skip


def _ordered(
    layers: Sequence[CandidateLayer], choice: Choice, prompt: Prompt
) -> Iterator[Candidate]:
    done = set()
    for score in _ranked(choice):
        spot = _spot(score.target)
        if spot not in done:
            done.add(spot)
            yield _candidate(score.target, None, score, prompt)
    if len(done) < sum(len(layer.free) for layer in layers):
        for target in (target for layer in layers for target in layer.free):
            if _spot(target) not in done:
                yield _candidate(target, None, Score(target), prompt)
    for layer in layers:
        for target, why in layer.busy:
            yield _candidate(target, why, Score(target), prompt)


def _ranked(choice: Choice) -> list[Score]:
    """The score of the candidate that is chosen or waited for, and then all."""
    scored = sorted(choice.scores, key=_rank)
    first = choice.target or choice.waits_for
    if first is None:
        return scored
    spot = _spot(first)
    for score in scored:
        if score.target is first or _spot(score.target) == spot:
            break
    else:
        score = Score(first)
    if choice.matched_blocks:
        score = Score(score.target, score.seconds, score.terms, choice.matched_blocks)
    return [score, *scored]


def _rank(score: Score) -> tuple[bool, float]:
    return score.seconds is None, score.seconds or 0.0


def _spot(target: Target) -> tuple[bool, str, bool]:
    # A bool is hashed sooner than a kind. A decode replica may be a candidate alone and in a pair.
    return target.kind is CandidateKind.REPLICA, target.name, target.prefill is not None


def _candidate(target: Target, why: str | None, score: Score, prompt: Prompt) -> Candidate:
    terms = score.terms
    if target.peer is not None and target.rtt_s is not None and "rtt_s" not in terms:
        terms = {"rtt_s": target.rtt_s, **terms}
    return Candidate(
        name=target.name,
        kind=target.kind,
        available=why is None,
        why=why,
        seconds=score.seconds,
        terms=terms,
        matched_tokens=prompt.held_tokens(score.matched_blocks),
        pending=_pending(target),
        prefill=None if target.prefill is None else target.prefill.among[0].name,
    )


def _pending(target: Target) -> int | None:
    if target.replica is not None:
        return target.replica.pending
    return None if target.peer is None else target.peer.queue
