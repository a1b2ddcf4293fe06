"""Figures by cell, system and round: what a run found, and what it could not measure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Results:
    """Grows while a run goes on; every round of a cell has a place for every figure."""

    settings: dict[str, str] = field(default_factory=dict)  # by system
    absent: dict[str, str] = field(default_factory=dict)  # why, by system or `system: cell`
    apart: list[str] = field(default_factory=list)  # systems over engines of their own
    machine: dict[str, object] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)  # titles by name
    rounds: dict[str, dict[str, list[Mapping[str, float]]]] = field(default_factory=dict)

    def add(self, cell: str, system: str, figures: Mapping[str, float]) -> None:
        """The next round; without figures if it could not be played."""
        self.rounds.setdefault(cell, {}).setdefault(system, []).append(figures)

    def values(self, cell: str, system: str, figure: str) -> list[float]:
        """One a round, NaN where it is missing."""
        rounds = self.rounds.get(cell, {}).get(system, [])
        return [figures.get(figure, math.nan) for figures in rounds]

    def has(self, cell: str, system: str) -> bool:
        """Whether there is anything of it."""
        return any(self.rounds.get(cell, {}).get(system, []))
