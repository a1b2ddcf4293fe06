"""Prefill and decode on different engines, on a real nats-server with simulated engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import orjson
import pytest
from aiohttp import web
from multidict import CIMultiDict

from mesh.adapters.recorder import RecordTo
from mesh.core.model.served_names import prefill_name
from mesh.explain.files import in_recording
from mesh.explain.story import largest, parts, waited_s
from schemas.ids import ReplicaId
from schemas.kv_transfer import PARAMS_BYTES_MAX, KvRole, TransferKind
from tests.support.nats_pair import nats_pair
from tests.support.pairs import MODEL, PairEngine, add
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, SmallMesh, client, small_mesh, upload
from tests.support.until import PATIENCE_S

NIXL, SGLANG = TransferKind.NIXL, TransferKind.SGLANG
PREFILL, DECODE = KvRole.PREFILL, KvRole.DECODE
CHAT = "/v1/chat/completions"


def chat(topic: int, *, words: int = 400, max_tokens: int = 24, stream: bool = True) -> dict:
    text = " ".join(f"{topic}.{n}" for n in range(words))
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}
    return body | {"stamp": True, "ignore_eos": True}


class Fleet:
    """One region and its engines, by the names of their replicas."""

    def __init__(self, mesh: SmallMesh, engines: Mapping[str, PairEngine]) -> None:
        self.mesh, self.engines = mesh, engines

    async def ask(self, body: dict, region: str = "us") -> tuple[int, bytes, dict]:
        """Status, answer, and receipt."""
        async with client() as session:
            url = self.mesh.urls[region] + CHAT
            headers = {"x-mesh-debug": "1"}
            async with session.post(url, data=upload(body), headers=headers) as answer:
                receipt = orjson.loads(answer.headers.get("x-mesh-decision", "{}"))
                return answer.status, await answer.read(), receipt

    async def until_idle(self, *names: str) -> None:
        """No request and no kept KV cache takes memory of these engines."""
        for name in names or self.engines:
            engine = self.engines[name]
            await self.mesh.until(lambda: engine.busy == (0, 0), f"{name} to be free")  # noqa: B023

    async def until_ready(self, region: str = "us") -> None:
        """The region's router may give work to every replica."""
        prefills = [name for name, engine in self.engines.items() if engine.role is PREFILL]
        await self.mesh.until_ready(region, len(self.engines) - len(prefills), MODEL)
        for name in prefills:
            await self.until_prefill(name, MODEL, self.engines[name].kind, region)

    async def until_prefill(
        self, name: str, model: str, kind: TransferKind = NIXL, region: str = "us"
    ) -> None:
        table = self.mesh.routers[region].core.replicas
        work = prefill_name(model, kind)

        def is_ready() -> bool:
            replica = table.get(ReplicaId(name))
            return replica is not None and table.serves(replica, work)

        await self.mesh.until(is_ready, f"{name} to be ready")


@contextlib.asynccontextmanager
async def fleet(
    nats_server, engines: Mapping[str, PairEngine], **settings: object
) -> AsyncIterator[Fleet]:
    options = {"policy": "mesh"} | PATIENT | settings
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **options)
        for name, engine in engines.items():
            await add(mesh, "us", name, engine)
        scene = Fleet(mesh, engines)
        await scene.until_ready()
        yield scene


def pairs(kind: TransferKind, count: int, **options: object) -> dict[str, PairEngine]:
    found = {}
    for number in range(1, count + 1):
        found[f"p{number}"] = PairEngine(PREFILL, kind, **options)
        found[f"d{number}"] = PairEngine(DECODE, kind, **options)
    return found


def is_whole(answer: bytes, tokens: int = 24) -> bool:
    return answer.endswith(b"data: [DONE]\n\n") and answer.count(b"/") >= 2 * tokens


@pytest.mark.parametrize("kind", [NIXL, SGLANG])
async def test_a_pair_answers_and_both_engines_are_free_afterwards(nats_server, kind):
    async with fleet(nats_server, pairs(kind, 1), policy="round-robin") as scene:
        status, answer, receipt = await scene.ask(chat(1, words=3000))
        assert (status, is_whole(answer)) == (200, True), answer[-300:]
        assert (receipt["prefill"], receipt["replica"]) == ("p1", "d1")
        await scene.until_idle()
        assert scene.engines["p1"].served == scene.engines["d1"].served == 1
        status, answer, _ = await scene.ask(chat(1, words=3000, stream=False))
        usage = orjson.loads(answer)["usage"]
        assert (status, usage["completion_tokens"]) == (200, 24)


async def test_the_receipt_shows_what_both_replicas_of_a_pair_cost(nats_server):
    async with fleet(nats_server, pairs(SGLANG, 1)) as scene:
        _, _, receipt = await scene.ask(chat(1, words=3000))
        [chosen] = receipt["candidates"]
        assert (chosen["name"], chosen["prefill"]) == ("d1", "p1")
        assert {"queue_s", "prefill_s", "transfer_s", "decode_queue_s"} <= chosen["terms"].keys()
        assert sum(chosen["terms"].values()) == pytest.approx(chosen["seconds"], abs=1e-4)


@pytest.mark.parametrize("kind", [NIXL, SGLANG])
async def test_both_replicas_of_a_pair_are_in_the_life_of_a_request(nats_server, kind, tmp_path):
    path = tmp_path / "us.jsonl"
    settings = {"policy": "round-robin", "record": RecordTo(path=path)}
    async with fleet(nats_server, pairs(kind, 1), **settings) as scene:
        for number in range(10):  # that the prompt is computed may be heard after the answer
            _, _, receipt = await scene.ask(chat(number, words=3000))
            [life] = scene.mesh.routers["us"].requests.ended.find(receipt["request"]).requests
            assert (life.prefill_replica, life.served_by_replica) == ("p1", "d1")
            if life.prefill_s is not None:
                break
        shares = {part.name: part.seconds for part in parts(life)}
        assert sum(shares.values()) == pytest.approx(waited_s(life))
        assert largest(parts(life)).name == "prefill_s", shares
    [recorded] = in_recording(path, receipt["request"])
    assert (recorded.prefill_replica, recorded.served_by_replica) == ("p1", "d1")
    assert recorded.prefill_s == pytest.approx(life.prefill_s, abs=0.05)


async def test_a_short_prompt_is_answered_by_a_decode_replica_alone(nats_server):
    async with fleet(nats_server, pairs(NIXL, 1)) as scene:
        status, answer, receipt = await scene.ask(chat(1, words=3))
        assert (status, receipt["prefill"], receipt["replica"]) == (200, None, "d1")
        assert is_whole(answer) and scene.engines["p1"].served == 0


async def load(scene: Fleet, requests: int, killed: tuple[str, ...]) -> list[tuple[int, bytes]]:
    """Answers to so many requests at once; these engines end when a third of them has begun."""
    begun = 0
    some_begun = asyncio.Event()

    async def ask(topic: int) -> tuple[int, bytes]:
        nonlocal begun
        async with client() as session:
            body = upload(chat(topic, words=300, max_tokens=40))
            async with session.post(scene.mesh.urls["us"] + CHAT, data=body) as answer:
                first = await answer.content.readany()
                begun += 1
                if begun >= requests // 3:
                    some_begun.set()
                return answer.status, first + await answer.read()

    asking = [asyncio.create_task(ask(topic)) for topic in range(requests)]
    await some_begun.wait()
    for name in killed:
        await scene.engines[name].stop()
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*asking)


def check(answers: list[tuple[int, bytes]], tokens: int = 40) -> None:
    """Each is one whole answer of one attempt, or says that it was broken off after it began."""
    for status, answer in answers:
        assert status == 200, (status, answer[:300])
        if not is_whole(answer, tokens):
            assert answer.endswith(b"\n\n") and b'"error"' in answer[-600:], answer[-600:]
        stamps = [part.split(b'"')[0] for part in answer.split(b'"content":"')[1:]]
        attempts = {text.split(b"/")[1] for text in stamps if b"/" in text}
        assert len(attempts) == 1, "an answer is of one attempt"


async def test_one_member_of_each_role_dies_under_load_and_every_request_ends_once(nats_server):
    engines = pairs(NIXL, 2, time_scale=8.0, timeout_s=80.0)  # ten seconds here
    async with fleet(nats_server, engines, policy="round-robin") as scene:
        answers = await load(scene, 45, ("p1", "d1"))
        check(answers)
        # On a slow machine all that went to d1, every second one, may have begun.
        assert sum(is_whole(answer, 40) for _, answer in answers) >= 45 // 2
        assert not scene.mesh.routers["us"].core.inflight
        await scene.until_idle("p2", "d2")
        status, _, receipt = await scene.ask(chat(99, words=300))
        assert (status, receipt["prefill"], receipt["replica"]) == (200, "p2", "d2")


async def test_a_dead_sglang_pair_ends_in_a_clear_503(nats_server):
    engines = pairs(SGLANG, 1)
    async with fleet(nats_server, engines, hold_s_max=1.0) as scene:
        assert (await scene.ask(chat(1)))[0] == 200
        await engines["p1"].stop()
        core = scene.mesh.routers["us"].core
        await scene.mesh.until(lambda: core.models() == (), "the model to be gone")
        status, answer, _ = await scene.ask(chat(2, stream=False))
        assert status == 503 and b"no replica serves" in answer, answer
        await engines["p1"].start()
        await scene.mesh.until(lambda: core.models() != (), "the model to be back")
        assert (await scene.ask(chat(3)))[0] == 200


async def test_plain_replicas_serve_when_a_whole_role_is_gone(nats_server):
    engines = pairs(SGLANG, 1) | {"whole": PairEngine()}
    async with fleet(nats_server, engines, policy="round-robin") as scene:
        used = {(await scene.ask(chat(topic)))[2]["replica"] for topic in range(4)}
        assert used == {"d1", "whole"}
        await engines["d1"].stop()
        answers = [(await scene.ask(chat(topic)))[:2] for topic in range(4, 8)]
        assert all(status == 200 and is_whole(answer) for status, answer in answers), answers


@pytest.mark.parametrize("kind", [NIXL, SGLANG])
async def test_a_client_that_hangs_up_frees_both_engines(nats_server, kind):
    engines = pairs(kind, 1, time_scale=2.0, timeout_s=20.0)
    async with fleet(nats_server, engines, policy="round-robin") as scene:
        first, second = engines["p1"], engines["d1"]
        for at in (first, second):
            async with client() as session:
                body = upload(chat(1 if at is first else 2, words=3000, max_tokens=2000))
                asking = asyncio.create_task(session.post(scene.mesh.urls["us"] + CHAT, data=body))
                await scene.mesh.until(lambda: at.busy[0] > 0, "the stage to begin")  # noqa: B023
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await asking).close()
            await scene.until_idle()
        assert not scene.mesh.routers["us"].core.inflight


async def test_a_prompt_that_is_too_long_gets_the_engines_own_answer(nats_server):
    async with fleet(nats_server, pairs(NIXL, 1), policy="round-robin") as scene:
        status, answer, _ = await scene.ask(chat(1, words=300, max_tokens=10**7))
        assert status == 400 and b"context" in answer


async def test_a_large_body_reaches_both_stages(nats_server):
    async with fleet(nats_server, pairs(NIXL, 1), policy="round-robin") as scene:
        body = chat(1, words=300)
        body["metadata"] = {"much": "x" * 2_000_000}
        status, answer, receipt = await scene.ask(body)
        assert (status, is_whole(answer), receipt["prefill"]) == (200, True, "p1")


async def test_a_peers_request_is_answered_by_a_pair_straight_to_its_router(tmp_path):
    async with nats_pair(tmp_path, "us", "eu") as servers, small_mesh(servers) as mesh:
        await mesh.router("us", policy="skywalker", **PATIENT)
        await mesh.router("eu", policy="skywalker", **PATIENT)
        engines = pairs(NIXL, 1)
        for name, engine in engines.items():
            await add(mesh, "eu", name, engine)
        scene = Fleet(mesh, engines)
        await scene.until_ready("eu")
        await mesh.until_peer("us", "eu", MODEL)
        status, answer, receipt = await scene.ask(chat(1, words=300))
        assert (status, is_whole(answer), receipt["peer"]) == (200, True, "eu")
        assert engines["p1"].served == engines["d1"].served == 1
        await scene.until_idle()


P2P_ADDRESSES = {"p": "10.0.0.8:21001", "d": "10.0.0.9:22001"}


async def test_vllms_p2p_engines_get_one_request_id_with_both_addresses(nats_server):
    """Scripted engines: the agents' HTTP requests are what vLLM's own proxy sends."""
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": nats_server}) as mesh,
    ):
        second.behaviour = say("hel", "lo")
        await mesh.router("us", policy="mesh", **PATIENT)
        for name, engine, role in (("p", first, PREFILL), ("d", second, DECODE)):
            address = P2P_ADDRESSES[name]
            await mesh.agent("us", name, engine, role=role, kv_transfer="p2p", kv_address=address)
        await mesh.until_ready("us", 1)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        scene = Fleet(mesh, {})
        status, answer, _ = await scene.ask(body | {"max_tokens": 9})
        assert status == 200 and b"hel" in answer
        [prefill], [decode] = first.seen, second.seen
        assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
        assert (decode["max_tokens"], decode["stream"]) == (9, True)
        ids = [CIMultiDict(engine.headers[-1])["x-request-id"] for engine in (first, second)]
        assert ids[0] == ids[1]
        prefix = "___prefill_addr_10.0.0.8:21001___decode_addr_10.0.0.9:22001_"
        assert ids[0].startswith(prefix) and len(ids[0]) == len(prefix) + 32


@pytest.mark.parametrize("over", [0, 1])
async def test_what_a_prefill_engine_hands_out_reaches_the_decode_engine_up_to_its_limit(
    nats_server, over
):
    """Beyond it the decode engine, which can, computes the prompt itself."""
    empty = len(orjson.dumps({"remote_block_ids": ""}))
    params = {"remote_block_ids": "x" * (PARAMS_BYTES_MAX - empty + over)}

    async def hand_out(request: web.Request, body: dict) -> web.Response:
        return web.json_response({"choices": [], "kv_transfer_params": params})

    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        small_mesh({"us": nats_server}) as mesh,
    ):
        first.behaviour, second.behaviour = hand_out, say("hello")
        await mesh.router("us", policy="round-robin", **PATIENT)
        for name, engine, role in (("p", first, PREFILL), ("d", second, DECODE)):
            await mesh.agent("us", name, engine, role=role, kv_transfer="nixl")
        scene = Fleet(mesh, {})
        await mesh.until_ready("us", 1)
        await scene.until_prefill("p", "tiny")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        status, answer, _ = await scene.ask(body)
        assert (status, len(first.seen)) == (200, 1) and b"hello" in answer
        assert second.seen[-1]["kv_transfer_params"] == (None if over else params)
