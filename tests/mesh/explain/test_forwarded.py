"""A forwarded request that was held at the peer, explained over real, rendered buses."""

import asyncio
import re
import shutil
from contextlib import asynccontextmanager

import orjson
import pytest

from infra.topology import parse
from mesh.doctor.logins import read_logins
from mesh.explain.question import ask_all
from mesh.explain.story import stories
from mesh.explain.text import story_lines
from schemas import subjects
from schemas.explain import RequestQuestion, decode_answer, encode_question
from tests.support.flushed import flushed
from tests.support.mesh_command import mesh_command
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import hang, scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh

LONG = "word " * 60_000  # seconds of work, by what a router believes at start
ASKED = RequestQuestion(request="held-1")
QUESTION = encode_question(ASKED)
PATIENCE_S = 15.0
SILENT_S = 2.0


@asynccontextmanager
async def held_at_peer(directory):
    """us has no replica; its request waited in eu until eu's only one was free."""
    text = mesh_toml(("us", "eu"), replicas=1)
    (directory / "mesh.toml").write_text(text)
    regions = NatsRegions(parse(text, "mesh.toml"), directory / "rendered")
    try:
        await regions.start()
        async with scripted_engine() as far, small_mesh(regions) as mesh:
            mesh.engines = (far,)
            await mesh.router("us", **PATIENT)
            await mesh.router("eu", **PATIENT)
            await mesh.agent("eu", "eu-0", far)
            await mesh.until_ready("eu", 1)
            await mesh.until_peer("us", "eu")
            gate = asyncio.Event()
            far.behaviour = hang(gate=gate)
            long = asyncio.create_task(post(mesh, chat(LONG, stream=True), "eu"))
            await far.arrived.wait()
            mine = asyncio.create_task(post(mesh, chat(stream=True), **{"x-request-id": "held-1"}))
            core = mesh.routers["eu"].core
            await mesh.until(lambda: len(core.held) == 1, "the request to wait in eu")
            logins = read_logins(regions.topology, directory / "rendered")
            mesh.waiting = await ask_all(regions.topology, logins, ASKED, PATIENCE_S)
            gate.set()
            assert (await mine)[0] == 200
            await long
            yield regions, mesh
    finally:
        await regions.stop()


async def explained(directory, credentials, *given):
    """Status, output and errors of `mesh explain`."""
    return await mesh_command(
        *("explain", *given, "--config", directory / "mesh.toml", "--within-s", PATIENCE_S),
        *("--credentials", directory / credentials),
    )


async def test_it_is_explained_from_either_side(tmp_path):
    async with held_at_peer(tmp_path) as (regions, mesh):
        assert [one.problem for one in mesh.waiting] == [None, None]
        lives = [life for one in mesh.waiting for each in one.answers for life in each.requests]
        [story] = stories(lives)
        text = "\n".join(story_lines(story))
        assert "It is under way." in text
        assert "forwarded to eu" in text and "arrived from us" in text

        status, text, errors = await explained(tmp_path, "rendered", "held-1")
        assert (status, errors) == (0, "")
        assert re.search(r"Most of its [0-9.]+ s to the first token: [0-9.]+ s ", text)
        assert re.search(r"[0-9.]+ s  waiting in eu's hold queue", text)
        assert "eu placed it on eu-0 after" in text
        assert "handed to eu-0, which answers us directly" in text
        assert "ended: 200, ok" in text
        assert re.search(r"eu-0 +[0-9.]+ s = .*base [0-9.]+.*: chosen", text)

        status, found, _ = await explained(tmp_path, "rendered", "held-1", "--json")
        [one] = orjson.loads(found)["requests"]
        asked, [at_peer] = one["asked"], one["at_peers"]
        assert status == 0
        assert (asked["region"], asked["served_by_replica"]) == ("us", "eu-0")
        assert asked["parts"]["peer_held_s"] == pytest.approx(asked["peer_held_s"], abs=1e-5)
        assert asked["peer_held_s"] > 0.0
        assert asked["parts"][asked["largest"]] == max(asked["parts"].values())
        assert sum(asked["parts"].values()) == pytest.approx(asked["waited_s"], abs=1e-4)
        assert (at_peer["region"], at_peer["origin"], at_peer["outcome"]) == ("eu", "us", "placed")
        held, made = [step["decision"] for step in at_peer["steps"] if step["decision"]]
        assert held["placement"] == "hold"
        assert f"held (policy mesh): {held['reason']}" in text
        assert made["held_s"] == pytest.approx(asked["peer_held_s"], abs=1e-3)
        assert [each["name"] for each in made["candidates"]] == ["eu-0", "us"]

        shutil.copytree(tmp_path / "rendered" / "eu", tmp_path / "only-eu" / "eu")
        status, text, errors = await explained(tmp_path, "only-eu", "held-1")
        assert status == 0
        assert "Its client asked us" in text
        assert "handed to eu-0" in text
        assert "us was not asked in full: no credentials" in errors

        status, text, _ = await explained(tmp_path, "rendered", "nobody-s")
        assert status == 1
        assert re.search(r"us/r1: 1 requests kept, back to \d{4}-", text)
        assert re.search(r"eu/r1: 2 requests kept, back to \d{4}-", text)

        status, text, _ = await explained(tmp_path, "rendered", "--slowest", "1")
        assert status == 0
        assert len(text.splitlines()) == 1

        await requests_of_one_id_are_listed(tmp_path, mesh)
        await nobody_else_may_ask(regions)


async def requests_of_one_id_are_listed(directory, mesh):
    """Three at once, while they are under way and when they have ended."""
    gate, [engine] = asyncio.Event(), mesh.engines
    engine.behaviour, engine.seen = hang(gate=gate), []
    name = {"x-request-id": "again"}
    asking = [asyncio.create_task(post(mesh, chat(stream=True), **name)) for _ in range(3)]
    await mesh.until(lambda: len(engine.seen) == len(asking), "all at the engine")
    for is_over in (False, True):
        if is_over:
            gate.set()
            assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 3
        status, text, errors = await explained(directory, "rendered", "again")
        assert (status, errors) == (0, "")
        [_, others] = text.split("\n2 other requests had this id (all of each: --json):\n")
        assert len([line for line in others.splitlines() if " again " in line]) == 2, others
        _, found, _ = await explained(directory, "rendered", "again", "--json")
        each = [
            (
                one["asked"]["region"],
                one["asked"]["outcome"],
                [at["region"] for at in one["at_peers"]],
            )
            for one in orjson.loads(found)["requests"]
        ]
        assert each == [("us", "ok" if is_over else "open", ["eu"])] * 3


async def nobody_else_may_ask(regions):
    """Agents, routers, and people of another region get no answer."""
    for region, user in (("us", "agent-us-0"), ("us", "router"), ("eu", "operator")):
        client = await regions.connect(region, user)
        inbox = f"_INBOX.{region}.r9.mine" if user == "router" else client.new_inbox()
        got = []

        async def take(msg, got=got):
            got.append(msg)

        await client.subscribe(inbox, cb=take)
        await client.publish(subjects.requests("us"), QUESTION, reply=inbox)
        operator = await regions.connect("us", "operator")
        answer = await operator.request(subjects.requests("us"), QUESTION, timeout=SILENT_S * 5)
        assert decode_answer(answer.data).requests  # the later question is answered
        await flushed(client)
        assert [msg for msg in got if not msg.headers] == [], (region, user)
        await client.close()
        await operator.close()
