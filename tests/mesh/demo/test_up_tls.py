"""`mesh up --tls`: other people's clients over https, an encrypted bus, and no secret outside the
files that hold secrets."""

import asyncio
import json
import os
import re
import ssl
import sys
from pathlib import Path

import aiohttp
import openai
import pytest

from infra.bus import BusAddress, BusUnreachable, connect
from infra.credentials_file import read_environment
from infra.topology import DEFAULT_FILE, TopologyError, load, parse
from mesh.client import Regions
from mesh.demo.encrypted_file import with_tls
from tests.support.mesh_command import mesh_command
from tests.support.mesh_up import mesh_up, write_config

REGIONS = ("us", "eu")
TRACE = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_first60.jsonl"


def secrets_of(state: Path) -> set[str]:
    """All that is secret in the files of a running mesh."""
    passwords = json.loads((state / "config" / "passwords.json").read_text())["passwords"]
    keys = [file.read_text().splitlines()[1] for file in (state / "config").rglob("*.key")]
    console = (state / "run" / "console.key").read_text()
    return {*passwords.values(), *keys, console}


def told_by_the_kernel(pids: set[int]) -> str:
    """Command lines and environments of these processes and of all below them."""
    found, left = [], set(pids)
    while left:
        pid = left.pop()
        here = Path(f"/proc/{pid}")
        found += [(here / name).read_bytes() for name in ("cmdline", "environ")]
        for task in (here / "task").iterdir():
            left |= {int(child) for child in (task / "children").read_text().split()}
    return b"\n".join(found).decode(errors="replace")


async def output_of(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mesh.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return out.decode()


async def test_all_is_encrypted_and_no_secret_is_seen(tmp_path, monkeypatch):
    config = write_config(tmp_path, regions=REGIONS, batch_runners=("batch-0",))
    words = ("--tls", "--log-level", "DEBUG")
    async with mesh_up(tmp_path, *words, config=config, installed=True) as mesh:
        record, state = mesh.record, tmp_path / ".mesh"
        ca = Path(record["ca"])
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        for region in REGIONS:
            assert mesh.endpoint(region).startswith("https://")
            url = mesh.endpoint(region) + "/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="sk-of-a-client") as api:
                stream = await api.chat.completions.create(
                    model=mesh.model,
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=5,
                    stream=True,
                )
                assert [part async for part in stream]
            login = read_environment(Path(record["regions"][region]["credentials"], "observer.env"))
            wrong = BusAddress.of_credentials({**login, "NATS_PASSWORD": "guessed"})
            with pytest.raises(BusUnreachable) as refused:
                await connect(wrong, name="test", inbox_prefix="_INBOX")

        urls = [mesh.endpoint(region) + "/v1" for region in REGIONS]
        regions = Regions(urls, lambda url: url)
        assert await asyncio.to_thread(regions.call, lambda url: url) in urls
        assert "no jobs" in await output_of("batch", "list", "--endpoint", urls[0])
        given = [f"--url=us={mesh.endpoint('us')}", f"--trace={TRACE}", "--limit=2"]
        played = await output_of("replay", *given, "--speed=1000", "--scale-lengths=0.1")
        assert re.search(r"all +2 +2 +0 +0 ", played), played

        console = record["regions"]["us"]["console"]
        context = ssl.create_default_context(cafile=ca)
        headers = {"authorization": f"Bearer {(state / 'run' / 'console.key').read_text()}"}
        headers["origin"] = console.rstrip("/")
        async with aiohttp.ClientSession() as session:
            async with session.post(console + "api/key", headers=headers, ssl=context) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(console.replace("https", "http"))

        examined = "".join(
            map(str, await mesh_command("doctor", "--credentials", state / "config"))
        )
        assert "REFUSED" not in examined and "us" in examined
        logs = "".join(file.read_text() for file in (state / "logs").glob("*.log"))
        assert len(logs) > 1000
        seen = {
            "ps and environments": told_by_the_kernel(
                {record["pid"], *record["processes"].values()}
            ),
            "logs": logs,
            "doctor": examined,
            "what is printed": mesh.output,
            "an error": str(refused.value),
            "the ready file": json.dumps(record),
        }
        secrets = secrets_of(state)
        assert len(secrets) > 20
        found = {place for place, text in seen.items() for one in secrets if one in text}
        assert not found
        assert "sk-of-a-client" not in logs
        open_to_others = [
            str(file)
            for file in (state / "config").rglob("*")
            if file.is_file() and file.stat().st_mode & 0o077
        ]
        assert not open_to_others
    assert os.environ.get("NATS_PASSWORD") is None


def test_a_file_gets_tls_in_each_region_and_stays_as_it_is():
    mesh, text = load(DEFAULT_FILE), DEFAULT_FILE.read_text()
    changed = with_tls(text, mesh)
    read = parse(changed, "mesh.toml")
    for name, region in read.regions.items():
        assert region.tls is not None
        assert (region.tls.cert, region.tls.key) == (f"{name}/router.pem", f"{name}/router.key")
        assert region.endpoint == mesh.regions[name].endpoint.replace("http", "https")
    plain = {name: region.model_copy(update={"tls": None}) for name, region in read.regions.items()}
    assert [r.http for r in plain.values()] == [r.http for r in mesh.regions.values()]
    with pytest.raises(TopologyError, match=r"regions\.us\.tls: leave it out"):
        with_tls(changed, read)


def test_a_region_without_a_header_is_named():
    text = (
        'mesh.name = "m"\nregions.us = { http = "h:1", nats = "h:2", leaf = "h:3", replicas = 1 }\n'
    )
    with pytest.raises(TopologyError, match=r"write \[regions\.us\]"):
        with_tls(text, parse(text, "mesh.toml"))
