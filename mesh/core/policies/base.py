"""What a policy is: it picks one of the available candidates, and says what it knew.

A policy ranks; it never admits. Who is available was settled before it is asked (selective
pushing), and the same object serves either layer: one instance picks among local replicas,
another among peer regions (SkyWalker 3.1, two-layer routing).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from mesh.core.prompt import Prompt
from schemas.ids import ModelId


class Target(NamedTuple):
    """One available place. `load`: requests in it or on their way, however its layer counts."""

    name: str
    load: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The pick. `matched_blocks`: prompt blocks the pick is believed to hold."""

    name: str
    reason: str
    matched_blocks: int = 0


class Policy(Protocol):
    """One way to choose; one instance a layer."""

    def choose(self, model: ModelId, prompt: Prompt, targets: Sequence[Target]) -> Choice:
        """Pick one of `targets`, which are all available and at least one."""
        ...

    def placed(self, model: ModelId, prompt: Prompt, name: str) -> None:
        """The request went to `name`, whoever chose it."""
        ...

    def forget(self, name: str) -> None:
        """That place is gone, or came back empty."""
        ...


def least_loaded(targets: Sequence[Target], dice: Random) -> Target:
    """The target with the least load; ties at random, so that no replica is everyone's first."""
    least = min(target.load for target in targets)
    return dice.choice([target for target in targets if target.load == least])


class Memoryless:
    """The half of a policy that learns nothing from what happened."""

    def placed(self, model: ModelId, prompt: Prompt, name: str) -> None:
        """Nothing to remember."""

    def forget(self, name: str) -> None:
        """Nothing to forget."""
