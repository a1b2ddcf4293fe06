"""What is hot in one region is warmed in another that asks for it: real servers, links and agents.

us and eu have a simulated engine each, which computes prompts in their time and caches them.
Clients of eu come with prompts of their own, so that its demand rises and its speed is known; then
those of us, who share a long beginning.
"""

import contextlib
import random

import orjson
import pytest

from infra.topology import parse
from mesh.core.model.prompt import BLOCK_BYTES
from schemas import exchange, subjects
from tests.agents.simserver.support import config, running
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.small_mesh import PATIENT, chat, post, small_mesh
from tests.support.taps import add_tap, connected
from tests.support.until import until

pytestmark = pytest.mark.timeout(120)

MODEL = "tiny"
SHARED = "You are the product, and this is its manual. " * 160  # 7,200 bytes
ASKS_MAX, ASKS_AT_A_TIME = 200, 10
QUIET_S = 1.0  # ten heartbeats and digests


def asked(text: str) -> dict:
    options = {"include_usage": True}
    return chat(text, stream=True, stream_options=options, max_tokens=2, ignore_eos=True)


def usage(body: bytes) -> tuple[int, int]:
    """Prompt tokens, and how many of them the engine held."""
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if b'"usage"' in line]
    told = orjson.loads(events[-1])["usage"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


async def ask(mesh, region: str, text: str) -> tuple[int, int]:
    status, body, headers = await post(mesh, asked(text), region)
    assert (status, headers["x-mesh-region"]) == (200, region)
    return usage(body)


async def comes_to_take(mesh) -> bool:
    """Whether us hears, while nobody asks for anything, that eu would take warm-ups."""
    peer = mesh.routers["us"].core.peers.get("eu")
    with contextlib.suppress(TimeoutError):
        await until(
            lambda: any(digest.warm_tokens for digest in peer.digests.values()),
            deadline_s=QUIET_S,
        )
        return True
    return False


@pytest.fixture
async def two(tmp_path):
    mesh_file = parse(mesh_toml(("us", "eu"), replicas=1), "mesh.toml")
    regions = NatsRegions(mesh_file, tmp_path, edit=lambda _, tree: add_tap(tree))
    engine = config(models=(MODEL,), time_scale=20.0)
    try:
        await regions.start()
        async with running(engine) as near, running(engine) as far, small_mesh(regions) as mesh:
            # Everybody's clients are served at home: nothing else brings a prompt to eu.
            proactive = {"policy": "skywalker", "warm_idle_share": 1.0, "warm_trend_s": 30.0}
            proactive |= PATIENT
            for region, beside in (("us", near), ("eu", far)):
                await mesh.router(region, ground=regions.topology.ground, **proactive)
                await mesh.agent(region, f"{region}-0", beside)
                await mesh.until_ready(region, 1, MODEL)
            await mesh.until_peer("us", "eu", MODEL)
            mesh.regions = regions
            yield mesh
    finally:
        await regions.stop()


async def test_what_is_hot_here_is_computed_there_and_found_by_who_comes_there(two):
    dice = random.Random(7)
    tap = await connected(two.regions, "eu")
    two.stack.push_async_callback(tap.close)
    work = await tap.subscribe(subjects.work("eu", "eu-0"))
    await flushed(tap)
    us, eu = (two.routers[region].core.warming for region in ("us", "eu"))
    asked_there = 0
    while not await comes_to_take(two):
        assert asked_there < ASKS_MAX
        for _ in range(ASKS_AT_A_TIME):
            await ask(two, "eu", dice.randbytes(dice.randrange(200, 4000)).hex())
            asked_there += 1
    while not us.hot.kept_bytes:
        assert us.counts.begun == 0
        await ask(two, "us", SHARED + dice.randbytes(64).hex())
    await two.until(lambda: us.counts.ended == 1, "the warm-up")
    assert (us.counts.failed, eu.counts.peer_requests, eu.counts.begun) == (0, 1, 0)

    seen = [await work.next_msg(timeout=20) for _ in range(asked_there + 1)]
    [warmed] = [msg for msg in seen if exchange.H_WARM in msg.headers]
    assert (warmed.headers[exchange.H_WARM], warmed.headers[exchange.H_ORIGIN]) == ("1", "us")
    body = orjson.loads(warmed.data)
    assert body["max_tokens"] == 1
    text = body["messages"][0]["content"]
    assert SHARED.startswith(text) and len(text) > len(SHARED) - BLOCK_BYTES
    assert two.sample("eu", "mesh_warmed_tokens_total") > 0

    tokens, cached = await ask(two, "eu", SHARED + dice.randbytes(64).hex())
    assert cached > 0.9 * tokens
    assert two.sample("eu", "mesh_requests_total", outcome="ok") == asked_there + 1
