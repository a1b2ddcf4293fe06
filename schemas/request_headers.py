"""Which headers of a client's request reach the engine, in which bounds.

Each is on the allow-list because an engine reads it, and travels in a bus header of its own. What
runs before an engine may take any other header for an order, and authorization is the mesh's.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple


class EngineHeader(NamedTuple):
    """One header: its name on the bus, what it may hold, and what it means."""

    on_bus: str
    pattern: str
    chars_max: int
    about: str


CONTENT_TYPE = "content-type"
ANTHROPIC_HEADERS = ("anthropic-version", "anthropic-beta")
ENGINE_HEADERS: Mapping[str, EngineHeader] = {
    CONTENT_TYPE: EngineHeader(
        "Mesh-Content-Type",
        r"^multipart/form-data;[ -~]+$",
        256,
        "Content-type of a body that is a form; JSON when missing.",
    ),
    "anthropic-version": EngineHeader(
        "Mesh-Anthropic-Version",
        r"^[0-9A-Za-z.-]+$",
        32,
        "Anthropic's header of that name, as the client gave it.",
    ),
    "anthropic-beta": EngineHeader(
        "Mesh-Anthropic-Beta",
        r"^[0-9A-Za-z._, -]+$",
        512,
        "Anthropic's header of that name: features, comma-separated.",
    ),
}
_CHECKED = {
    header.on_bus: (name.title(), re.compile(header.pattern), header.chars_max)
    for name, header in ENGINE_HEADERS.items()
}


def fits(name: str, text: str) -> bool:
    """Whether the header of that name may have this value."""
    header = ENGINE_HEADERS[name]
    _, pattern, chars_max = _CHECKED[header.on_bus]
    return len(text) <= chars_max and pattern.fullmatch(text) is not None


def for_engine(on_bus: Mapping[str, str]) -> dict[str, str]:
    """The headers of HTTP in a message's headers; one of another form is left out."""
    if _CHECKED.keys().isdisjoint(on_bus):
        return {}
    return {
        name: text
        for bus_name, (name, pattern, chars_max) in _CHECKED.items()
        if (text := on_bus.get(bus_name)) is not None
        and len(text) <= chars_max
        and pattern.fullmatch(text) is not None
    }
