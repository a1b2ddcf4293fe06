"""Every number that only rises: after one hostile claim of 2^48 or more, honest ones count again.

Each row of docs/decisions/numbers-believed-by-steps.md by its own code; a row without a case here
fails.
"""

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from agents.core.answer_stream import FlowWindow
from agents.core.events import RouterKey
from agents.core.routers import ADOPTED_S, Fence, HandoffAcks, HandoffNumber, RouterLiveness
from mesh.core.gossip.remote_prefixes import Origin, RemotePrefixes, RemotePrefixSet
from mesh.core.gossip.stream_receiver import SILENT_S, StreamReceiver
from mesh.core.membership.lease import HINT_STEP, LeaseState
from mesh.core.model.settings import RouterSettings
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from mesh.runtime.control_plane import OperatorOrders
from schemas.control import RegionControl, encode_control
from schemas.exchange import WINDOW_BYTES, Frame
from schemas.gossip import TrieDelta
from schemas.state import NEXT_WITHIN_S_MAX, TERM_MAX, Lease
from tests.mesh.core.build import beat, digest
from tests.mesh.session.test_answer import EVENTS, Sender

HUGE = 2**62
SETTINGS = RouterSettings()


def lease(owner: str, term: int) -> Lease:
    return Lease(region="us", owner=owner, router="r1", term=term, lease_s=1.0)


def agent_term():
    fence = Fence("us")
    fence.claim("eu", 5, 0.0)
    fence.claim("ap", TERM_MAX, 0.1)
    over = 0.1 + ADOPTED_S + 0.01
    lease_state = LeaseState("us", seq=9, owner="eu", term=5)
    lease_state.saw_term(fence.term)
    fence.claim("eu", lease_state.next_term("eu"), over)
    return fence.owner(over) == "eu"


def router_term():
    lease_state = LeaseState("us", seq=9, owner="eu", term=5)
    lease_state.saw_term(TERM_MAX)
    return lease_state.next_term("eu") <= 9 + HINT_STEP + 1


def lease_write():
    """At the highest term the next write is taken all the same, by an agent too."""
    lease_state, fence = LeaseState("us"), Fence("us")
    lease_state.seen(lease("ap", TERM_MAX), 10, 0.0)
    fence.claim("ap", TERM_MAX, 0.0)
    over = ADOPTED_S + 0.01
    taken = lease_state.seen(lease("eu", lease_state.next_term("eu")), 11, over)
    fence.claim("eu", lease_state.term, over)
    return taken and lease_state.owner == "eu" and fence.owner(over) == "eu"


def heartbeats():
    table, honest = ReplicaTable("r1", SETTINGS), beat("us-0")
    table.see(honest, 0.0)
    table.see(replace(honest, epoch=HUGE, seq=HUGE), 0.1)
    for tenth in range(2, 30):
        table.expire(tenth / 10)
        table.see(replace(honest, seq=honest.seq + tenth), tenth / 10)
    return table.get(honest.replica).heartbeat.epoch == honest.epoch


def digests():
    table, honest = PeerTable(SETTINGS, "us"), digest("eu")
    table.see(honest, 0.0)
    table.see(replace(honest, epoch=HUGE, seq=HUGE), 0.1)
    for tenth in range(2, 20):
        table.expire(tenth / 10)
        table.see(replace(honest, seq=honest.seq + tenth), tenth / 10)
    return table.get(honest.region).digests[honest.router].epoch == honest.epoch


def prefix_gossip():
    claims = ((1, HUGE), (HUGE, 1), (HUGE, HUGE))
    return all(_gossip_outlives(*claim) for claim in claims)


def _gossip_outlives(epoch: int, seq: int) -> bool:
    remote, origin = RemotePrefixes(), Origin("eu", "r1")
    receiver = StreamReceiver(origin, RemotePrefixSet(remote, origin))
    receiver.receive(TrieDelta("eu", "r1", 1, 1, (7,), ()), 0.0)
    receiver.receive(TrieDelta("eu", "r1", epoch, seq, (9,), ()), 0.1)
    for number in range(2, 20):  # deltas, two a second
        receiver.receive(TrieDelta("eu", "r1", 1, number, (number,), ()), number / 2)
        if (ask := receiver.repair_request(number / 2)) is not None and ask.epoch == 1:
            for missing in range(ask.after + 1, number + 1):  # what the origin repeats
                receiver.receive(TrieDelta("eu", "r1", 1, missing, (missing,), ()), number / 2)
    assert number / 2 > SILENT_S
    return receiver.is_whole


def router_epoch():
    watch, name = RouterLiveness("us"), RouterKey("us", "r1")
    watch.alive(name, 1, 0.0)
    watch.alive(name, HUGE, 0.1)
    return watch.alive(name, 1, 0.2).restarted and not watch.alive(name, 1, 0.3).restarted


def handoffs():
    """The agent goes by the last number; a router by none that it has not given."""
    taken = HandoffAcks()
    taken.record(HandoffNumber("r1", HUGE, None))
    taken.record(HandoffNumber("r1", 3, None))
    table, one = ReplicaTable("r1", SETTINGS), beat("us-0")
    table.see(one, 0.0)
    table.hand_off(one.replica, 10, 10, 0.0)
    table.see(replace(one, seq=one.seq + 1, taken={"r1": HUGE}), 0.1)
    on_the_way = len(table.get(one.replica).on_the_way)
    return taken.snapshot() == {"r1": 3} and on_the_way == 1


def frames():
    """A frame from far ahead is ignored, and the gap requested; the next one in order counts."""
    sender = Sender(EVENTS)
    sender.send(Frame.DATA, b"data: forged\n\n", number=2**32 - 1)
    sender.data(b"data: 1\n\n")
    return sender.answer.take() == b"data: 1\n\n"


def orders():
    known = OperatorOrders("us", lambda: None, lambda seq, orders: None)
    known.read(HUGE, encode_control(RegionControl(region="us", all_drained=True)))
    known.read(1, encode_control(RegionControl(region="us", drained=("us-0",))))
    known.read(1, encode_control(RegionControl(region="us", drained=("us-1",))))
    return known.drained == ("us-1",)


def next_times():
    """Whatever it says, a replica that falls silent is lost, and sooner if it was given work."""
    lost = []
    for is_given_work in (False, True):
        table, said = ReplicaTable("r1", SETTINGS), beat("us-0", next_within_s=float(HUGE))
        table.see(said, 0.0)
        if is_given_work:
            table.hand_off(said.replica, 10, 10, 0.0)
        times = (tenth / 10 for tenth in range(100))
        lost.append(next(now for now in times if table.expire(now)))
    most_s = SETTINGS.heartbeat_lost_s
    return most_s + NEXT_WITHIN_S_MAX >= lost[0] > lost[1] and lost[1] <= most_s + 0.11


def credits():
    window = FlowWindow()
    window.send(WINDOW_BYTES)
    window.credit(HUGE)
    return not window.open


PAGE = Path(__file__).parents[2] / "docs/decisions/numbers-believed-by-steps.md"
NAMES = re.findall(r"^\| ([a-z][^|]*) \|", PAGE.read_text(), re.MULTILINE)[1:]  # but the head
CASES = dict(
    zip(
        NAMES,
        [
            *(agent_term, router_term, prefix_gossip, lease_write, heartbeats, digests),
            *(router_epoch, handoffs, orders, frames, next_times, credits),
        ],
        strict=True,
    )
)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_claim_locks_no_honest_one_out(name: str):
    assert CASES[name]()


def test_random_false_claims_do_not_last_either():
    """Any mixture of false claims about an origin's stream ends when they are not repeated."""
    dice = Random(7)
    for _ in range(50):
        assert _gossip_outlives(dice.choice((1, dice.randrange(2**63))), dice.randrange(1, 2**63))
