"""Results by their place in a table, repetitions together."""

from collections.abc import Sequence
from typing import Any

from tests.programs.studies.tables.case import Case
from tests.programs.studies.tables.figures import Figure, mean_of
from tests.programs.studies.tables.result_files import Result


class Results:
    """Found by the cases' tags."""

    def __init__(self, cases: Sequence[Case], results: Sequence[Result]) -> None:
        self._by_tags: dict[tuple[Any, ...], list[Result]] = {}
        for one, result in zip(cases, results, strict=True):
            self._by_tags.setdefault(one.tags, []).append(result)

    def mean(self, figure: Figure, *tags: Any) -> float:
        """Of one place, over its repetitions. Raises KeyError for a place that was not played."""
        return mean_of(figure, self._by_tags[tags])

    def places(self) -> list[tuple[Any, ...]]:
        """Every place, in the order in which they were declared."""
        return list(self._by_tags)
