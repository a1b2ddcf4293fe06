"""A policy's own options, written behind its name: `cache-aware:0.3/64/1.5`.

A policy that has any declares a frozen dataclass of numbers with their defaults; the values after
the colon fill its fields in their order, separated by `/`, and an empty or missing one keeps the
default. So one text, which fits into a command line, a log and a receipt, says all of what was
run. Rejected: fields of RouterSettings for each policy's knobs, which would grow with every
policy and could not hold two settings of one policy side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Generic, TypeVar

from mesh.core.policies.base import Policy
from mesh.core.settings import RouterSettings

Options = TypeVar("Options")


@dataclass(frozen=True)
class Tunable(Generic[Options]):
    """Makes a policy that has options; called like any other maker."""

    options: Options
    make: Callable[[RouterSettings, Random, Options], Policy]

    def __call__(self, settings: RouterSettings, dice: Random) -> Policy:
        """A new instance with these options."""
        return self.make(settings, dice, self.options)

    def tuned(self, text: str) -> "Tunable[Options]":
        """The same with the options in `text`. Raises ValueError that says what fits."""
        return Tunable(read_options(self.options, text), self.make)


def read_options(default: Options, text: str) -> Options:
    """`default` with the values in `text`. Raises ValueError that says what fits."""
    known: Any = default  # a dataclass, which has no type of its own
    names = [field.name for field in fields(known)]
    values = text.split("/")
    if len(values) > len(names):
        raise ValueError(f"{len(values)} options in {text[:80]!r}, at most {'/'.join(names)}")
    changes = {
        name: _number(name, value, type(getattr(known, name)))
        for name, value in zip(names, values, strict=False)
        if value
    }
    changed: Options = replace(known, **changes)
    return changed


def _number(name: str, text: str, kind: type[float]) -> float:
    """The number in `text`, whole where the default is."""
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {wanted}, not {text[:40]!r}") from None
