"""nginx and HAProxy of Debian 12, with the configurations of infra/entry, before a router.

python -m tests.tools.proxies                    # install them
python -m tests.tools.proxies silence            # 200 silent streams through each, two minutes
"""

import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.support import debian
from tests.support.nats_server import NatsServer, running_nats_server
from tests.support.ports import free_ports
from tests.support.scripted_engine import event, opened, say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, small_mesh

ENTRY = debian.ROOT / "infra" / "entry"
ROUTER, PORT = "127.0.0.1:8101", "8080"
NGINX, HAPROXY = "nginx", "haproxy"
FILES = {NGINX: "nginx.conf", HAPROXY: "haproxy.cfg"}
TIMEOUTS = {
    NGINX: r"proxy_read_timeout \S+;",
    HAPROXY: r"timeout (client|server) \S+",
}
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
WITHIN_S = 30.0
FIRST = "the first one"


def program(name: str) -> list[str]:
    """The command, with the loader and the libraries of its own Debian."""
    assert debian.PROXIES.exists(), "make test-tools installs it"
    libraries = [debian.PROXIES / part / "x86_64-linux-gnu" for part in ("usr/lib", "lib")]
    loader = debian.PROXIES / "lib64" / "ld-linux-x86-64.so.2"
    path = ":".join(map(str, libraries))
    return [str(loader), "--library-path", path, str(debian.PROXIES / "usr" / "sbin" / name)]


def configured(name: str, routers: list[str], port: int, timeout_s: float | None) -> str:
    """The file of infra/entry with these addresses. `timeout_s`: other patience than it has."""
    text = (ENTRY / FILES[name]).read_text().replace(PORT, f"127.0.0.1:{port}")
    text = text.replace("bind :127", "bind 127")
    [line] = [line for line in text.splitlines() if ROUTER in line]
    lines = [
        line.replace(ROUTER, router.removeprefix("http://")).replace("r1", f"r{number}")
        for number, router in enumerate(routers, 1)
    ]
    text = text.replace(line, "\n".join(lines))
    if timeout_s is not None:
        ms = f"{timeout_s * 1000:.0f}ms"
        text = re.sub(
            TIMEOUTS[name], lambda found: re.sub(r"\S+?(;?)$", ms + r"\1", found[0]), text
        )
    return text


@contextlib.asynccontextmanager
async def proxy(
    name: str, routers: list[str], timeout_s: float | None = None
) -> AsyncIterator[str]:
    """That program before these routers; its base URL."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = configured(name, routers, port, timeout_s)
        more = [f"{one}_temp_path {place / one};" for one in TEMPORARY]
        text = text.replace("http {", "\n".join(["http {", "access_log off;", *more]))
        (place / FILES[name]).write_text(text)
        words = ["-f", str(place / FILES[name]), "-db"]
        if name == NGINX:
            own = f"daemon off; user root; pid {place}/pid; error_log stderr warn;"
            words = ["-p", folder, "-c", FILES[name], "-g", own]
        process = await asyncio.create_subprocess_exec(*program(name), *words)
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.transport.abort()
                        break
                    assert process.returncode is None, f"{name} ended"
                    await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def ending(session: aiohttp.ClientSession, url: str, text: str) -> str:
    """How a stream ended for its client."""
    body = chat(text, stream=True)
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as answer:
            got = await answer.read()
    except aiohttp.ClientError as problem:
        return type(problem).__name__
    if answer.status != 200:
        return str(answer.status)
    return "whole" if got.endswith(b"data: [DONE]\n\n") and b'"error"' not in got else "error"


async def silence(
    server: NatsServer, name: str, keep_alive_s: float, timeout_s: float, count: int, **wait: float
) -> Counter[str]:
    """What becomes of so many streams. `wait`: `prefill_s` or `hold_s` without a token."""
    router = {"sse_keep_alive_s": keep_alive_s, "queue_delay_s_max": 0, "policy": "least-load"}
    if "hold_s" in wait:  # behind one that takes its time
        router["pushing"] = "outstanding:1"

    async def answer(request: web.Request, body: dict) -> web.StreamResponse:
        if body["messages"][0]["content"] != FIRST:
            await asyncio.sleep(wait.get("prefill_s", 0.0))
            return await say("hello")(request, body)
        stream = await opened(request)
        for _ in range(int(wait["hold_s"])):
            await stream.write(event("more"))
            await asyncio.sleep(1.0)
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async with scripted_engine() as engine, small_mesh({"us": server}) as mesh:
        engine.behaviour, engine.computed = answer, lambda: int(1000 * time.monotonic())
        url = await mesh.router("us", **router, **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=180)
        async with (
            proxy(name, [url], timeout_s) as entry,
            aiohttp.ClientSession(connector=connector, timeout=patience) as session,
        ):
            if "hold_s" in wait:
                first = asyncio.create_task(ending(session, url, FIRST))
                await mesh.until(engine.arrived.is_set, "the first one")
            asked = (ending(session, entry, f"request {number}") for number in range(count))
            ends = await asyncio.gather(*asked)
            if "hold_s" in wait:
                assert await first == "whole"
    return Counter(ends)


CASES = ((60.0, 10.0), (60.0, 0.0), (10.0, 5.0), (10.0, 0.0))  # time-out, --sse-keep-alive-s
WAITS = ({"prefill_s": 30.0}, {"hold_s": 50.0})


async def measured(name: str, timeout_s: float, keep_alive_s: float) -> str:
    """200 streams: 100 with a prefill of 30 s, 100 that are held for 50 s."""
    ends: Counter[str] = Counter()
    for wait in WAITS:
        with tempfile.TemporaryDirectory() as folder:
            async with running_nats_server(Path(folder)) as server:
                ends += await silence(server, name, keep_alive_s, timeout_s, 100, **wait)
    shown = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    return f"{name}, time-out {timeout_s:g} s, --sse-keep-alive-s {keep_alive_s:g}: {shown}"


async def measure() -> None:
    """All cases at once: they only wait."""
    cases = [measured(name, *case) for name in FILES for case in CASES]
    for line in await asyncio.gather(*cases):
        print(line)


if __name__ == "__main__":
    debian.make_proxies()
    if sys.argv[1:] == ["silence"]:
        asyncio.run(measure())
