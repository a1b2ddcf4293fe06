"""Clients, a batch job and an operator while the processes of a fleet are replaced one by one."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from schemas.http import H_DEBUG, H_DECISION, H_REGION, H_REQUEST_ID, H_RESIDENCY, H_TIMEOUT_S
from tests.programs.batch_jobs.job import JobClient, input_file
from tests.programs.fault_run.clients import Clients, Request, Router
from tests.programs.fault_run.reading import End
from tests.upgrade.fleet import Fleet, Unit, Version

STREAMS = 5
TOKENS = (4, 300)  # up to some seconds of an answer
MET = 8  # requests that end in every mix of versions
WITHIN_S = 180.0
JOB_LINES, LINE_TOKENS = 4000, 160
# A router counts what it can't read, and drops it.
DROPPED = ("mesh_gossip_dropped", "mesh_leases_dropped", "mesh_replies_dropped")


class Mix(NamedTuple):
    """A part of the upgrade between two changes of version, and the requests that ended in it."""

    name: str
    at_s: float  # since the load began
    requests: int
    forwarded: int


class Rolling:
    """A fleet under load."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self.fleet, self.model = fleet, model
        self._http = aiohttp.ClientSession()
        routers = [Router(name, f"http://{at}") for name, at in fleet.http.items()]
        self._clients = Clients(routers, model, seed=1, tokens=TOKENS, leave_draining=True)
        self.mixes: list[Mix] = []
        self.problems: list[str] = []
        self._accounted = 0
        self._began = time.monotonic()
        self._job: str | None = None
        self._job_began = 0.0
        self._jobs = JobClient(f"http://{fleet.http['router-us-r1']}")

    @property
    def turned_away(self) -> int:
        """Times that a router was being stopped and a client went on to the next."""
        return self._clients.turned_away

    @property
    def requests(self) -> list[Request]:
        """Those that have ended."""
        return self._clients.requests

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Streams and plain requests to all routers in turn, until the block ends."""
        stop = asyncio.Event()
        asking = asyncio.create_task(self._clients.ask_until(stop, STREAMS))
        try:
            yield
        finally:
            stop.set()
            await asking
            await self._http.close()
            await self._jobs.openai.close()

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """`holds` may be a coroutine function."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            assert time.monotonic() < deadline, f"{what}: not within {WITHIN_S:g} s"
            await asyncio.sleep(0.1)

    async def meet(self, name: str) -> None:
        """Let clients at this mix of versions: requests that begin now, and end."""
        began = asyncio.get_running_loop().time()
        since = len(self.requests)
        await self.until(
            lambda: sum(one.began > began for one in self.requests[since:]) >= MET, name
        )
        self.account(name)

    def account(self, name: str) -> None:
        """What has ended since the last time ended in this mix."""
        ended = self.requests[self._accounted :]
        self._accounted = len(self.requests)
        at_s = time.monotonic() - self._began
        self.mixes.append(Mix(name, at_s, len(ended), sum(map(is_forwarded, ended))))
        for one in ended:
            if one.end is not End.WHOLE or one.violations:
                self.problems.append(
                    f"{name}: request {one.number} to {one.router}: {one.end} {one.detail} "
                    f"after {one.seconds:.1f} s: {'; '.join(one.violations)}"
                )

    async def change(self, name: str, version: Version) -> None:
        """Replace one process under load."""
        unit = self.fleet[name]
        await self.note_dropped(unit)
        await self.fleet.change(unit, version)
        await self.meet(f"{name} is {version.number}")

    async def stop(self, name: str) -> None:
        unit = self.fleet[name]
        await self.note_dropped(unit)
        await self.fleet.stop(unit)

    async def note_dropped(self, unit: Unit) -> None:
        """Messages of others that this router could not read."""
        if unit.name in self.fleet.http and unit.process is not None:
            found = {name: await self.metric(unit.name, name) for name in DROPPED}
            self.problems += [f"{unit.name}: {name} {n:g}" for name, n in found.items() if n]

    async def metric(self, router: str, family: str, **labels: str) -> float:
        """The sum of a router's samples of that family and those labels."""
        async with self._http.get(f"http://{self.fleet.http[router]}/metrics") as answer:
            text = await answer.text()
        return sum(
            sample.value
            for found in text_string_to_metric_families(text)
            if found.name == family
            for sample in found.samples
            if labels.items() <= sample.labels.items() and not sample.name.endswith("_created")
        )

    async def ask(
        self, router: str, text: str, *, request_id: str = "", label: str = ""
    ) -> dict[str, Any]:
        """The receipt of one plain request, which is served where that label is carried."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
        }
        given = {H_DEBUG: "1", H_REQUEST_ID: request_id, H_RESIDENCY: label}
        headers = {name: value for name, value in given.items() if value}
        url = f"http://{self.fleet.http[router]}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            receipt: dict[str, Any] = orjson.loads(answer.headers[H_DECISION])
            return receipt

    async def serves(self, router: str, region: str) -> bool:
        """Whether a request that may be served in that region alone is answered there."""
        body = {"model": self.model, "prompt": "here?", "max_tokens": 4}
        url = f"http://{self.fleet.http[router]}/v1/completions"
        headers = {H_RESIDENCY: region, H_TIMEOUT_S: "5"}  # or it would be held for a minute
        async with self._http.post(url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status == 200 and answer.headers[H_REGION] == region

    async def knows(self, router: str, text: str, place: str, *, label: str = "") -> bool:
        """Whether a router believes that this replica or region holds the prompt."""
        receipt = await self.ask(router, text, label=label)
        return any(
            one["name"] == place and (one["matched_tokens"] or 0) > 0
            for one in receipt["candidates"]
        )

    async def submit_job(self) -> None:
        """A batch job whose lines take a while."""
        data = input_file(self.model, JOB_LINES, output_tokens=LINE_TOKENS)
        batch = await self._jobs.submit(data)
        self._job, self._job_began = batch.id, time.monotonic()

    async def job_progress(self) -> float:
        """Which part of the job is done."""
        assert self._job is not None
        counts = (await self._jobs.get(self._job)).request_counts
        assert counts is not None
        return counts.completed / JOB_LINES

    async def job_problems(self) -> list[str]:
        """Wait for the job's end: why not every line was answered exactly once."""
        assert self._job is not None
        answers = await self._jobs.answers(self._job, self._job_began, 600.0)
        return answers.problems(JOB_LINES)


def is_forwarded(request: Request) -> bool:
    """Whether another region's replica answered."""
    region = request.router.split("-")[1]
    return bool(request.served_in) and request.served_in != region


def regions_of(requests: list[Request]) -> Counter[tuple[str, str]]:
    """How many, by the region that was asked and the one that answered."""
    return Counter((one.router.split("-")[1], one.served_in) for one in requests)
