"""Searching for the smallest fleet, with a simulation behind every answer.

All searches lean on one assumption: another replica does not make a fleet that meets its target
miss it. It holds for the mesh's policies but for noise at the very edge, so an answer is never
inferred: the fleet that comes out was itself played, and so was every one with a replica less.

- `least`: one number. It gallops from a guess, by doubling or halving, and bisects the last
  step: about 2·log2 of the distance to the guess. A target that nothing meets is found out early:
  when twice the guess does not do, the most that there may be is played next.
- `taken_away`: several numbers that depend on each other. From a fleet that fits, a replica is
  taken where the order says, as long as what is left fits; when no region can spare one more, the
  fleet is a local minimum. Rejected: trying all fleets of a size, which is exact and costs
  millions of simulations for three regions of twenty.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def least(fits: Callable[[int], bool], *, guess: int, most: int) -> int | None:
    """The smallest number from 1 to `most` that fits, None if not even `most` does."""
    guess = min(max(guess, 1), most)
    if fits(guess):
        below, above = _gallop_down(fits, guess)
    else:
        found = _gallop_up(fits, guess, most)
        if found is None:
            return None
        below, above = found
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if fits(middle) else (middle, above)
    return above


def taken_away(
    fleet: Mapping[Key, int],
    fits: Callable[[Mapping[Key, int]], bool],
    order: Callable[[Mapping[Key, int]], Iterable[Key]],
) -> dict[Key, int]:
    """The fleet with as many replicas taken away as it can spare, one at a time.

    `order`: whose replica is tried first. `fleet` must fit; one replica always stays.
    """
    kept = dict(fleet)
    spared = True
    while spared:
        spared = False
        for key in order(kept):
            smaller = kept | {key: kept[key] - 1}
            if kept[key] > 0 and sum(smaller.values()) > 0 and fits(smaller):
                kept, spared = smaller, True
                break
    return kept


def apportioned(total: int, shares: Mapping[Key, float]) -> dict[Key, int]:
    """So many replicas by shares: whole parts first, then the largest remainders (Hamilton)."""
    whole = sum(shares.values())
    exact = {key: total * share / whole for key, share in shares.items()}
    dealt = {key: int(part) for key, part in exact.items()}
    ranked = sorted(exact, key=lambda key: dealt[key] - exact[key])  # ties as they were named
    for key in ranked[: total - sum(dealt.values())]:
        dealt[key] += 1
    return dealt


def _gallop_down(fits: Callable[[int], bool], above: int) -> tuple[int, int]:
    """A number that does not fit, or 0, and a larger one that does."""
    while above > 1:
        below = above // 2
        if not fits(below):
            return below, above
        above = below
    return 0, 1


def _gallop_up(fits: Callable[[int], bool], below: int, most: int) -> tuple[int, int] | None:
    if below == most:
        return None
    above = min(2 * below, most)
    if fits(above):
        return below, above
    if above == most or not fits(most):
        return None
    while True:
        below, above = above, min(2 * above, most)
        if above == most or fits(above):
            return below, above
