"""A router's recording: every event it received, and what it decided, as lines of JSON.

The core decides by its events, their times, its settings and its seed alone, so a new core that
gets them makes every decision again. The first line is the header; then one line a step:

    {"now": 12.5, "event": {"HeartbeatSeen": {...}}, "effects": [{"Decided": {...}}, ...]}

and, when the recording was ended in order, a last one with the reason: {"end": "..."}.

The codec is generic: dataclasses are written field by field under their class's name, and read by
their types. A new event, or a new field, needs nothing here. Effects are only compared, so they are
read as plain values. JSON writes a float's shortest text that reads back as the same float, so
times survive to the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, get_args

import orjson
from pydantic import TypeAdapter, ValidationError

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from schemas.http import FaultKind
from schemas.ids import RegionId, RouterId

FORMAT = 1  # rises when old files can't be read any more
LINE_BYTES_MAX = 16 * 1024 * 1024  # the longest prompt's hashes take 160 KiB

EVENTS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(ev.Event)}

Plain = Any  # what JSON holds: dicts, lists, texts, numbers
T = TypeVar("T")


class RecordingInvalid(ValueError):
    """These bytes are no recording that this version can read; the message names the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHeader:
    """What a core is made from, and who it was."""

    format: int = FORMAT
    version: str  # of the software that recorded
    region: RegionId
    router: RouterId
    epoch: int
    seed: int
    settings: RouterSettings
    peers: tuple[RegionId, ...] = ()  # that it may adopt, and that may adopt it


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One event and what came of it; `effects` as `plain_effects` gives them."""

    now: float
    event: ev.Event
    effects: list[Plain]


@dataclass(frozen=True, slots=True)
class RecordingEnd:
    """Nothing was recorded after this, on purpose."""

    why: str


def encode_header(header: RecordingHeader) -> bytes:
    """The first line. Raises TypeError for a setting that JSON can't hold."""
    return _line({"recording": header})


def encode_step(now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> bytes:
    """One event's line. Raises TypeError for a value that JSON can't hold."""
    tagged = [{type(effect).__name__: effect} for effect in effects]
    return _line({"now": now, "event": {type(event).__name__: event}, "effects": tagged})


def encode_raised(now: float, event: ev.Event, error: Exception) -> bytes:
    """The line of an event that the core failed on."""
    effects = plain_error(error)
    return _line({"now": now, "event": {type(event).__name__: event}, "effects": effects})


def encode_end(why: str) -> bytes:
    return _line({"end": why})


def plain_effects(effects: Sequence[fx.Effect]) -> list[Plain]:
    """Effects as a recording's reader sees them."""
    tagged = [{type(effect).__name__: effect} for effect in effects]
    plain: list[Plain] = orjson.loads(_line(tagged))
    return plain


def plain_error(error: Exception) -> list[Plain]:
    """In place of effects when the core failed."""
    return [{"Raised": {"error": f"{type(error).__name__}: {error}"}}]


def decode_header(line: bytes) -> RecordingHeader:
    """The header in a first line. Raises RecordingInvalid."""
    found = _object(line).get("recording")
    if not isinstance(found, dict):
        raise RecordingInvalid("this is no recording: its first line is no header")
    if found.get("format") != FORMAT:
        raise RecordingInvalid(
            f"format {found.get('format')} was written by version {found.get('version')}; "
            f"this version reads format {FORMAT}"
        )
    settings = found.get("settings")
    if isinstance(settings, dict):
        if not settings.get("warm_idle_share"):  # warming was off
            settings = {n: value for n, value in settings.items() if not n.startswith("warm_")}
        if settings.get("hold_order") == "first-come":  # the only order that is left
            del settings["hold_order"]
        found["settings"] = settings
        _refuse_unknown(RouterSettings, settings)
    return _read(RecordingHeader, found)


def decode_line(line: bytes) -> RecordedStep | RecordingEnd:
    """The step, or the end, in a later line. Raises RecordingInvalid."""
    found = _object(line)
    match found:
        case {"end": str(why)}:
            return RecordingEnd(why)
        case {"now": float() | int() as now, "event": dict(event), "effects": list(effects)}:
            return RecordedStep(float(now), _event(event), effects)
    raise RecordingInvalid(f"a line with {', '.join(found) or 'nothing'} is no step")


def _event(tagged: dict[str, Plain]) -> ev.Event:
    [(name, values)] = tagged.items() if len(tagged) == 1 else [("", None)]
    kind = EVENTS.get(name)
    if kind is None or not isinstance(values, dict):
        raise RecordingInvalid(f"this version knows no event {'+'.join(tagged)!r}")
    _refuse_unknown(kind, values)
    event: ev.Event = _read(kind, values)
    return event


def _refuse_unknown(kind: type, values: dict[str, Plain]) -> None:
    # A field that is ignored could be the one that made the difference.
    unknown = values.keys() - _names(kind)
    if unknown:
        named = ", ".join(sorted(unknown))
        raise RecordingInvalid(f"{kind.__name__} has no {named} in this version")


@cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


@cache  # made at the first use: a router that doesn't record has none
def _readers() -> dict[type, TypeAdapter[Any]]:
    return {kind: TypeAdapter(kind) for kind in (RecordingHeader, *EVENTS.values())}


def _read(kind: type[T], values: dict[str, Plain]) -> T:
    try:
        found: T = _readers()[kind].validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (kind.__name__, *first["loc"])))
        raise RecordingInvalid(f"{where}: {first['msg']}") from error
    return found


def _object(line: bytes) -> dict[str, Plain]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RecordingInvalid(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RecordingInvalid("a line must be a JSON object")
    return found


def _line(value: object) -> bytes:
    return orjson.dumps(value, default=_plain, option=orjson.OPT_APPEND_NEWLINE)


def _plain(value: object) -> object:
    """What orjson doesn't write by itself, in an order that is the same in every process."""
    if isinstance(value, FaultKind):
        return value.code
    if isinstance(value, tuple):  # a named one
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} can't be recorded")
