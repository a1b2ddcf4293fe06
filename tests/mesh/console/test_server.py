"""The console over real buses: what it shows, what it refuses, and what it writes with the key."""

import asyncio
import contextlib
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from infra.address import Address
from infra.process import end_all
from infra.topology import parse
from mesh.adapters.operator_orders import ORDERS
from mesh.console import connections, server, viewing
from mesh.console.config import ConsoleConfig
from mesh.console.connections import CONNECTIONS_MAX
from mesh.console.server import BODY_BYTES_MAX, HEADERS, Console
from mesh.core.model.settings import RouterSettings
from mesh.doctor.logins import Logins, read_logins
from schemas import subjects
from schemas.control import RegionControl
from schemas.explain import RequestLife, RouterRequests, decode_question, encode_answer
from schemas.ids import RegionId, RouterId
from schemas.state import encode_state
from tests.mesh.top.test_fleet import beat, digest
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S, until

KEY = "a-key-of-a-test-0123456789"
HOSTILE = '<img src=x onerror="alert(1)">\u202e'
BEARER = {"authorization": f"Bearer {KEY}"}


class State:
    """Of us: one replica and a router that answers questions, with hostile names in both."""

    def __init__(self, regions):
        self._regions, self._seq, self._clients = regions, 0, []
        self._task = asyncio.create_task(self._publish())

    async def _publish(self):
        agent = await self._regions.connect("us", "agent-us-0")
        router = await self._regions.connect("us", "router")
        self._clients += [agent, router]

        async def answer(msg):
            question = decode_question(msg.data)
            life = RequestLife(request=HOSTILE, region="us", router="r1", route="/v1/x", status=500,
                               outcome="failed", model=HOSTILE, arrived_at=1.0, ended_at=2.0,
                               detail=HOSTILE)  # fmt: skip
            lives = (life,) if question.recent or question.request == HOSTILE else ()
            found = RouterRequests(region="us", router="r1", kept=1, requests=lives, counted_s=60.0)
            await msg.respond(encode_answer(found))

        await router.subscribe(subjects.requests("us"), cb=answer)
        while True:
            self._seq += 1
            if agent.is_connected and router.is_connected:
                heartbeat = replace(beat("us-0", seq=self._seq), engine=HOSTILE)
                await agent.publish(subjects.heartbeat("us", "us-0"), encode_state(heartbeat))
                await router.publish(
                    subjects.digest("us"), encode_state(digest("us", seq=self._seq))
                )
            await asyncio.sleep(0.05)

    async def stop(self):
        await end_all([self._task])
        for client in self._clients:
            await client.close()


class Asked:
    """A console that is open, and a client of it."""

    def __init__(self, console, session, regions):
        self.console, self.regions = console, regions
        self._session = session
        self.url = f"http://127.0.0.1:{console.port}"

    async def get(self, path, **options):
        async with self._session.get(self.url + path, **options) as answer:
            return answer.status, answer.headers, await answer.read()

    async def post(self, path, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        async with self._session.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())

    async def frame(self):
        status, _, body = await self.get("/api/fleet")
        assert status == 200, body
        return json.loads(body)

    async def frame_with(self, condition):
        """A frame for which that is so."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                frame = await self.frame()
                if condition(frame):
                    return frame
                await asyncio.sleep(0.05)


@asynccontextmanager
async def console(directory, *, admin_key=KEY, region_toml=""):
    """Of us/r1, in a mesh of two regions whose routers and agents the test plays."""
    text = mesh_toml(("us", "eu"), replicas=1, more={"us": region_toml})
    regions = NatsRegions(parse(text, "mesh.toml"), directory / "rendered")
    logins = read_logins(regions.topology, directory / "rendered")
    known = {name: Logins(observer=one.observer, admin=one.admin) for name, one in logins.items()}
    [port] = free_ports(1)
    config = ConsoleConfig(
        address=Address("127.0.0.1", port),
        topology=regions.topology,
        region=RegionId("us"),
        router=RouterId("r1"),
        settings=lambda: RouterSettings(policy="least-load"),
        logins=known if admin_key else {n: Logins(observer=x.observer) for n, x in known.items()},
        admin_key=admin_key,
    )
    served = Console(config)
    await regions.start()
    state = State(regions)
    try:
        await served.open()
        async with aiohttp.ClientSession() as session:
            yield Asked(served, session, regions)
    finally:
        await served.close()
        await state.stop()
        await regions.stop()


def region(frame, name="us"):
    return next(one for one in frame["regions"] if one["region"] == name)


def has_all(frame):
    """Whether the replica, the region and its requests were received."""
    rows = frame["tables"]
    return (
        region(frame)["state"] == "serving"
        and any(row["cells"][2] == "ready" for row in rows["replicas"]["rows"])
        and rows["requests"]["rows"]
        and region(frame)["orders"] is not None
    )


async def test_the_page_and_its_files_have_what_keeps_other_sites_out(tmp_path):
    async with console(tmp_path) as asked:
        status, headers, page = await asked.get("/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        files = re.findall(r'(?:src|href)="(/[^"]+)"', page.decode())
        assert {"/console.js", "/console.css", "/icon.svg"} <= set(files)
        assert not re.search(r"https?://|style=|<script>", page.decode())
        for path in ("/", *files, "/api/fleet", "/none", "/../server.py", "/api/request"):
            _, headers, _ = await asked.get(path)
            for name, value in HEADERS.items():
                assert headers[name] == value, path
            assert "set-cookie" not in headers and "access-control-allow-origin" not in headers
        for path in ("/server.py", "/page/console.js", "/..%2fserver.py", "/api", "/v1/models"):
            status, _, body = await asked.get(path)
            assert (status, "error" in json.loads(body)) == (404, True), path
        status, headers, body = await asked.get(
            "/api/fleet", headers={"accept-encoding": "identity"}
        )
        assert status == 200 and json.loads(body)["mesh"] == "test"


async def test_a_frame_shows_regions_replicas_requests_policy_and_hostile_names_as_text(tmp_path):
    async with console(tmp_path) as asked:
        frame = await asked.frame_with(has_all)
        assert (frame["region"], frame["router"], frame["can_change"]) == ("us", "r1", ["eu", "us"])
        assert ["policy", "least-load"] in region(frame)["routing"]  # this router's own
        assert ["policy", "mesh"] in region(frame, "eu")["routing"]  # as mesh.toml has it
        [row] = [row for row in frame["tables"]["replicas"]["rows"] if row["key"] == "us/us-0"]
        assert row["level"] == "good" and HOSTILE.replace("\u202e", "\\u202e") in row["cells"]
        [row] = frame["tables"]["requests"]["rows"]
        assert row["level"] == "bad" and row["of"]["request"] == HOSTILE
        query = {"id": HOSTILE, "region": "us"}
        status, headers, body = await asked.get("/api/request", params=query)
        life = json.loads(body)
        assert status == 200 and headers["content-type"].startswith("application/json")
        assert life["status"] == 500 and life["moments"][0]["text"] == "arrived"
        assert "\u202e" not in body.decode()
        status, _, body = await asked.get("/api/replica", params={"region": "us", "name": "us-0"})
        assert dict(json.loads(body)["fields"])["state"] == "ready"


async def test_a_region_whose_server_stops_keeps_its_state_and_shows_its_age(tmp_path):
    async with console(tmp_path) as asked:
        await asked.frame_with(has_all)
        await asked.regions.stop_one("us")
        frame = await asked.frame_with(lambda frame: region(frame)["bus"] == "away")
        assert "us: its bus is away" in frame["notes"][0]
        frame = await asked.frame_with(
            lambda frame: (frame["tables"]["replicas"]["rows"][0]["age_s"] or 0.0) > 2.0
        )
        [row] = [row for row in frame["tables"]["replicas"]["rows"] if row["key"] == "us/us-0"]
        assert (row["level"], row["cells"][2]) == ("old", "ready")


QUESTIONS = {
    "/api/request": 400,
    "/api/request?id=": 400,
    f"/api/request?id={'x' * 129}": 400,
    "/api/replica?region=none&name=us-0": 404,
    "/api/changes?region=us": 401,
    "/api/orders": 405,
}
FROM_ELSEWHERE = (
    ({"host": "localhost:9999"}, 200),
    ({"host": "LOCALHOST"}, 200),
    ({"host": "[::1]:80"}, 200),
    ({"host": "evil.example"}, 403),
    ({"host": "127.0.0.1.evil.example"}, 403),
    ({"host": ""}, 403),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "same-origin"}, 200),
)
ORDER = {"verb": "drain", "region": "us"}
NO_ORDERS = (
    (b"", "JSON"),
    (b"[]", ""),
    (b"{", "JSON"),
    ({"verb": "delete", "region": "us"}, "verb"),
    ({"verb": "drain"}, "region"),
    ({**ORDER, "replica": "us-9"}, "us-9"),
    ({**ORDER, "replica": "us.*"}, "replica"),
    ({"verb": "drain", "region": "none"}, "none"),
    ({**ORDER, "reason": "x" * 501}, "reason"),
    ({**ORDER, "name": "x" * 65}, "name"),
    ({**ORDER, "also": 1}, "also"),
)


async def test_what_is_refused(tmp_path):
    async with console(tmp_path) as asked:
        for path, status in QUESTIONS.items():
            found, headers, body = await asked.get(path)
            assert (found, list(json.loads(body))) == (status, ["error"])
            assert headers["x-content-type-options"] == "nosniff"
        for headers, status in FROM_ELSEWHERE:
            for path in ("/", "/api/fleet"):
                found, _, body = await asked.get(path, headers=headers)
                assert found == status, (headers, body)
        for body, word in NO_ORDERS:
            status, answer = await asked.post("/api/orders", body, **BEARER)
            assert status == 400 and word in answer["error"], body
        for headers in ({}, {"authorization": "Bearer wrong-wrong-wrong-wrong"}):
            status, answer = await asked.post("/api/orders", ORDER, **headers)
            assert status == 401 and "key" in answer["error"]
        for headers, status in (
            ({"content-type": "text/plain"}, 415),
            ({"origin": "http://evil.example"}, 403),
        ):
            assert (await asked.post("/api/orders", ORDER, **headers, **BEARER))[0] == status
        large = {**ORDER, "reason": "x" * BODY_BYTES_MAX}
        assert (await asked.post("/api/orders", large, **BEARER))[0] == 413
        admin = await asked.regions.connect("us", "admin")
        assert (await ORDERS.read(admin, RegionId("us"))).seq == 0  # nothing was written
        await admin.close()


async def test_drain_and_undrain_write_the_record_that_mesh_drain_writes(tmp_path):
    async with console(tmp_path) as asked:
        order = {"verb": "drain", "region": "us", "replica": "us-0", "reason": "a\nfan"}
        status, answer = await asked.post("/api/orders", {**order, "name": "ann"}, **BEARER)
        assert status == 200 and answer["drained"] == ["us-0"]
        admin = await asked.regions.connect("us", "admin")
        known = await ORDERS.read(admin, RegionId("us"))
        assert known.record.drained == ("us-0",) and known.seq == answer["seq"]
        assert known.record.command == "drain replica us-0" and known.record.reason == "a\\nfan"
        assert known.record.by.startswith("ann at 127.0.0.1, console of us/r1")
        frame = await asked.frame_with(lambda frame: (region(frame)["orders"] or {}).get("drained"))
        assert region(frame)["orders"]["reason"] == "a\\nfan"

        whole = {"verb": "cordon", "region": "us"}
        assert (await asked.post("/api/orders", whole, **BEARER))[1]["all_drained"] is True
        undrain = {"verb": "undrain", "region": "us", "replica": "us-0"}
        status, answer = await asked.post("/api/orders", undrain, **BEARER)
        assert status == 409 and "all of region us is drained" in answer["error"]
        status, answer = await asked.post("/api/orders", {**whole, "verb": "undrain"}, **BEARER)
        assert (status, answer["drained"], answer["all_drained"]) == (200, [], False)
        again = await asked.post("/api/orders", {**undrain, "reason": "no change"}, **BEARER)
        assert again[0] == 200 and again[1]["seq"] == answer["seq"]
        status, _, body = await asked.get("/api/changes?region=us", headers=BEARER)
        commands = [one["command"] for one in json.loads(body)["changes"]]
        assert commands == ["undrain region us", "cordon region us", "drain replica us-0"]
        await admin.close()


async def test_without_a_key_it_only_shows(tmp_path):
    async with console(tmp_path, admin_key=None) as asked:
        frame = await asked.frame_with(lambda frame: region(frame)["orders"] is not None)
        assert frame["can_change"] == []
        order = {"verb": "drain", "region": "us"}
        status, answer = await asked.post("/api/orders", order, **BEARER)
        assert status == 401 and "read-only" in answer["error"]
        admin = await asked.regions.connect("us", "admin")
        own = RegionControl(region=RegionId("us"), command="a test")
        await ORDERS.change(admin, RegionId("us"), lambda _: own)
        assert (await ORDERS.read(admin, RegionId("us"))).seq == 1  # the test's own
        await admin.close()


async def test_it_listens_on_the_buses_while_somebody_looks_only(tmp_path, monkeypatch):
    monkeypatch.setattr(viewing, "LOOK_S", 0.1)
    async with console(tmp_path) as asked:
        assert (await asked.get("/"))[0] == 200
        assert not asked.console.is_watching
        await asked.frame_with(has_all)
        assert asked.console.is_watching
        monkeypatch.setattr(viewing, "UNWATCHED_S", 1.0)
        await until(lambda: not asked.console.is_watching)
        await asked.frame_with(has_all)  # and again


GET_ICON = b"GET /icon.svg HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def close_all(opened):
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_all_who_look_get_one_frame(tmp_path, monkeypatch):
    monkeypatch.setattr(viewing, "FRAME_S", 600.0)
    async with console(tmp_path) as asked:
        frames = [await asked.get("/api/fleet") for _ in range(5)]
        assert len({body for _, _, body in frames}) == 1


async def test_too_many_connections_that_send_requests_are_closed(tmp_path):
    async with console(tmp_path) as asked, asyncio.timeout(PATIENCE_S):
        port = asked.console.port
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        for reader, writer in held:
            writer.write(GET_ICON)
            assert b"200" in await reader.readline()
        last = await asyncio.open_connection("127.0.0.1", port)
        assert await last[0].read() == b""
        await close_all([*held, last])


async def test_connections_without_a_request_make_room_for_others(tmp_path):
    async with console(tmp_path) as asked, asyncio.timeout(PATIENCE_S):
        port = asked.console.port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        assert (await asked.get("/"))[0] == 200
        with contextlib.suppress(ConnectionError):
            assert await silent[0][0].read() == b""  # the oldest
        await close_all(silent)


@pytest.mark.parametrize("begun", [b"", GET_ICON[:-2], GET_ICON + GET_ICON[:-2]])
async def test_a_connection_that_finishes_no_request_is_closed_after_a_while(
    tmp_path, monkeypatch, begun
):
    monkeypatch.setattr(connections, "SILENT_S", 0.5)
    async with console(tmp_path) as asked, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", asked.console.port)
        writer.write(begun)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await close_all([(reader, writer)])


async def test_only_so_many_requests_are_looked_up_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "LOOKUPS_MAX", 0)
    async with console(tmp_path) as asked:
        status, headers, _ = await asked.get("/api/request?id=x")
        assert (status, headers["retry-after"]) == (503, "1")
        monkeypatch.setattr(server, "OPEN_MAX", 0)
        assert (await asked.get("/"))[0] == 503
