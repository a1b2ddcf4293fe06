"""A router writes one line for every request that has ended, whatever became of it."""

import asyncio
import contextlib

import pytest

from mesh.adapters.access_log import AccessLogFormat
from mesh.explain.files import in_log
from mesh.explain.story import parts, stories, waited_s
from mesh.http.http_request import Answer, HttpRequest
from mesh.http.server import HttpTimes
from schemas.exchange import BODY_BYTES_MAX
from tests.support.access_lines import Lines
from tests.support.scripted_engine import fail, hang, say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, post, small_mesh
from tests.support.until import PATIENCE_S

CHAT = "/v1/chat/completions"
TIMES = HttpTimes(headers_s=0.5)


async def raw(mesh, data: bytes, *, finish: bool = True) -> bytes:
    """What comes back for these bytes; hangs up after them instead unless `finish`."""
    port = mesh.routers["us"].http_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    if not finish:
        writer.close()
        return b""
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return answer


def head(path: str, name: str, size: int, *more: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"x-request-id: {name}", f"content-length: {size}")
    return "\r\n".join((*lines, *more, "", "")).encode()


@pytest.fixture
async def mesh(nats_server):
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        limits = {"http_times": TIMES, "access_log": AccessLogFormat.LOGFMT}
        await mesh.router("us", **limits, **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        mesh.engines = (engine,)
        yield mesh


async def test_every_end_of_a_request_has_its_line(mesh, capfd, tmp_path):
    lines = Lines(capfd)

    status, body, _ = await post(mesh, chat(stream=True), **{"x-request-id": "fine"})
    line = await lines.of(id="fine")
    assert status == 200
    assert (line["outcome"], line["status"], line["route"]) == ("ok", "200", CHAT)
    assert (line["region"], line["replica"], line["placement"]) == ("us", "us-0", "local")
    assert (line["attempts"], line["hops"], line["model"]) == ("1", "0", "tiny")
    assert int(line["bytes"]) == len(body)
    assert 0.0 <= float(line["ttft_s"]) <= float(line["duration_s"])

    await post(mesh, chat(), **{"x-request-id": "plain"})
    assert "ttft_s" not in await lines.of(id="plain")

    _, _, headers = await post(mesh, chat(), **{"x-request-id": 'bad "id'})
    assert headers["x-request-id"] != 'bad "id'  # as before: one that is not fit is replaced
    await lines.of(id=headers["x-request-id"])

    status, body, _ = await post(mesh, chat(model='no "pe='), **{"x-request-id": "m"})
    line = await lines.of(id="m")
    assert (line["status"], line["error"], line["model"]) == ("404", "model_not_found", 'no "pe=')
    assert int(line["bytes"]) == len(body)

    answer = await raw(mesh, head(CHAT, "json", 5, "connection: close") + b"{nope")
    line = await lines.of(id="json")
    assert b" 400 " in answer and (line["status"], line["outcome"]) == ("400", "refused")

    path = tmp_path / "us.log"
    path.write_text(f"noise\n{lines.text}")
    [story] = stories(in_log(path, "fine"))
    assert story.asked is not None
    total_s = sum(part.seconds for part in parts(story.asked))
    assert total_s == pytest.approx(waited_s(story.asked), abs=1e-6)


async def test_requests_that_are_no_work_have_theirs(mesh, capfd):
    lines = Lines(capfd)
    url = mesh.urls["us"]
    async with client() as session:
        with_key = {"x-request-id": "lost", "authorization": "Bearer sk-secret"}
        async with session.get(f"{url}/nowhere?key=sk-query", headers=with_key) as gone:
            assert gone.status == 404
        line = await lines.of(id="lost")
        assert (line["method"], line["route"], line["error"]) == (
            "GET",
            "/nowhere",
            "path_not_found",
        )
        async with session.get(f"{url}/v1/models", headers={"x-request-id": "models"}) as models:
            size = len(await models.read())
        assert (await lines.of(id="models"))["bytes"] == str(size)
        async with session.get(f"{url}/v1/files/file-1", headers={"x-request-id": "f"}) as file:
            assert file.status >= 400
        assert (await lines.of(id="f"))["route"] == "/v1/files/{file_id}"
        async with session.get(f"{url}/health", headers={"x-request-id": "probe"}) as health:
            assert health.status == 200

    large = head(CHAT, "large", BODY_BYTES_MAX + 1)
    assert b" 413 " in await raw(mesh, large)
    assert (await lines.of(id="large"))["error"] == "body_too_large"

    assert b" 431 " in await raw(mesh, b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000)
    assert (await lines.of(status="431"))["route"] == "-"

    await raw(mesh, head(CHAT, "half", 100) + b"{", finish=False)
    line = await lines.of(id="half")
    assert (line["status"], line["outcome"]) == ("499", "client_gone")

    await raw(mesh, head(CHAT + "/", "half-2", 100) + b"{", finish=False)  # read by a handler
    assert (await lines.of(id="half-2"))["outcome"] == "client_gone"

    assert not {"sk-secret", "sk-query", "hello", "probe"} & set(
        lines.text.replace("=", " ").split()
    )


async def test_failed_late_and_left_requests_have_theirs(mesh, capfd):
    lines = Lines(capfd)
    [engine] = mesh.engines
    gate = asyncio.Event()
    engine.behaviour = hang(gate=gate)
    busy = asyncio.create_task(post(mesh, chat(stream=True), **{"x-request-id": "left"}))
    await engine.arrived.wait()
    busy.cancel()
    line = await lines.of(id="left")
    assert (line["status"], line["outcome"], line["replica"]) == ("499", "client_gone", "us-0")

    timeout = {"x-request-id": "late", "x-mesh-timeout-s": "0.2"}
    status, _, _ = await post(mesh, chat(stream=True), **timeout)
    line = await lines.of(id="late")
    assert line["status"] == str(status) and status >= 500
    assert (line["outcome"], line["error"]) == ("failed", "deadline_exceeded")
    gate.set()

    engine.behaviour = fail(500)
    status, body, _ = await post(mesh, chat(), **{"x-request-id": "broken"})
    line = await lines.of(id="broken")
    assert (line["status"], line["bytes"]) == (str(status), str(len(body)))
    assert line["outcome"] == "failed"


@pytest.mark.parametrize(("timeout_s", "outcome"), [("600", "client_gone"), ("0.5", "failed")])
async def test_one_that_ends_in_the_hold_queue_was_held_until_then(
    nats_server, capfd, timeout_s, outcome
):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", access_log=AccessLogFormat.LOGFMT, **PATIENT)
        core = mesh.routers["us"].core
        headers = {"x-request-id": "held", "x-mesh-timeout-s": timeout_s}
        asking = asyncio.create_task(post(mesh, chat(stream=True), **headers))
        await mesh.until(lambda: len(core.held) == 1, "it is held")
        if outcome == "client_gone":
            await asyncio.sleep(0.3)
            asking.cancel()
        line = await Lines(capfd).of(id="held")
        assert (line["outcome"], line["placement"]) == (outcome, "hold")
        assert 0.2 < float(line["held_s"]) <= float(line["duration_s"])
        await asyncio.wait([asking])


@pytest.mark.parametrize(("timeout_s", "outcome"), [("600", "client_gone"), ("6", "failed")])
async def test_one_whose_replica_was_lost_waits_in_the_queue_and_says_so(
    nats_server, capfd, timeout_s, outcome
):
    async with (
        scripted_engine() as engine,
        scripted_engine() as full,
        small_mesh({"us": nats_server}) as mesh,
    ):
        await mesh.router("us", policy="least-load", access_log=AccessLogFormat.LOGFMT)
        core, full.waiting = mesh.routers["us"].core, 9
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        gate = asyncio.Event()
        engine.behaviour = hang(gate=gate)
        headers = {"x-request-id": "lost", "x-mesh-timeout-s": timeout_s}
        asking = asyncio.create_task(post(mesh, chat(stream=True), **headers))
        await engine.arrived.wait()
        await mesh.agent("us", "us-1", full)
        await mesh.until(lambda: len(core.replicas) == 2, "another one that may serve it later")
        await mesh.kill_agent("us-0")
        await mesh.until(lambda: len(core.held) == 1, "it is held again")
        if outcome == "client_gone":
            await asyncio.sleep(0.3)
            asking.cancel()
        line = await Lines(capfd).of(id="lost")
        gate.set()
        [life] = mesh.routers["us"].requests.ended.find("lost").requests
        await asyncio.wait([asking])
    assert (line["outcome"], line["placement"]) == (outcome, "local")
    assert 0.2 < float(line["held_s"]) < float(line["duration_s"])
    assert [step.what for step in life.steps] == ["decided", "failed"]
    assert "us-0 was lost" in life.steps[-1].detail
    assert {part.name for part in parts(life)} == {"held_s", "earlier_attempts_s"}


async def test_json_lines_and_one_of_a_request_that_is_shed(nats_server, capfd):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", access_log=AccessLogFormat.JSON, hold_s_max=0.2)
        url = mesh.urls["us"] + "/v1/regions?near=1,1"
        async with client() as session, session.get(url) as answer:
            name = answer.headers["x-request-id"]
        lines = Lines(capfd)
        line = await lines.of(id=name)
        assert (line["status"], line["route"], line["router"]) == (200, "/v1/regions", "us/r1")

        async with client() as session:
            for name in ("unready", "unready-2", "unready-3"):
                headers = {"x-request-id": name}
                async with session.get(mesh.urls["us"] + "/ready", headers=headers) as ready:
                    assert ready.status == 503
        kept = mesh.routers["us"].requests.ended
        assert kept.find("unready").requests and not kept.find("unready-2").requests

        status, _, _ = await post(mesh, chat(), **{"x-request-id": "shed"})  # nobody is there
        line = await lines.of(id="shed")
        assert (line["status"], line["outcome"], line["placement"]) == (status, "shed", "shed")
        assert status in (429, 503) and line["held_s"] > 0.0 and line["error"]
        assert (await lines.of(id="unready"))["error"] == "no_replica"
        assert "unready-2" not in lines.text and "unready-3" not in lines.text


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_mistake_of_the_routers_own_ends_the_request_that_met_it(
    mesh, capfd, monkeypatch, is_placed
):
    lines, requests = Lines(capfd), mesh.routers["us"].requests
    [engine] = mesh.engines
    engine.behaviour = hang()
    [broken, name] = (
        [requests.copies, "of"] if is_placed else [requests._core.state.placer, "place"]
    )

    def breaks(*args: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(broken, name, breaks)
        status, body, _ = await post(mesh, chat(stream=True), **{"x-request-id": "broken"})
    assert (status, b"internal_error" in body) == (500, True)
    line = await lines.of(id="broken")
    assert (line["outcome"], line["status"]) == ("failed", "500")
    assert requests.open_requests == 0
    engine.behaviour = say("hello")
    status, _, _ = await post(mesh, chat())
    assert status == 200


async def test_an_answer_of_a_handler_that_breaks_has_its_line(mesh, capfd, monkeypatch):
    async def breaks(request: HttpRequest, known_id: str) -> Answer:
        request.begin(Answer(200, {}, b"half"), length=8)
        raise RuntimeError("broken")

    [api, *_] = mesh.routers["us"]._apis
    monkeypatch.setitem(api._by_path["/v1/models"], "GET", breaks)
    with contextlib.suppress(ConnectionError):  # what was written may be lost with a cut
        await raw(mesh, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: half\r\n\r\n")
    line = await Lines(capfd).of(id="half")
    assert (line["status"], line["error"], line["bytes"]) == ("500", "internal_error", "4")
