"""A running system, as the bench knows it, and what it was given to run on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.bench.engine import MODEL
from tests.programs.bench.processes import Processes
from tests.programs.bench.request_bodies import request_body


@dataclass(frozen=True, slots=True)
class Place:
    """Where a system is started: its engines are shared, and run already."""

    processes: Processes
    engines: Sequence[str]  # http://host:port
    directory: Path  # for files of the run


@dataclass(frozen=True, slots=True)
class System:
    """Something that answers `/v1/chat/completions`."""

    name: str
    urls: tuple[str, ...]  # http://host:port; more than one only without a router
    settings: str  # for the report: version, options
    router: tuple[int, ...] = ()  # the process that clients talk to
    path: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # all between client, engine
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # measured, not of the path
    model: str = MODEL
    prompt_tokens_max: int | None = None
    has_own_engines: bool = False  # times of its answers can't be compared with the others'


async def until_it_answers(place: Place, system: System) -> System:
    """Wait until a chat gets through. Raises Absent."""
    body = request_body(64, 0, 0, model=system.model).body(0)
    for url in system.urls:
        look = place.processes.takes(f"{url}/v1/chat/completions", body)
        await place.processes.until(system.name, look)
    return system
