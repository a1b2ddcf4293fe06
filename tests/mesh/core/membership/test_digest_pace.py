"""How soon digests come: seldom from a region at rest; and from when on its silence counts."""

import itertools

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.view.peers import PeerTable
from schemas.state import Health, ReplicaState
from tests.mesh.core.build import AP, EU, US, beat, core, digest, foreign, request

SETTINGS = RouterSettings()
TICK_S = 0.05
USUAL_S, REST_S = SETTINGS.digest_s, SETTINGS.digest_rest_s
MORE_S = REST_S - USUAL_S


class Region:
    """The router of us with two replicas; peers eu and ap say what `peers` has."""

    def __init__(self, **peers) -> None:
        self.peers = peers
        self.router = core(peers=(EU, AP))
        self.now, self.seq = 100.0, 0
        self.names = ("a", "b")
        self.busy = 0  # requests in a replica, of a sibling's
        self.digests = []  # and when each left
        self.writes, self.writes_ever = 0, 1  # of the region's lease

    def feed(self, event) -> None:
        effects = self.router.handle(event, self.now)
        for claim in [effect for effect in effects if isinstance(effect, fx.ClaimLease)]:
            if claim.lease.region == US:
                self.writes += 1
                self.feed(ev.LeaseAnswered(claim.number, granted=True, seq=self.writes_ever))
                self.writes_ever += 1
        told = [effect.digest for effect in effects if isinstance(effect, fx.PublishDigest)]
        self.digests += [(self.now, digest) for digest in told]

    def live(self, seconds) -> int:
        """Let time pass. How many digests left meanwhile."""
        known = len(self.digests)
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.seq += 1
            for name in self.names:
                self.feed(ev.HeartbeatSeen(beat(name, self.seq, outstanding=self.busy)))
            for region, said_s in self.peers.items():
                self.feed(ev.DigestSeen(digest(region, self.seq, next_within_s=said_s)))
            self.feed(ev.Tick())
        return len(self.digests) - known


@pytest.fixture
def region() -> Region:
    region = Region(eu=0.1, ap=0.5)
    region.live(5.0)
    assert region.digests[-1][1].next_within_s == REST_S
    return region


def test_at_rest_few_leave(region) -> None:
    assert 10.0 / REST_S * 0.8 <= region.live(10.0) <= 10.0 / REST_S


def test_each_comes_within_the_time_that_the_one_before_said(region) -> None:
    region.feed(ev.RequestArrived(request(1, arrived_at=region.now)))
    region.live(2.0)
    region.feed(ev.AnswerStarted(1, 1))
    region.feed(ev.AnswerEnded(1, 1))
    region.live(5.0)
    for (before, said), (after, _) in itertools.pairwise(region.digests):
        assert after - before <= said.next_within_s + TICK_S + 1e-9
    said = {digest.next_within_s for _, digest in region.digests}
    assert said == {USUAL_S, 2 * USUAL_S, 4 * USUAL_S, REST_S}


def test_at_rest_the_lease_is_renewed_half_as_often(region) -> None:
    def writes(seconds) -> int:
        region.writes = 0
        region.live(seconds)
        return region.writes

    assert 7 <= writes(4.0) <= 8
    region.busy = 1
    region.live(1.0)
    assert 13 <= writes(4.0) <= 16


def own_request(region) -> None:
    region.feed(ev.RequestArrived(request(1, arrived_at=region.now)))


def peers_request(region) -> None:
    region.feed(ev.RequestArrived(foreign(1, arrived_at=region.now)))


def siblings_request(region) -> None:
    region.busy = 1


def a_replica_drains(region) -> None:
    drains = beat("a", region.seq + 1, state=ReplicaState.DRAINING)
    region.feed(ev.HeartbeatSeen(drains))


def a_peer_starts(region) -> None:
    region.feed(ev.DigestSeen(digest("eu", router="new", next_within_s=0.1)))


def a_peer_of_the_last_release_starts(region) -> None:
    """It would take a region for silent after three digests of its time."""
    region.feed(ev.DigestSeen(digest("eu", router="old")))


def bus_away(region) -> None:
    region.feed(ev.BusLost())
    region.feed(ev.BusReturned())


@pytest.mark.parametrize(
    "change",
    [
        *(own_request, peers_request, siblings_request, a_replica_drains, bus_away),
        *(a_peer_starts, a_peer_of_the_last_release_starts),
    ],
)
def test_a_change_is_told_at_once(region, change) -> None:
    while region.now - region.digests[-1][0] < 2 * USUAL_S:
        region.live(TICK_S)
    change(region)
    assert region.live(2 * TICK_S) >= 1
    assert region.digests[-1][1].next_within_s == USUAL_S
    assert region.live(1.0) >= 4, "and soon again, should that one be lost"


@pytest.mark.parametrize("comes", [own_request, peers_request, bus_away])
def test_what_comes_ends_the_rest_before_a_digest_says_so(region, comes) -> None:
    """A request may be over before the next tick, and yet change what peers are to be told."""
    assert region.router.is_at_rest
    comes(region)
    region.feed(ev.ClientGone(1))
    assert not region.router.inflight and not region.router.is_at_rest


def test_a_replica_that_is_lost_is_told_at_once(region) -> None:
    region.names = ("a",)
    while region.router.replicas.get("b") is not None:
        region.live(TICK_S)
    lost_at = region.now
    region.live(2 * TICK_S)
    told_at, told = region.digests[-1]
    assert told_at <= lost_at + 2 * TICK_S and told.replicas_ready == 1


@pytest.mark.parametrize(("eu", "slows"), [(0.1, True), (None, False)])
def test_it_slows_down_while_all_who_hear_it_read_when_the_next_comes(eu, slows) -> None:
    region = Region(eu=eu, ap=0.1)
    region.live(10.0)
    assert (region.live(6.0) <= 6.0 / REST_S) is slows


def test_without_peers_it_slows_down() -> None:
    region = Region()
    region.live(10.0)
    assert region.live(6.0) <= 6.0 / REST_S


@pytest.mark.parametrize(("said_s", "more_s"), [(REST_S, MORE_S), (USUAL_S, 0.0), (None, 0.0)])
def test_silence_counts_from_when_the_next_one_was_due(said_s, more_s) -> None:
    table = PeerTable(SETTINGS, US)
    table.see(digest("eu", next_within_s=said_s), 0.0)
    late_s, lost_s = SETTINGS.digest_late_s + more_s, SETTINGS.digest_lost_s + more_s
    peer = table.get(EU)
    found = [table.health(peer, s) for s in (late_s - 0.01, late_s + 0.01, lost_s + 0.01)]
    assert found == [Health.GREEN, Health.YELLOW, Health.RED]
    table.expire(lost_s - 0.01)
    assert peer.digests
    table.expire(lost_s + 0.01)
    assert not peer.digests


@pytest.mark.parametrize(("after_s", "lost"), [(REST_S, False), (MORE_S + 0.26, True)])
def test_digests_are_missed_when_they_were_due(after_s, lost) -> None:
    table = PeerTable(SETTINGS, US)
    table.see(digest("eu", 1, next_within_s=REST_S), 0.0)
    assert table.see(digest("eu", 3), after_s) is lost


def test_a_region_that_rests_is_not_taken_for_gone() -> None:
    region = Region()
    region.feed(ev.Tick())
    ownership = region.router.state.ownership
    ownership.digest_seen(digest("eu", next_within_s=REST_S), region.now)
    silent_s = SETTINGS.lease_s / 2 + MORE_S
    assert ownership._is_living(EU, region.now + silent_s - 0.01)
    assert not ownership._is_living(EU, region.now + silent_s + 0.01)
