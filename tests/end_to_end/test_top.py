"""`mesh top` over a real mesh under load, with nothing but the observers' credentials."""

import asyncio
import contextlib
import json
import os
import pty
import shutil
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
from rich.text import Text
from textual.widgets import DataTable, Input, Static

from infra import topology
from infra.process import end_all
from mesh.demo.state_directory import read_running_mesh
from mesh.doctor.logins import read_logins
from mesh.top.screen import TextPage, TopScreen
from mesh.top.watch import FleetWatch
from tests.support.mesh_command import mesh_command
from tests.support.mesh_up import MeshUp, mesh_up, write_config
from tests.support.until import PATIENCE_S, until

CLIENTS = 1
PAUSE_S = 0.2  # between two requests of a client: the test has the machine too
REPLICAS = {"us": 2, "eu": 1}


@asynccontextmanager
async def busy_mesh(folder):
    """Two regions whose clients stream all the time; observers' credentials are in `seen`."""
    config = write_config(folder, regions=tuple(REPLICAS), replicas=REPLICAS)
    async with mesh_up(folder, config=config) as mesh:
        for region in REPLICAS:
            target = folder / "seen" / "config" / region / "credentials"
            target.mkdir(parents=True)
            rendered = folder / ".mesh" / "config" / region / "credentials"
            shutil.copy(rendered / "observer.env", target)
        clients = [
            asyncio.create_task(client(mesh, region)) for region in REPLICAS for _ in range(CLIENTS)
        ]
        try:
            yield mesh
        finally:
            await end_all(clients)


async def client(mesh: MeshUp, region: str) -> None:
    url = mesh.endpoint(region) + "/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        while True:
            content = os.urandom(8).hex()
            body = {"model": mesh.model, "stream": True, "max_tokens": 16,
                    "messages": [{"role": "user", "content": content}]}  # fmt: skip
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url, json=body) as answer:
                    await answer.read()
            await asyncio.sleep(PAUSE_S)


def arguments(folder) -> list[str]:
    """Of a reader that is on another machine: a mesh.toml and credentials."""
    return ["--config", str(folder / "mesh.toml"), "--credentials", str(folder / "seen" / "config")]


async def output_of(*words: str, columns: int = 200) -> str:
    status, out, err = await mesh_command(*words, columns=columns)
    assert status == 0, err
    return out


async def seen(folder, condition) -> dict:
    """A frame for which that is so, as JSON; the command is repeated until there is one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            frame = json.loads(await output_of("top", "--json", *arguments(folder)))
            if condition(frame):
                return frame


def replica(frame, name: str) -> dict:
    return next(row for row in frame["replicas"] if row["replica"] == name)


async def kill_for_ever(mesh: MeshUp, program: str) -> None:
    """It is restarted after a wait that doubles, and killed again at once."""
    last = 0
    while True:
        pid = mesh.record["processes"].get(program, last)
        if pid != last:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        last = pid
        await asyncio.sleep(0.02)


async def test_of_a_busy_mesh(tmp_path):
    """One mesh for all, as it takes long to start; the part that kills a replica comes last."""
    async with busy_mesh(tmp_path) as mesh:
        await keys_sort_filter_and_show_details(tmp_path)
        await it_runs_in_a_terminal_until_ctrl_c(tmp_path)
        await one_frame_shows_who_is_drained_or_dead(mesh, tmp_path)


async def one_frame_shows_who_is_drained_or_dead(mesh: MeshUp, tmp_path) -> None:
    frame = await seen(
        tmp_path,
        lambda frame: (
            all(row["state"] == "serving" and row["ttft_p99_s"] for row in frame["regions"])
            and all(row["state"] == "ready" for row in frame["replicas"])
            and all(len(row["rtt_s"]) == 1 for row in frame["regions"])
            and any(row["served"] for row in frame["requests"])
        ),
    )
    regions = {row["region"]: row for row in frame["regions"]}
    assert regions.keys() == REPLICAS.keys()
    assert {row["bus"] for row in frame["regions"]} == {"connected"}
    assert regions["us"]["rtt_s"]["eu"] > 0.01 and regions["us"]["requests_per_s"] > 0.0
    assert {row["replica"] for row in frame["replicas"]} == {"us-0", "us-1", "eu-0"}
    assert any(row["asked"] == row["served"] == "us" for row in frame["traffic"])

    drained = ("drain", "us-1", "--reason", "new fan")
    await output_of(*drained, "--credentials", str(tmp_path / ".mesh" / "config"))
    killer = asyncio.create_task(kill_for_ever(mesh, "agent-eu-0"))
    try:
        frame = await seen(tmp_path, lambda frame: replica(frame, "eu-0")["state"] == "silent")
    finally:
        killer.cancel()
    assert replica(frame, "us-1")["state"] == "drained"
    assert replica(frame, "us-0")["state"] == "ready"

    text = await output_of("top", "--once", *arguments(tmp_path), columns=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "\x1b" not in text
    [line] = [line for line in lines if line.startswith("us-1 ")]
    assert line.split()[:3] == ["us-1", "us", "drained"]


def table_of(app: TopScreen) -> list[list[str]]:
    """The cells that the table shows, its titles first."""
    grid = app.screen_stack[0].query_one("#table", DataTable)
    titles = [str(column.label) for column in grid.ordered_columns]
    rows = [[str(cell) for cell in grid.get_row(row.key)] for row in grid.ordered_rows]
    return [titles, *rows]


def column(app: TopScreen, title: str) -> list[str]:
    titles, *rows = table_of(app)
    place = next(n for n, name in enumerate(titles) if name.split(" ▲")[0].split(" ▼")[0] == title)
    return [row[place] for row in rows]


def page(app: TopScreen) -> str:
    """What lies over the tables; nothing if nothing does."""
    if not isinstance(app.screen, TextPage):
        return ""
    for shown in app.screen.query("#lines").results(Static):
        return shown.content.plain if isinstance(shown.content, Text) else str(shown.content)
    return ""


async def keys_sort_filter_and_show_details(tmp_path) -> None:
    mesh = topology.load(tmp_path / "mesh.toml")
    running = read_running_mesh(tmp_path / ".mesh" / "config")
    assert running is not None
    logins = read_logins(mesh, tmp_path / "seen" / "config")
    watch = FleetWatch(running.fitted(mesh), logins)
    watching = asyncio.create_task(watch.run())
    app = TopScreen(watch, 0.2)
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            await drive(app, pilot)
    finally:
        await end_all([watching])
    assert app.return_code == 0


async def drive(app: TopScreen, pilot) -> None:
    async def press(*keys: str) -> None:
        await pilot.press(*keys)
        await pilot.pause()

    await until(lambda: column(app, "replica") == ["eu-0", "us-0", "us-1"])
    await press("r")
    assert column(app, "replica") == ["us-1", "us-0", "eu-0"]
    await press("s")
    assert table_of(app)[0][:2] == ["replica", "region ▼"]
    await press("slash", *"us-1")
    assert column(app, "replica") == ["us-1"]
    await press("enter", "enter")
    await until(lambda: page(app).startswith("replica us-1 of us: "))
    assert "last heartbeat" in page(app) and "kv_capacity_tokens" in page(app)
    await press("escape")
    await until(lambda: page(app) == "")
    assert column(app, "replica") == ["us-1"]
    await press("escape")
    await until(lambda: len(column(app, "replica")) == 3)
    assert app.query_one("#filter", Input).value == ""

    await press("1", "j", "enter")  # the second region's replicas
    assert set(column(app, "replica")) == {"us-0", "us-1"}
    await press("escape", "tab")
    await until(lambda: "us" in column(app, "served in"))

    await press("4")
    await until(lambda: len(column(app, "request")) > 3)
    chosen = column(app, "request")[0]
    await press("slash", *chosen[:12], "enter", "enter")
    await until(lambda: "of which" in page(app))
    assert page(app).startswith(f"request {chosen}")
    assert "first byte to the client" in page(app)
    await press("escape")
    await until(lambda: page(app) == "")
    await press("question_mark")
    await until(lambda: "reverse the order" in page(app))
    await pilot.resize_terminal(60, 20)
    await press("q")
    await until(lambda: page(app) == "")
    await press("q")


async def it_runs_in_a_terminal_until_ctrl_c(tmp_path) -> None:
    main, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", "top", "--every-s", "0.2"),
        *arguments(tmp_path),
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    written = bytearray()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            written.extend(os.read(main, 65536))
        except OSError:  # its other end is closed
            loop.remove_reader(main)

    loop.add_reader(main, read)
    try:
        await until(lambda: b"us-1" in written and b"serving" in written)
        os.write(main, b"\x03")
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        assert b"\x1b[?1049l" in written  # the screen as it was before
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        loop.remove_reader(main)
        os.close(main)
