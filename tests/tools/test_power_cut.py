"""A power cut of a nats-server's machine: what was acknowledged is there afterwards.

The store is on ext4 in an image file. A cut is a copy of that file at some moment, with the server
stopped while it is copied: what the kernel had not written yet is lost. Takes root.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from infra.topology import parse
from mesh.adapters.operator_orders import ORDERS
from mesh.batch.records import Line, Result
from mesh.cli.keys import KEYS
from schemas import subjects
from schemas.http import CHAT
from schemas.state import Lease, decode_lease, encode_state
from tests.support.batch_regions import batch_toml, opened
from tests.support.batch_store import request_line, submit
from tests.support.nats_regions import NatsRegions
from tests.tools.test_full_disk import store_of

pytestmark = [pytest.mark.tools, pytest.mark.timeout(300)]

RECORDS = {"orders": ORDERS, "keys": KEYS}
CUTS = 20
IMAGE = "4G"  # nearly all of it a hole
LINES = 20
ANSWER_S = 30.0


@contextlib.contextmanager
def mounted(image, folder):
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


class Work:
    """Writes to the region's stores, one thing after the other, and keeps what was acknowledged."""

    def __init__(self, store, admin, router):
        self.store, self.admin, self.router = store, admin, router
        self.jobs = {}  # its input file and that file's content
        self.lines = {}  # how many of each job are queued
        self.results = []  # job and number
        self.numbers = {}  # the last of each of RECORDS, and of the lease

    def acknowledged(self):
        return dict(self.jobs), dict(self.lines), list(self.results), dict(self.numbers)

    async def run(self):
        for number in range(10_000):
            data = b"".join(request_line(f"{number}-{line}") for line in range(LINES))
            job = await submit(self.store, data)
            self.jobs[job.id] = (job.input_file_id, data)
            numbers = range(1, LINES + 1)
            await self.store.lines.add(_line(job.id, number) for number in numbers)
            self.lines[job.id] = LINES
            for line in numbers[:3]:
                await self.store.results.put(_result(job.id, line))
                self.results.append((job.id, line))
            for name, records in RECORDS.items():
                change = partial(replace, reason=f"{number}")
                await records.change(self.admin, "us", change)
                self.numbers[name] = number
            lease = Lease(region="us", owner="us", router="r1", term=number + 1, lease_s=1.0)
            answer = await self.router.request(
                subjects.lease("us"), encode_state(lease), timeout=ANSWER_S
            )
            assert json.loads(answer.data)["seq"]
            self.numbers["lease"] = number


async def numbered(admin, setup, name):
    """The number of the record that is there."""
    if name in RECORDS:
        _, record = await RECORDS[name].read(admin, "us")
        return int(record.reason)
    last = await setup.jsm().get_last_msg("LEASES", subjects.lease("us"), direct=True)
    return decode_lease(last.data).term - 1


def _line(job, number):
    return Line(job=job, number=number, custom_id=f"{number}", url=CHAT, body=b"{}")


def _result(job, number):
    return Result(job=job, number=number, status=200, custom_id=f"{number}", body=b"{}")


async def cut(regions, image, copy):
    pid = regions.pid("us")
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.to_thread(subprocess.run, ["cp", "--sparse=always", image, copy], check=True)
    finally:
        os.kill(pid, signal.SIGCONT)


async def lost(regions, acknowledged):
    """What a store that was cut lacks of that."""
    jobs, lines, results, numbers = acknowledged
    found = []

    async def holds(what, reading, is_there):
        try:
            found.extend([] if is_there(await reading) else [what])
        except Exception as error:
            found.append(f"{what}: {error!r}")

    admin, setup = [await regions.connect("us", user) for user in ("admin", "setup")]
    async with opened(regions) as store:
        for job, (file, data) in jobs.items():
            await holds(f"job {job}", store.jobs.get(job), lambda _: True)
            content = _joined(store.files.read(file))
            await holds(f"content of {file}", content, lambda kept, data=data: kept == data)
        for job, count in lines.items():
            left = _listed(store.lines.left(job))
            await holds(f"lines of {job}", left, lambda kept, count=count: len(kept) >= count)
        for job, number in results:
            result = store.results.get(job, number)
            await holds(f"result {number} of {job}", result, lambda kept: kept is not None)
    for name, number in numbers.items():
        kept = numbered(admin, setup, name)
        await holds(f"{name} {number}", kept, lambda kept, number=number: kept >= number)
    for client in (admin, setup):
        await client.close()
    return found


async def _listed(values):
    return [value async for value in values]


async def _joined(chunks):
    return b"".join(await _listed(chunks))


async def test_nothing_that_was_acknowledged_is_lost_in_a_power_cut(tmp_path):
    assert await drill(tmp_path) == []


async def drill(directory, edit=None, cuts=CUTS):
    """What was lost at any of the moments."""
    image, dice = directory / "disk.img", random.Random(7)
    mesh = parse(batch_toml(("us", "eu")), "mesh.toml")  # with a peer a region has a lease
    regions = NatsRegions(mesh, directory / "rendered", edit=edit)
    subprocess.run(["truncate", "-s", IMAGE, image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    disk = Path(store_of(regions, "us"))
    moments = []
    with mounted(image, disk):
        try:
            await regions.start()
            admin = await regions.connect("us", "admin")
            inbox = subjects.inbox_prefix("us", "r1")
            router = await regions.connect("us", "router", inbox_prefix=inbox)
            async with opened(regions) as store:
                work = Work(store, admin, router)
                working = asyncio.create_task(work.run())
                for number in range(cuts):
                    await asyncio.wait([working], timeout=dice.uniform(0.01, 0.3))
                    assert not working.done(), working.exception()
                    copy = directory / f"cut-{number}.img"
                    moments.append((copy, work.acknowledged()))
                    await cut(regions, image, copy)
                working.cancel()
                await asyncio.wait([working])
        finally:
            await regions.stop()
    *_, (_, (jobs, *_, numbers)) = moments
    assert jobs and numbers.keys() == {*RECORDS, "lease"}, "some of each was acknowledged"
    found = []
    for copy, acknowledged in moments:
        with mounted(copy, disk):
            try:
                await regions.start_one("us")
                found += [f"{copy.name}: {what}" for what in await lost(regions, acknowledged)]
            finally:
                await regions.stop_one("us")
        copy.unlink()
    shutil.rmtree(directory / "rendered")
    print(f"{len(moments)} cuts; at the last one {len(jobs)} jobs were acknowledged")
    return found
