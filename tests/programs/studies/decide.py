"""How long one placement takes, by policy and size of the fleet.

    make decide

A fleet in the middle of its day: every replica holds its share of a million blocks, some work is
on its way, and prompts of 4,000 tokens (62 blocks) share beginnings with what is held. Measured
apart: the policy's choice alone; the whole decision as a router makes it until the replica can be
sent the request (who is available, the choice, the hand-off); the same with a receipt, which is
written only where somebody reads it (a header, a trace, the log, a recording); and what the
decision leaves to be learned, which the router does after the request has gone, at the beginning of
its next event: to enter the prompt in the index, and what peers and siblings are told of it. Each
is the median over decisions, with the 10th and 90th percentile over rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, make_policy
from mesh.core.policies.base import Destination, Policy, Target
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.core.view.replica import Replica
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import CandidateKind
from schemas.ids import ModelId, RegionId, ReplicaId, RequestId, RouterId
from schemas.state import Heartbeat, ReplicaState
from tests.programs.options import known_policies
from tests.support.result_page import result_page

MODEL, REGION, ROUTER = ModelId("m"), RegionId("us"), RouterId("r1")
PROMPT_BLOCKS = 62
PROMPT_TOKENS = 4000
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 32, 16  # the beginnings that prompts share
ROUNDS = 15
NOW = 1000.0


def prompt(dice: Random) -> Prompt:
    """One of the common beginnings, then text of its own; hashes as a chain would give them."""
    system = dice.randrange(SYSTEM_PROMPTS)
    common = (system * SYSTEM_BLOCKS + block for block in range(SYSTEM_BLOCKS))
    own = (dice.getrandbits(64) for _ in range(PROMPT_BLOCKS - SYSTEM_BLOCKS))
    return Prompt(PROMPT_TOKENS, (*common, *own), PROMPT_TOKENS / PROMPT_BLOCKS)


def request(key: int, asked: Prompt) -> Request:
    """A client's."""
    return Request(
        key=key,
        request_id=RequestId(f"request-{key}"),
        model=MODEL,
        prompt=asked,
        arrived_at=NOW,
        deadline=NOW + 600.0,
        hops=0,
        origin=REGION,
    )


def heartbeat(number: int, dice: Random) -> Heartbeat:
    """A replica with some work, at a speed of its own."""
    return Heartbeat(
        region=REGION,
        replica=ReplicaId(f"us-{number}"),
        epoch=1,
        seq=1,
        state=ReplicaState.READY,
        engine="vllm",
        models=(MODEL,),
        full=False,
        pending=0,
        running=(running := dice.randrange(32)),
        outstanding=running,
        outstanding_max=256,
        batch_max=256,
        prefill_queued_tokens=dice.randrange(2000),
        kv_used_ratio=dice.random() / 2,
        kv_capacity_tokens=2_000_000,
        prefill_s_per_token=1e-4,
        prefill_base_s=0.02,
    )


def filled(
    policy: Policy, replicas: int, blocks: int, dice: Random, now: float = NOW
) -> list[Request]:
    """Let a policy see prompts until replicas hold `blocks` together; some to ask for again."""
    seen = []
    for key in range(blocks // (PROMPT_BLOCKS - SYSTEM_BLOCKS)):
        asked = request(key, prompt(dice))
        spot = Destination(CandidateKind.REPLICA, f"us-{dice.randrange(replicas)}")
        policy.placed(asked, spot, now - 1.0)
        policy.began(asked, spot, now - 0.5)
        policy.left(asked, spot, now - 0.2)
        if key % 64 == 0:
            seen.append(asked)
    return seen


def asks(seen: Sequence[Request], count: int, dice: Random) -> list[Request]:
    """Half come again, half are new but for their beginnings."""
    return [
        request(
            10_000_000 + number, dice.choice(seen).prompt if dice.random() < 0.5 else prompt(dice)
        )
        for number in range(count)
    ]


def choosing(policy: Policy, targets: Sequence[Target]) -> Callable[[Request], object]:
    """The policy's choice alone."""
    return lambda asked: policy.choose(asked, targets, NOW)


def deciding(core: RouterCore) -> Callable[[Request], object]:
    """All that a router does about a newcomer."""

    def decide(asked: Request) -> object:
        return core.handle(ev.RequestArrived(asked), NOW)

    return decide


def learning(core: RouterCore) -> Callable[[Request], object]:
    """What the last decision has left."""
    return lambda asked: core.finish()


def leaving(core: RouterCore) -> Callable[[Request], object]:
    """The client goes at once: the next one finds the same fleet."""

    def leave(asked: Request) -> object:
        return core.handle(ev.ClientGone(asked.key), NOW)

    return leave


def nothing(asked: Request) -> object:
    """A choice that is not carried out leaves nothing to undo."""
    return None


def median_us(
    act: Callable[[Request], object],
    undo: Callable[[Request], object],
    requests: Sequence[Request],
    before: Callable[[Request], object] = nothing,
) -> float:
    """Median time of one act, in microseconds; `before` and `undo` are not counted."""
    took = []
    for asked in requests:
        before(asked)
        began = time.perf_counter()
        act(asked)
        took.append(time.perf_counter() - began)
        undo(asked)
    return 1e6 * statistics.median(took)


def measure(name: str, replicas: int, blocks: int, count: int) -> tuple[list[float], ...]:
    """Medians of each round, in microseconds: choices, decisions, those with a receipt, what they
    leave to be learned."""
    dice, settings = Random(1), RouterSettings(policy=name)
    policy = make_policy(name, settings, Random(2))
    core = RouterCore(
        RouterState(
            region=REGION,
            router=ROUTER,
            epoch=1,
            settings=settings,
            dice=Random(3),
            makers={name.partition(":")[0]: lambda settings, dice: policy},
        )
    )
    table = ReplicaTable(ROUTER, settings)
    for number in range(replicas):
        beat = heartbeat(number, dice)
        table.see(beat, NOW)
        core.handle(ev.HeartbeatSeen(beat), NOW)
    targets = [_target(replica) for replica in table]
    seen = filled(policy, replicas, blocks, dice)
    choices, decisions, read, learned = [], [], [], []
    for _ in range(ROUNDS):
        requests = [replace(asked, wants_receipt=False) for asked in asks(seen, count, dice)]
        choices.append(median_us(choosing(policy, targets), nothing, requests))
        decisions.append(median_us(deciding(core), leaving(core), requests))
        requests = asks(seen, count, dice)
        read.append(median_us(deciding(core), leaving(core), requests))
        requests = [replace(asked, wants_receipt=False) for asked in asks(seen, count, dice)]
        learned.append(median_us(learning(core), leaving(core), requests, before=deciding(core)))
    return choices, decisions, read, learned


def _target(replica: Replica) -> Target:
    return Target(replica.heartbeat.replica, replica.load, replica=replica)


def shown(medians: Sequence[float]) -> str:
    """The median of the rounds, and their spread."""
    tenths = statistics.quantiles(medians, n=10)
    return f"{statistics.median(medians):.0f} ({tenths[0]:.0f}-{tenths[-1]:.0f})"


@result_page("decide", "How long a decision takes")
@click.command()
@click.option(
    "--policy", "policies", multiple=True, default=tuple(POLICIES), callback=known_policies
)
@click.option("--replicas", "sizes", type=click.IntRange(1), multiple=True, default=(64, 1000))
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--decisions", type=click.IntRange(2), default=100, show_default=True)
def main(policies: Sequence[str], sizes: Sequence[int], blocks: int, decisions: int) -> None:
    """Print the time of a decision, in microseconds."""
    table = Table("policy", title=f"microseconds a decision; {blocks:,} blocks held")
    for size in sizes:
        table.add_column(f"choice, {size} replicas", justify="right")
        table.add_column(f"whole, {size} replicas", justify="right")
        table.add_column("with receipt", justify="right")
        table.add_column("learned after it", justify="right")
    for name in track(policies, transient=True, console=Console(stderr=True)):
        found = [measure(name, size, blocks, decisions) for size in sizes]
        table.add_row(name, *(shown(medians) for columns in found for medians in columns))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
