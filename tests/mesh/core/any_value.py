"""Strategies made from types, so that a new event or field is tested without being named here."""

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Le, Lt, MaxLen, MinLen
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from schemas.exchange import Priority
from schemas.listed_replicas import ListedReplicas

I64 = 2**63 - 1
CHARACTERS = st.characters(exclude_categories=["Cs"])
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of the type, within the limits that its annotation says."""
    return _values(hint, ())


def _values(hint: Any, limits: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if hasattr(hint, "__supertype__"):
        return _values(hint.__supertype__, limits)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is RouterSettings:  # its fields must fit together
        return st.builds(
            RouterSettings,
            policy=st.sampled_from(["mesh", "mesh:0.2", "e2:60"]),
            pushing=st.sampled_from(["pending", "outstanding:8", "blind"]),
            own_ttft_goal_s=st.none() | st.floats(0.001, 60.0),
            policy_by_priority=st.dictionaries(st.sampled_from(Priority), st.just("e2")).map(
                lambda policies: tuple(policies.items())
            ),
        )
    if hint is ListedReplicas:  # its columns are of one length
        return _of_rows(hint)
    if is_dataclass(hint) or _is_named_tuple(hint):
        return _whole(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is not None:
        return _composed(origin, inner)
    return _plain(hint, limits)


def _composed(origin: Any, inner: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if origin is Annotated:
        return _values(inner[0], tuple(m for field in inner[1:] for m in field.metadata))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, inner))
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=2)
    assert origin is tuple, f"teach this module {origin}"
    if inner[-1] is Ellipsis:
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    return st.tuples(*map(values_of, inner))


def _plain(hint: Any, limits: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    said = {type(limit): limit for limit in limits}
    least, most = said.get(Ge), said.get(Le)
    if hint is bool:
        return st.booleans()
    if hint is int:
        highest = said[Lt].lt - 1 if Lt in said else I64
        return st.integers(least.ge if least else -I64, most.le if most else highest)
    if hint is float:
        return st.floats(
            least.ge if least else None,
            most.le if most else None,
            allow_nan=False,
            allow_infinity=False,
        )
    if hint is type(None) or getattr(hint, "_is_protocol", False):
        return st.none()
    assert hint is str, f"teach this module {hint}"
    patterns = [m.pattern for m in limits if getattr(m, "pattern", None)]
    if patterns:
        matching = st.from_regex(patterns[0], fullmatch=True)
        if MaxLen not in said:
            return matching
        longest = said[MaxLen].max_length
        return matching.filter(lambda text: len(text) <= longest)
    shortest = said[MinLen].min_length if MinLen in said else 0
    return st.text(CHARACTERS, min_size=shortest, max_size=12)


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _of_rows(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    columns = [typing.get_args(typing.get_args(hint)[0])[0] for hint in hints.values()]
    rows = st.lists(st.tuples(*map(values_of, columns)), max_size=2)
    return rows.map(lambda made: kind(**dict(zip(hints, zip(*made, strict=True), strict=False))))


def _whole(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind._fields
    return st.builds(kind, **{name: values_of(hints[name]) for name in names})
