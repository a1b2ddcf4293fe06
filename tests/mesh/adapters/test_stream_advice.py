"""To remove a stream is advised only where it is there with settings that can't be changed."""

import json
from pathlib import Path

import nats
import pytest

from infra.bus import BusAddress
from mesh.adapters import streams
from schemas import subjects
from schemas.ids import RegionId
from tests.support.flushed import flushed
from tests.support.nats_server import nats_server_binary
from tests.support.ports import free_ports
from tests.support.server_process import ServerProcess

US = RegionId("us")
SILENT = object()
OTHER = {"config": {**streams.heartbeats(US).as_dict(), "max_consumers": 7}}
IN_USE = {"error": {"code": 400, "err_code": 10058, "description": "already in use"}}


def failed(code, err_code, text):
    return {"error": {"code": code, "err_code": err_code, "description": text}}


NOT_CHANGED = failed(500, 10052, "can not change")
MISSING = failed(404, 10059, "stream not found")
CASES = {
    "nobody answers": {},
    "silent": {"INFO": SILENT},
    "no leader": {"INFO": failed(503, 10008, "temporarily unavailable")},
    "missing, and silent": {"INFO": MISSING, "CREATE": SILENT},
    "missing, and refused": {"INFO": MISSING, "CREATE": NOT_CHANGED},
    "silent as it is changed": {"INFO": OTHER, "CREATE": IN_USE, "UPDATE": SILENT},
    "gone as it is changed": {"INFO": OTHER, "CREATE": IN_USE},
    "full": {"INFO": OTHER, "CREATE": IN_USE, "UPDATE": failed(500, 10077, "no space left")},
    "can't be changed": {"INFO": OTHER, "CREATE": IN_USE, "UPDATE": NOT_CHANGED},
    "stays as it is": {"INFO": OTHER, "CREATE": IN_USE, "UPDATE": OTHER},
}


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_is_to_be_removed_only_where_it_stays_otherwise(tmp_path, monkeypatch, case):
    monkeypatch.setattr(streams, "REQUEST_S", 0.2)
    [port] = free_ports(1)
    config = tmp_path / "without-jetstream.conf"
    config.write_text(f"listen: 127.0.0.1:{port}")
    server = ServerProcess(Path(nats_server_binary()), config, log=tmp_path / "nats.log")
    await server.start()
    try:
        client = await nats.connect(url := f"nats://127.0.0.1:{port}")

        async def answer(message):
            said = CASES[case].get(message.subject.split(".")[3])
            if said is not SILENT:
                await message.respond(json.dumps(said).encode())

        for call in CASES[case]:
            await client.subscribe(f"$JS.API.STREAM.{call}.{subjects.STREAM_HEARTBEATS}", cb=answer)
        await flushed(client)
        try:
            with pytest.raises(streams.StreamsUnusable) as raised:
                await streams.set_up(BusAddress(url), US, has_peers=False)
        finally:
            await client.close()
    finally:
        await server.stop()
    is_advised = "stream rm HEARTBEATS" in str(raised.value)
    assert is_advised == (case in ("can't be changed", "stays as it is")), str(raised.value)
