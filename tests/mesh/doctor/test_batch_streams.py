"""Streams of batch jobs: `mesh infra streams` makes and repairs them, `mesh doctor` looks."""

import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner

from infra.topology import parse
from mesh.batch.streams import kept
from mesh.cli.infra import command as infra
from mesh.doctor.findings import CheckResult
from tests.support import examined_mesh
from tests.support.batch_regions import batch_toml
from tests.support.mesh_command import mesh_command
from tests.support.nats_regions import NatsRegions

STREAMS = {"OBJ_files", "KV_files", "KV_batches", "BATCH_TASKS", "BATCH_LINES", "BATCH_RESULTS"}


@pytest.fixture
async def regions(tmp_path):
    (tmp_path / "mesh.toml").write_text(batch_toml())
    mesh = parse((tmp_path / "mesh.toml").read_text(), "mesh.toml")
    regions = NatsRegions(mesh, tmp_path / "rendered")
    try:
        await regions.start()
        yield regions
    finally:
        await regions.stop()


async def test_altered_and_missing_ones_are_found_and_repaired(
    regions: NatsRegions, tmp_path, monkeypatch
):
    monkeypatch.setattr(examined_mesh, "LISTEN_S", 0.1)
    found = await examined_mesh.examined(regions, tmp_path)
    seen = {one.about: one for one in found if one.check == "stream"}
    assert set(seen) >= STREAMS
    assert {seen[name].verdict for name in STREAMS} == {CheckResult.OK}
    assert seen["BATCH_LINES"].detail == "0 messages"

    setup = await regions.connect("us", "batch-setup")
    results = next(one for one in kept(regions.topology.batch) if one.name == "BATCH_RESULTS")
    await setup.jetstream().update_stream(replace(results, max_bytes=1, max_age=1.0))
    await setup.jetstream().delete_stream("BATCH_TASKS")
    await setup.close()
    found = await examined_mesh.examined(regions, tmp_path)
    ill = {one.about: one for one in found if one.check == "stream" and one.remedy is not None}
    assert {name for _, check, name in examined_mesh.ill(found) if check == "stream"} == set(ill)
    assert set(ill) == {"BATCH_TASKS", "BATCH_RESULTS"}
    assert "max_age" in ill["BATCH_RESULTS"].detail and "max_bytes" in ill["BATCH_RESULTS"].detail

    repair = shlex.split(ill["BATCH_TASKS"].remedy.command)
    status, out, err = await mesh_command(*repair[1:])
    assert (status, err) == (0, "")
    lines = dict(line.removeprefix("us: stream ").split(" ", 1) for line in out.splitlines())
    assert lines == dict.fromkeys(
        ("HEARTBEATS", "CONTROL", "KEYS", "USAGE", *STREAMS), "is as it should be"
    ) | {
        "BATCH_TASKS": "made",
        "BATCH_RESULTS": "put right",
    }


async def test_credentials_rendered_before_there_were_runners_are_told(
    regions: NatsRegions, tmp_path
):
    (tmp_path / "rendered" / "us" / "credentials" / "batch-setup.env").unlink()
    status, _, err = await mesh_command(
        *("infra", "streams", "--config", str(tmp_path / "mesh.toml")),
        *("--credentials", str(tmp_path / "rendered")),
    )
    assert status == 1
    assert "us: no batch-setup.env of us, which has batch runners: run `mesh infra nats`" in err
    assert CliRunner().invoke(infra, ["streams", "--help"]).exit_code == 0
