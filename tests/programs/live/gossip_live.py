"""Prefix gossip between real processes: three regions of two routers, with it and without.

    make gossip-live [TRACE=conversation_trace.jsonl]

Without a trace, conversations whose turns come to any of the routers: what a load balancer in front
of them makes of a chat. The same requests go through the same mesh twice, on real nats-servers with
leaf links between them, and a third time through one router beside all the engines. It
places every request itself, so it knows of every prefix all that a router can; and no engine is far
from it, so what it reaches is a bound that no mesh of regions need reach. Its times to first token
leave out the wide area and are no yardstick. Bytes are what the routers themselves count, of the
busiest link.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import click
import orjson
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from tests.programs.options import mooncake_trace
from tests.support.mesh_up import REGIONS, RTT_MS, MeshUp, mesh_up, write_config
from tests.support.result_page import result_page

ROUTERS = ("r1", "r2")


class Form(NamedTuple):
    """Where the routers are, and how much they publish to peers."""

    regions: tuple[str, ...]
    routers: tuple[str, ...]
    kib_per_s: int


FORMS = {
    "nothing told": Form(REGIONS, ROUTERS, 0),
    "gossip": Form(REGIONS, ROUTERS, 64),
    "one router": Form(REGIONS[:1], ROUTERS[:1], 0),
}
KINDS = ("sent", "repaired")
CHATS, TURN_BLOCKS_MAX, REQUESTS_PER_S = 40, 26, 4.0


@result_page("gossip-live", "Prefix gossip, live")
@click.command()
@click.option("--trace", type=click.Path(exists=True, path_type=Path), callback=mooncake_trace)
@click.option("--limit", type=click.IntRange(1), default=400, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True)
@click.option("--pace", type=click.FloatRange(0, min_open=True), default=8.0, show_default=True)
def main(trace: Path | None, limit: int, replicas: int, pace: float) -> None:
    """Compare cached tokens with gossip, without, and with one router that sees everything."""
    results = {
        name: asyncio.run(_play(trace, form, limit, replicas, pace)) for name, form in FORMS.items()
    }
    best = results["one router"]["cached_token_ratio"]
    table = Table("figure", *results)
    for name, read in (
        ("answered", lambda result: f"{result['ok']} of {result['requests']}"),
        ("cached prompt tokens", lambda result: f"{result['cached_token_ratio']:.3f}"),
        ("of one router's", lambda result: f"{result['cached_token_ratio'] / best:.1%}"),
        ("TTFT mean", lambda result: f"{result['ttft_s']['mean']:.3f} s"),
        ("KiB/s on the busiest link", lambda result: f"{result['link_bytes_per_s'] / 1024:.1f}"),
    ):
        table.add_row(name, *map(read, results.values()))
    Console(width=100).print(table)


async def _play(
    trace: Path | None, form: Form, limit: int, replicas: int, pace: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = write_config(
            directory,
            regions=form.regions,
            replicas=replicas * len(REGIONS) // len(form.regions),
            routers=form.routers,
            rtt_ms=RTT_MS,
        )
        routing = f"\n[routing]\ngossip_kib_per_s = {form.kib_per_s}\n"
        config.write_text(config.read_text() + routing)
        trace = trace or _conversations(directory / "chats.jsonl", limit)
        async with mesh_up(directory, config=config, time_scale=pace) as mesh:
            out = directory / "result.json"
            urls = [
                f"--url={region}-{router}={mesh.endpoint(region, router)}"
                for region in form.regions
                for router in form.routers
            ]
            began = asyncio.get_running_loop().time()
            replay = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mesh.cli.main", "replay", *urls),
                *("--trace", str(trace), "--format", "mooncake", "--limit", str(limit)),
                *("--speed", str(pace), "--assign", "round-robin", "--out", str(out)),
                stdout=asyncio.subprocess.DEVNULL,
            )
            assert await replay.wait() == 0, "the replay failed; its words are above"
            took_s = asyncio.get_running_loop().time() - began
            result: dict[str, Any] = orjson.loads(out.read_bytes())
            result["link_bytes_per_s"] = await _busiest_link(mesh, form) / took_s
    return result


def _conversations(path: Path, requests: int) -> Path:
    """Forty chats at a time, each turn three blocks of 512 tokens longer than the last."""
    dice, lines, chats = Random(7), [], []
    for number in range(requests):
        if len(chats) < CHATS:
            chats.append([*range(4), 10_000 * (number + 1)])  # all begin with one system prompt
        chat = dice.choice(chats)
        chat += [chat[-1] + step for step in range(1, 4)]
        if len(chat) > TURN_BLOCKS_MAX:
            chats.remove(chat)
        request = {
            "timestamp": round(1000 * number / REQUESTS_PER_S),
            "input_length": 512 * len(chat),
            "output_length": 100,
            "hash_ids": [*chat],
        }
        lines.append(orjson.dumps(request))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


async def _busiest_link(mesh: MeshUp, form: Form) -> float:
    """Bytes of all routers of one region to one peer."""
    sent: dict[tuple[str, str], float] = {}
    async with aiohttp.ClientSession() as http:
        for region in form.regions:
            for router in form.routers:
                async with http.get(mesh.endpoint(region, router) + "/metrics") as answer:
                    page = await answer.text()
                for family in text_string_to_metric_families(page):
                    for sample in family.samples:
                        labels = sample.labels
                        counts = sample.name == "mesh_gossip_bytes_total"
                        if counts and labels["kind"] in KINDS and labels["peer"] in REGIONS:
                            link = region, labels["peer"]
                            sent[link] = sent.get(link, 0.0) + sample.value
    return max(sent.values(), default=0.0)


if __name__ == "__main__":
    main()
