"""What holds for every router, whatever happens to it: random events from a seed.

The checks themselves are in `ledger.py`, the events in `chaos.py`.
"""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES, make_policy
from tests.mesh.core import build
from tests.mesh.core.chaos import PEERS, Chaos, fingerprint

ROOT = Path(__file__).parents[3]
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=25)

# Joint policies may let a request wait though there is room; their own tests say when.
LAYERED = [name for name in POLICIES if not make_policy(name, RouterSettings(), Random(1)).joint]


@FEW
@given(SEEDS)
@example(1)
@example(2)
def test_every_request_ends_once_and_nothing_stays_behind(seed):
    chaos = Chaos(seed)
    chaos.run(400)
    chaos.heal()
    cases = chaos.ledger.cases.values()
    assert [case.request.key for case in cases if case.ended_by is None] == []
    assert (len(chaos.core.inflight), len(chaos.core.held), chaos.core.held.models()) == (0, 0, ())
    for replica in chaos.core.replicas:
        sent = replica.on_the_way
        assert (len(sent), sent.waiting, sent.tokens, len(replica.relayed)) == (0, 0, 0, 0)
    for region in PEERS:
        peer = chaos.core.peers.get(region)
        assert peer is None or (len(peer.forwarded_at), peer.digests) == (0, {})


def is_left_out(core, held, place, avoid, now) -> bool:
    """Whether it fails, and another one that doesn't may answer the request sometime."""

    def fails(table, name) -> bool:
        has_failed = bool(avoid)
        return table.failing.bars(name, held.model, now, has_failed=has_failed) is not None

    replicas, peers = core.replicas, core.peers
    here = [one.heartbeat.replica for one in replicas if replicas.serves(one, held.model)]
    away = [region for region, peer in peers if peer.ready(held.model)]
    others = [name for name in here if name not in avoid and not fails(replicas, name)]
    others += [name for name in away if name not in avoid and not fails(peers, name)]
    return bool(others) and fails(replicas if place in here else peers, place)


@FEW
@given(SEEDS)
def test_after_every_tick_no_request_waits_while_there_is_room(seed):
    chaos = Chaos(seed, LAYERED)
    for _ in range(60):
        chaos.run(5)
        chaos.pass_time()
        core, now = chaos.core, chaos.now
        for held in () if chaos.ledger.is_away(now) else core.held:
            avoid = core.inflight[held.key].avoided(now)
            for replica in core.replicas:
                free = core.replicas.unavailable_because(replica, held.model, now) is None
                name = replica.heartbeat.replica
                assert not free or name in avoid or is_left_out(core, held, name, avoid, now)
            # `skywalker` leaves a peer alone whose hold queue is longer than ours.
            queue = len(core.held)
            for region, peer in core.peers:
                why = core.peers.unavailable_because(peer, held.model, now, queue_max=queue)
                left_out = is_left_out(core, held, region, avoid, now)
                assert why is not None or region in avoid or left_out


@FEW
@given(SEEDS)
def test_the_same_events_have_the_same_effects(seed):
    first = Chaos(seed)
    first.run(150)
    again = build.core(seed, **first.settings)
    assert [again.handle(event, now) for event, now in first.history] == first.effects


def test_the_order_of_hashes_changes_nothing():
    """Strings hash differently in every process: iteration over a set shows here."""
    env = os.environ | {"PYTHONHASHSEED": "1"}  # this process has another one
    command = [sys.executable, "-m", "tests.mesh.core.chaos", "7"]
    told = subprocess.check_output(command, env=env, text=True, cwd=ROOT)
    assert told.strip() == fingerprint(7)
