"""A nats-server that goes and comes back under load: what is waiting, begun, or arriving."""

import asyncio
from collections import Counter

import pytest

from tests.support.scripted_engine import event, opened
from tests.support.small_mesh import chat, post, set_all

pytestmark = [pytest.mark.timeout(90), pytest.mark.drill]


class Story:
    """Each answer names its request and its try, so that no two can be mixed unseen."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.tries: Counter[str] = Counter()

    async def __call__(self, request, body):
        name = body["messages"][0]["content"]
        self.tries[name] += 1
        told = f"{name}, try {self.tries[name]}"
        stream = await opened(request)
        if name.startswith("started"):
            await stream.write(event(f"{told} begins"))
        await self.gate.wait()
        await stream.write(event(f"{told} ends") + b"data: [DONE]\n\n")
        return stream

    def ends(self, name: str) -> list[bytes]:
        """What the end of an answer looks like, for each try."""
        tries = range(1, self.tries[name] + 1)
        return [event(f"{name}, try {n} ends") + b"data: [DONE]\n\n" for n in tries]


async def test_a_nats_server_restarted_under_load_loses_no_request(one, nats_server):
    """Engines end during the outage; longer and other ones: `tests/mesh/session/test_ring.py`."""
    story = Story()
    set_all(one, story)
    requests = one.routers["us"].requests

    def ask(*names: str) -> dict[str, asyncio.Task]:
        asks = {name: post(one, chat(name, stream=True)) for name in names}
        return {name: asyncio.create_task(asked) for name, asked in asks.items()}

    started = ask("started 1", "started 2")
    waiting = ask("waiting 1", "waiting 2", "waiting 3")
    await one.until(lambda: len(story.tries) == 5, "all to be under way")
    await one.until(
        lambda: one.sample("us", "mesh_request_ttft_seconds_count", served="local") == 2,
        "two answers to have begun",
    )
    await nats_server.stop()
    await one.until(lambda: requests.not_ready_because() is not None, "the router to notice")
    arriving = ask("arriving 1", "arriving 2")
    await one.until(lambda: requests.open_requests == 7, "all to have arrived")
    story.gate.set()
    await nats_server.start()
    for name, task in (waiting | arriving).items():
        status, body, _ = await task
        assert (status, body in story.ends(name)) == (200, True), body
    for name, task in started.items():
        status, body, _ = await task  # not cut: that would raise
        begins = event(f"{name}, try 1 begins")
        assert (status, body[: len(begins)]) == (200, begins)
        assert body[len(begins) :] == story.ends(name)[0]
    assert (await post(one, chat()))[0] == 200
