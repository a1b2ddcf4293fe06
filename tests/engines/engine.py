"""A real inference engine of a test: started, counted, hung, killed, started again.

Every kind is the program that its makers ship, as processes of their own, on loopback.
"""

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.programs.bench.processes import Processes
from tests.support.ports import free_ports
from tests.support.router_process import runs
from tests.support.stopped import stopped
from tests.support.until import until

MODEL = "tiny"
# With these fields of a request an answer is as long as it asks for.
EXACT: Mapping[str, object] = {"ignore_eos": True}
LOOPBACK = "127.0.0.1"


class Counts(NamedTuple):
    """What an engine's own page says; None where it has no such series."""

    running: float | None
    waiting: float | None
    kv_used_ratio: float | None


class RealEngine:
    """One of a kind. What differs between kinds is in its subclass."""

    kind: str  # as `mesh-agent run --engine-kind` names it
    agent_options: tuple[str, ...] = ()
    running: str  # series of its page
    waiting: str
    kv_used_ratio: str = ""
    batch_max: int  # most requests that it computes at once
    context_tokens: int
    start_within_s = 60.0
    exact: Mapping[str, object] = EXACT
    further_names: tuple[str, ...] = ()  # of its model
    ends_done = True  # whether its streams end with [DONE]
    listed_route = ""  # one that it has and the mesh's table of routes lacks
    kv_events = kv_events_replay = ""  # addresses, of one that publishes them

    def __init__(self, processes: Processes, name: str, directory: Path, api_key: str = "") -> None:
        """`api_key`: without it the engine answers nobody; empty: it asks for none."""
        self.name, self.api_key = name, api_key
        self.processes, self.directory = processes, directory
        [self.port] = free_ports(1)
        self.pids: list[int] = []  # of the sessions that its processes lead
        self._starts = 0

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"

    @property
    def headers(self) -> Mapping[str, str]:
        """With which its own API can be asked."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def start(self) -> None:
        """Start it, at the same address as ever, and return when it can answer. Raises Absent."""
        self._starts += 1
        self.pids = await self._start(f"{self.name}-{self._starts}")

    async def _start(self, log: str) -> list[int]:
        raise NotImplementedError

    def members(self) -> list[int]:
        """Its processes."""
        return [pid for leader in self.pids for pid in _session(leader)]

    def hanging_pid(self) -> int:
        """The process that computes."""
        return self.pids[0]

    @asynccontextmanager
    async def hung(self) -> AsyncIterator[None]:
        """What computes stands still, as a device or a lock that never comes back makes it."""
        async with stopped(self.hanging_pid()):
            yield

    async def kill(self) -> None:
        """End all its processes at once, as the kernel does when memory is short."""
        members = self.members()
        for leader in self.pids:
            os.killpg(leader, signal.SIGKILL)
        await until(lambda: not any(map(runs, members)))

    async def computes(self) -> bool:
        """Whether it computes anything now, by its own page."""
        return bool((await self.counts()).running)

    async def counts(self) -> Counts:
        """Its own page, read by another parser than the agent's."""
        timeout = aiohttp.ClientTimeout(total=10.0)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self.headers) as http,
            http.get(self.metrics_url) as answer,
        ):
            page = await answer.text()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return Counts(
            *(sums.get(name) for name in (self.running, self.waiting, self.kv_used_ratio))
        )


def _session(leader: int) -> list[int]:
    """The processes of the session that the process leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found
