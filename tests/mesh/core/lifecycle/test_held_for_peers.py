"""Peers' requests that wait in this region's line."""

import pytest

from mesh.core.lifecycle.forwarded import HELD_MAX
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.requests.fair_shares import Placed
from schemas.exchange import HELD_S, Refusal
from schemas.state import ModelCapacity, ReplicaState
from tests.mesh.core.build import AP, MODEL, ROUTER, beat, core, digest, foreign, request

BUSY = {"prefill_queued_tokens": 20_000, "pending": 4, "running": 8}  # two seconds of work
IDLE = {"prefill_queued_tokens": 0, "pending": 0, "running": 0}


class Region:
    """Region us with one replica."""

    def __init__(self, **settings):
        self.core = core(**({"policy": "mesh"} | settings))
        self.seq = 0

    def hear(self, now=0.0, **fields):
        self.seq += 1
        return self.core.handle(
            ev.HeartbeatSeen(beat("us-0", self.seq, taken={ROUTER: 99}, **fields)), now
        )

    def ask(self, asked, now=0.0):
        return self.core.handle(ev.RequestArrived(asked), now)

    def tick(self, now):
        return self.core.handle(ev.Tick(), now)


@pytest.fixture
def region():
    region = Region()
    region.hear(**BUSY)
    return region


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def placed(effects):
    return [(effect.key, effect.answer_inbox) for effect in of(fx.Dispatch, effects)]


def test_a_held_request_sends_held_until_it_is_placed(region):
    assert of(fx.TellHeld, region.ask(foreign(1))) == [fx.TellHeld("inbox-1", 1)]
    assert not of(fx.TellHeld, region.tick(HELD_S / 2))
    region.hear(HELD_S, **BUSY)
    assert of(fx.TellHeld, region.tick(HELD_S)) == [fx.TellHeld("inbox-1", 1)]
    assert placed(region.hear(HELD_S + 0.1, **IDLE)) == [(1, "inbox-1")]
    assert not region.core.inflight
    assert not of(fx.TellHeld, region.tick(3 * HELD_S))


def test_held_has_the_number_of_hops(region):
    assert of(fx.TellHeld, region.ask(foreign(1, hops=2))) == [fx.TellHeld("inbox-1", 2)]


def test_it_is_held_in_the_one_queue_by_its_arrival(region):
    """Theirs came to its own router between ours."""
    region.ask(request(1, arrived_at=-3.0))
    region.ask(request(2, arrived_at=-1.0))
    region.ask(foreign(3, arrived_at=-2.0))
    assert [key for key, _ in placed(region.hear(**IDLE))] == [1, 3, 2]


def test_it_is_refused_when_its_time_is_over(region):
    region.ask(foreign(1, deadline=0.2))
    effects = region.tick(0.3)
    assert [(r.key, r.reason) for r in of(fx.RefusePeer, effects)] == [(1, Refusal.NO_REPLICA)]
    assert not of(fx.Fail, effects)
    assert not len(region.core.held)


def test_it_is_refused_when_it_was_held_for_the_limit():
    region = Region(hold_s_max=0.5)
    region.hear(**BUSY)
    region.ask(foreign(1))
    region.hear(0.6, **BUSY)
    assert [effect.key for effect in of(fx.RefusePeer, region.tick(0.6))] == [1]


def test_its_hold_at_home_counts_for_the_limit():
    region = Region(hold_s_max=5.0)
    region.hear(**BUSY)
    region.ask(foreign(1, held_before_s=4.6))
    region.hear(0.3, **BUSY)
    assert not of(fx.RefusePeer, region.tick(0.3))
    assert [effect.key for effect in of(fx.RefusePeer, region.tick(0.5))] == [1]


def test_an_objective_that_cannot_be_met_any_more_is_refused(region):
    assert of(fx.TellHeld, region.ask(foreign(1, slo_ttft_s=30.0)))
    region.hear(29.8, **BUSY)
    assert not of(fx.RefusePeer, region.tick(29.9))
    region.hear(30.0, **BUSY)
    assert [effect.key for effect in of(fx.RefusePeer, region.tick(30.1))] == [1]


def test_it_goes_no_further_whatever_its_hops_say(region):
    region.core.handle(ev.DigestSeen(digest("ap", free=4)), 0.0)
    for key, hops in enumerate((0, 1, 2)):
        assert of(fx.TellHeld, region.ask(foreign(key, hops=hops)))
    assert not of(fx.Forward, region.tick(0.1))


def digest_of(region, wait_s):
    """Of a region with one replica, whose queue takes so long; ours takes two seconds."""
    capacity = ModelCapacity(ready=1, free=1, wait_s=wait_s, running=0.0)
    return digest(region, models={MODEL: capacity}, prefill_s_per_token=1e-4)


def handed_back(effects):
    return [(r.key, r.answer_inbox) for r in of(fx.RefusePeer, effects) if r.reason == "elsewhere"]


@pytest.mark.parametrize("sooner", ["ap", "eu"], ids=["a third region", "its own region"])
def test_it_is_handed_back_once_another_region_serves_it_sooner(region, sooner):
    region.ask(foreign(1))
    assert not handed_back(region.tick(0.2)), "no other region is known"
    effects = region.core.handle(ev.DigestSeen(digest_of(sooner, 0.0)), 0.3)
    assert handed_back(effects) == [(1, "inbox-1")]
    assert not of(fx.Forward, effects)
    assert not region.core.inflight
    assert not len(region.core.held)
    assert not of(fx.TellHeld, region.tick(2 * HELD_S))


def test_a_tenants_that_was_given_more_than_others_here_is_not_handed_back(region):
    """Its own region sent it for its other tenants' sake, and would send it again."""
    region.ask(foreign(1, tenant="acme"))
    region.ask(foreign(2, tenant="beta"))
    shares = region.core.state.shares[MODEL]
    shares.placed(9, Placed("acme", 9e6, 0.0, 1e-4), is_followed=False)
    effects = region.core.handle(ev.DigestSeen(digest_of("eu", 0.0)), 0.3)
    assert handed_back(effects) == [(2, "inbox-2")]
    assert [one.key for one in region.core.held] == [1]


@pytest.mark.parametrize("wait_s", [1.1, 9.0], ids=["a little sooner", "later"])
def test_it_stays_where_no_other_region_serves_it_clearly_sooner(region, wait_s):
    """A round trip that is not measured yet counts as half a second."""
    region.ask(foreign(1))
    assert not handed_back(region.core.handle(ev.DigestSeen(digest_of("ap", wait_s)), 0.1))
    assert placed(region.hear(0.2, **IDLE)) == [(1, "inbox-1")]


@pytest.mark.parametrize("wait_s", [0.0, 50.0])
def test_it_is_not_handed_back_while_no_replica_here_can_be_compared(region, wait_s):
    region.core.handle(ev.DigestSeen(digest_of("ap", 50.0)), 0.0)
    region.ask(foreign(1))
    region.hear(0.1, **BUSY, full=True, outstanding=256)
    assert not handed_back(region.core.handle(ev.DigestSeen(digest_of("ap", wait_s)), 0.2))
    assert not handed_back(region.tick(1.0)), "its heartbeat is late"
    assert placed(region.hear(1.1, **IDLE)) == [(1, "inbox-1")]


def test_it_is_not_handed_back_by_a_region_that_looks_at_no_peers():
    region = Region(hops_max=0)
    region.hear(**BUSY)
    assert of(fx.TellHeld, region.ask(foreign(1)))
    assert not handed_back(region.core.handle(ev.DigestSeen(digest_of("ap", 0.0)), 0.1))


def test_it_is_not_handed_back_by_a_policy_that_prices_nothing(region):
    region.ask(foreign(1))
    region.hear(0.1, **BUSY, full=True)
    region.core.handle(ev.SettingsChanged(RouterSettings(policy="least-load")), 0.1)
    assert not handed_back(region.core.handle(ev.DigestSeen(digest_of("ap", 0.0)), 0.2))
    assert placed(region.hear(0.3, **IDLE)) == [(1, "inbox-1")]


def test_what_was_handed_back_is_placed_anew_at_home():
    home = Region()
    home.hear(**BUSY)
    home.core.handle(ev.DigestSeen(digest_of("ap", 0.0)), 0.0)
    [sent] = of(fx.Forward, home.ask(request(1)))
    assert sent.peer == AP
    home.hear(0.5, **IDLE)
    refused = ev.AttemptRefused(1, sent.attempt, Refusal.ELSEWHERE, AP, None, -1, -1)
    assert placed(home.core.handle(refused, 0.5)) == [(1, None)]


def test_a_peers_held_request_does_not_block_forwarding(region):
    region.ask(foreign(1))
    region.core.handle(ev.HeartbeatSeen(beat("us-0", 9, state=ReplicaState.DRAINING)), 0.1)
    region.ask(request(2), 0.1)
    effects = region.core.handle(ev.DigestSeen(digest("ap", free=4)), 0.2)
    assert [effect.key for effect in of(fx.Forward, effects)] == [2]


def test_peers_held_requests_are_refused_when_the_router_drains(region):
    region.ask(foreign(1))
    region.ask(request(2))
    refused = of(fx.RefusePeer, region.core.handle(ev.Drain(), 0.1))
    assert [(effect.key, effect.reason) for effect in refused] == [(1, Refusal.DRAINING)]
    assert list(region.core.inflight) == [2]


def test_only_so_many_wait_here(region):
    for key in range(HELD_MAX):
        assert of(fx.TellHeld, region.ask(foreign(key)))
    assert [effect.key for effect in of(fx.RefusePeer, region.ask(foreign(999)))] == [999]


def test_a_full_queue_takes_no_peers_requests():
    region = Region(hold_max=1)
    region.hear(**BUSY)
    region.ask(request(1))
    assert of(fx.RefusePeer, region.ask(foreign(2)))


def test_a_draining_router_takes_no_peers_requests(region):
    region.core.handle(ev.Drain(), 0.0)
    assert [effect.reason for effect in of(fx.RefusePeer, region.ask(foreign(1)))] == [
        Refusal.DRAINING
    ]


def test_a_peers_request_held_when_the_bus_returns_stays_held(region):
    region.ask(foreign(1))
    region.core.handle(ev.BusReturned(), 0.1)
    assert placed(region.hear(0.2, **IDLE)) == [(1, "inbox-1")]


def test_the_limit_of_waiting_includes_a_peers_wait_at_home():
    region = Region(queue_delay_s_max=10.0)
    region.hear(**BUSY)
    for key in (1, 2):
        assert of(fx.TellHeld, region.ask(foreign(key), 0.0))
    now = 10.5  # none was released: the first one's wait counts for the queue
    region.hear(now, **BUSY)
    refused = of(fx.RefusePeer, region.ask(foreign(3, arrived_at=now), now))
    assert [(r.key, r.reason) for r in refused] == [(3, Refusal.NO_REPLICA)]
    assert of(fx.TellHeld, region.ask(foreign(4, arrived_at=-20.0), now)), "it goes first"
    tried = foreign(6, arrived_at=-10.0)
    assert of(fx.TellHeld, region.ask(tried, now)), "its failed attempt was no wait"
    waited = foreign(5, arrived_at=-10.0, held_before_s=20.5)
    assert of(fx.RefusePeer, region.ask(waited, now)), "it has waited"
