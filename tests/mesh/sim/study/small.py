"""A study that takes less than a second: a few requests of a recorded trace in two regions."""

from pathlib import Path
from typing import Any

from mesh.sim.study.cells import CellResult, labels, play
from mesh.sim.study.settings import SimSettings

RECORDED = Path("tests/data/mooncake/conversation_first60.jsonl")


def settings(**changes: Any) -> SimSettings:
    """Twelve requests, two replicas."""
    given: dict[str, Any] = {
        "trace": RECORDED,
        "limit": 12,
        "scale_lengths": 0.05,
        "regions": ("us=1,eu=1",),
    }
    return SimSettings.model_validate(given | changes)


def study(given: SimSettings) -> dict[str, CellResult]:
    """Every run of it, by name."""
    cells = given.cells()
    names = labels(cells)
    return {name: play(given, cell) for name, cell in zip(names, cells, strict=True)}
