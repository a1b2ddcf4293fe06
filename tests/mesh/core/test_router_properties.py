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
                failing = core.replicas.failing.bars(name, now, has_failed=bool(avoid))
                assert not free or name in avoid or failing
            # `skywalker` leaves a peer alone whose hold queue is longer than ours.
            queue = len(core.held)
            for region, peer in core.peers:
                why = core.peers.unavailable_because(peer, held.model, now, queue_max=queue)
                failing = core.peers.failing.bars(region, now, has_failed=bool(avoid))
                assert why is not None or region in avoid or failing


@FEW
@given(SEEDS)
def test_the_same_events_have_the_same_effects(seed):
    first = Chaos(seed)
    first.run(150)
    again = build.core(seed, **first.settings)
    assert [again.handle(event, now) for event, now in first.history] == first.effects


def test_the_order_of_hashes_changes_nothing():
    """Strings hash differently in every process: iteration over a set shows here."""
    seen = {fingerprint(7)}
    for hash_seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "tests.mesh.core.chaos", "7"]
        seen.add(subprocess.check_output(command, env=env, text=True, cwd=ROOT).strip())
    assert len(seen) == 1
