"""A process whose TCP links are as slow as the wide area: `mesh up` has its own.

    python -m tests.programs.live.versus.links FILE

It reads a JSON list of `{"target": "host:port", "one_way_s": …}`, starts a delaying proxy for each
and writes their addresses to FILE.ready, in the same order. It runs until SIGTERM.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import uvloop

from infra.address import parse_address
from mesh.demo.wan_proxy import WanProxy
from mesh.replay.report import write_whole


async def serve(path: Path) -> None:
    """Until SIGTERM."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with contextlib.AsyncExitStack() as running:
        proxies = [_proxy(one) for one in orjson.loads(path.read_bytes())]
        for proxy in proxies:
            await running.enter_async_context(proxy)
        write_whole(ready_file(path), orjson.dumps([str(proxy.address) for proxy in proxies]))
        await stopped.wait()


def ready_file(path: Path) -> Path:
    """Where the addresses are, once all links listen."""
    return path.with_name(f"{path.name}.ready")


def write_links(path: Path, links: Sequence[tuple[str, float]]) -> None:
    """What to start: each target, `host:port`, and the seconds of one way."""
    path.write_bytes(orjson.dumps([{"target": to, "one_way_s": one} for to, one in links]))


def _proxy(link: Mapping[str, object]) -> WanProxy:
    target = parse_address(str(link["target"]))
    return WanProxy(target, one_way_s=float(str(link["one_way_s"])))


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
