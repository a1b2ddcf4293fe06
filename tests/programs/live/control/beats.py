"""The agents of one region in one process, as far as the bus sees them: a heartbeat every 100 ms.

    python -m tests.programs.live.control.beats --region us --credentials DIR --ready-file FILE

A process for each of a thousand agents would fill the machine with interpreters. Here every replica
keeps its own connection with its own credentials, subscribes to what an agent subscribes to, and
publishes the heartbeats of an idle agent beside a vLLM. Work is not taken.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from infra.credentials_file import read_environment
from mesh.demo.state_directory import write_atomically
from schemas import subjects
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat, ReplicaState, encode_state

HEARTBEAT_S = 0.1
SLICES = 20  # of a heartbeat's interval: agents don't beat in step
CONNECTING_MAX = 50
MODEL = ModelId("mistralai/Mistral-7B-Instruct-v0.3")


def idle_heartbeat(region: RegionId, replica: ReplicaId, epoch: int) -> Heartbeat:
    """The heartbeat of an agent that has served some requests and has none now."""
    return Heartbeat(
        region=region,
        replica=replica,
        epoch=epoch,
        seq=0,
        state=ReplicaState.READY,
        engine="vllm",
        models=(MODEL,),
        full=False,
        pending=0,
        running=0,
        outstanding=0,
        outstanding_max=256,
        prefill_queued_tokens=0,
        kv_used_ratio=0.0,
        kv_capacity_tokens=406_464,
        prefill_s_per_token=0.000_123_456,
        prefill_base_s=0.012_345,
        decode_tokens_per_s=63.21,
        prefix_hit_ratio=0.4321,
        engine_age_s=0.054_321,
        served_total=1234,
        taken={RouterId("r1"): 1234},
    )


async def publish_heartbeats(region: RegionId, files: Sequence[Path], ready_file: Path) -> None:
    """Connect every agent, then beat until cancelled. `files`: their credentials."""
    gate = asyncio.Semaphore(CONNECTING_MAX)
    names = [ReplicaId(file.stem.removeprefix("agent-")) for file in files]
    clients = await asyncio.gather(
        *(_listening(gate, region, name, file) for name, file in zip(names, files, strict=True))
    )
    epoch = time.time_ns() // 1_000_000
    beats = [idle_heartbeat(region, name, epoch) for name in names]
    addresses = [subjects.heartbeat(region, name) for name in names]
    write_atomically(ready_file, b"{}")
    clock = asyncio.get_running_loop().time
    began_at = clock()
    for turn in itertools.count():
        seq, part = divmod(turn, SLICES)
        for number in range(part, len(beats), SLICES):
            payload = encode_state(replace(beats[number], seq=seq + 1))
            await clients[number].publish(addresses[number], payload)
        await asyncio.sleep(began_at + (turn + 1) * HEARTBEAT_S / SLICES - clock())


async def _listening(
    gate: asyncio.Semaphore, region: RegionId, replica: ReplicaId, file: Path
) -> Client:
    environment = read_environment(file)
    address = bus.BusAddress(
        environment["NATS_URL"], environment["NATS_USER"], environment["NATS_PASSWORD"]
    )

    async def ignore(msg: Msg) -> None:
        """Nothing is asked of idle agents."""

    async with gate:
        client = await bus.connect(address, name=file.stem, inbox_prefix=subjects.INBOX_ROOT)
        await client.subscribe(subjects.alive(subjects.ANY, subjects.ANY), cb=ignore)
        for subject in (subjects.cancel, subjects.credit, subjects.body):
            await client.subscribe(subject(region, replica), cb=ignore)
        await client.subscribe(
            subjects.work(region, replica), queue=subjects.QUEUE_AGENT, cb=ignore
        )
    return client


@click.command()
@click.option("--region", required=True)
@click.option("--credentials", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--ready-file", type=click.Path(path_type=Path), required=True)
def main(region: str, credentials: Path, ready_file: Path) -> None:
    """Speak for every agent that has credentials there."""
    files = sorted(credentials.glob("agent-*.env"))
    uvloop.run(publish_heartbeats(RegionId(region), files, ready_file))


if __name__ == "__main__":
    main()
