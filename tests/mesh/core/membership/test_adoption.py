"""Who owns whose replicas: stories of single routers, and whole meshes under every fault.

A failing seed is printed with its faults; `LeaseWorld(seed, …)` plays it again.
"""

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from mesh.core.membership.adoption import START_LEASES
from mesh.core.membership.lease import GUARD
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.requests.record import RequestState
from schemas.ids import RegionId, RouterId
from schemas.residency import ground
from schemas.state import Digest, Lease
from tests.mesh.core import build
from tests.mesh.core.build import AP, EU, US
from tests.mesh.core.lease_world import LEASE_S, LeaseWorld, faults
from tests.mesh.core.pair_region import part

REGIONS = (US, EU, AP)
STEP_S = 0.05


class Stage:
    """The router of us, never at rest, with peers eu and ap; what it claims, and what it publishes.

    ap says that it is 50 ms from eu.
    """

    def __init__(self, eu_rtt_s: float = 0.01, **fields: object) -> None:
        self.now = 100.0
        self.core = build.core(peers=(EU, AP), digest_rest_s=0.1, **fields)
        self.claims: list[fx.ClaimLease] = []
        self.changes: list[tuple[str, bool]] = []
        self.told: list[Digest] = []
        self.digests = 0
        self.feed(ev.RttMeasured(EU, eu_rtt_s))

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.core.handle(event, self.now)
        self.claims += [effect for effect in effects if isinstance(effect, fx.ClaimLease)]
        self.told += [e.digest for e in effects if isinstance(e, fx.PublishDigest)]
        self.changes += [
            (effect.region, effect.owned)
            for effect in effects
            if isinstance(effect, fx.OwnershipChanged)
        ]
        return effects

    def spend(self, seconds: float, *living: RegionId) -> list[fx.ClaimLease]:
        """Ticks and the digests of those living; returns claims for other regions than us."""
        self.claims.clear()
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.digests += 1
            for region in living:
                self.feed(ev.DigestSeen(build.digest(region, self.digests, rtt_s={EU: 0.05})))
            self.feed(ev.Tick())
        return [claim for claim in self.claims if claim.lease.region != US]

    def hear(self, region: RegionId, owner: RegionId, term: int, seq: int) -> None:
        lease = Lease(region=region, owner=owner, router=RouterId("r1"), term=term, lease_s=1.0)
        self.feed(ev.LeaseHeard(lease, seq))

    def answer(self, claim: fx.ClaimLease, *, granted: bool, seq: int | None) -> None:
        self.feed(ev.LeaseAnswered(claim.number, granted, seq))

    def adopt_eu(self) -> None:
        """eu fell silent and its lease was ours to take."""
        self.spend(1.0, EU, AP)
        self.hear(EU, EU, 3, 8)
        *_, claim = self.spend(1.25, AP)
        self.answer(claim, granted=True, seq=9)
        assert self.core.ownership.adopted == {EU: claim.lease.term}


def test_an_adopted_decode_replica_answers_whole_requests_alone():
    """One that answers none alone, and one that does; a prefill replica is at home."""
    for kind, gets in (("nixl", (None, "d")), ("sglang", (None, None))):
        stage = Stage(policy="least-load")
        stage.adopt_eu()
        decode = part("decode", kind)
        beats = [
            build.beat("p", 1, kv=part("prefill", kind), models=()),
            build.beat("d", 1, region=EU, kv=decode, models=(build.MODEL,) if decode.whole else ()),
        ]
        for beat in beats:
            stage.feed(ev.HeartbeatSeen(beat))
        effects = stage.feed(ev.RequestArrived(build.request(1, "", stage.now)))
        assert not [one for one in effects if isinstance(one, fx.DispatchPrefill)]
        sent = [one for one in effects if isinstance(one, fx.Dispatch)]
        assert [(one.pair, one.replica) for one in sent] == ([gets] if gets[1] else [])


def test_a_router_without_peers_or_with_a_lease_of_nothing_claims_nothing():
    for core in (build.core(), build.core(lease_s=0.0, peers=(EU,))):
        effects = core.handle(ev.Tick(), 1.0)
        assert not [effect for effect in effects if isinstance(effect, fx.ClaimLease)]


def test_home_is_claimed_at_the_first_tick_from_any_owner():
    stage = Stage()
    stage.feed(ev.Tick())
    [first] = stage.claims
    assert (first.expected, first.lease.owner, first.lease.region) == (0, US, US)
    stage.answer(first, granted=False, seq=17)
    second = stage.claims[-1]
    assert (second.expected, second.lease.term) == (17, 18)
    stage.answer(second, granted=True, seq=18)
    assert stage.core.ownership.owned == {US: 18}
    assert stage.changes == [("us", True)]


def test_home_is_renewed_four_times_a_lease_by_one_of_its_routers():
    stage = Stage()
    stage.feed(ev.Tick())
    stage.answer(stage.claims[0], granted=True, seq=1)
    stage.claims.clear()
    for seq in range(2, 40):  # a sibling renews
        stage.now += 0.2
        stage.hear(US, US, 1, seq)
        stage.feed(ev.Tick())
    assert [claim for claim in stage.claims if claim.lease.region == US] == []
    stage.spend(0.3)
    assert [claim.expected for claim in stage.claims if claim.lease.region == US] == [39]


def test_a_region_whose_digests_or_whose_lease_goes_on_is_not_claimed():
    stage = Stage()
    assert stage.spend(5.0, EU, AP) == []  # no lease was ever seen, but digests are
    for seq in range(1, 100):
        stage.hear(EU, EU, 1, seq)
        assert stage.spend(0.25, AP) == []


def test_a_region_that_is_silent_with_a_lapsed_lease_is_claimed():
    stage = Stage()
    stage.spend(1.0, EU, AP)
    stage.hear(EU, EU, 3, 8)
    assert stage.spend(LEASE_S - STEP_S, AP) == []
    [claim] = stage.spend(0.2, AP)
    assert (claim.expected, claim.lease.owner, claim.lease.term) == (8, US, 9)


def test_a_nearer_living_region_goes_first():
    stage = Stage(eu_rtt_s=0.2)
    stage.spend(1.0, EU, AP)
    stage.hear(EU, EU, 3, 8)
    assert stage.spend(LEASE_S + 0.1, AP) == []
    assert len(stage.spend(0.2, AP)) == 1
    alone = Stage(eu_rtt_s=0.2)
    alone.spend(1.0, EU, AP)
    alone.spend(0.6, EU)  # ap is gone, too
    alone.hear(EU, EU, 3, 8)
    assert EU in [claim.lease.region for claim in alone.spend(LEASE_S + 0.1)]


def test_a_router_that_has_just_started_waits_for_the_others_digests():
    stage = Stage()
    assert stage.spend(START_LEASES * LEASE_S - 0.1) == []
    assert {claim.lease.region for claim in stage.spend(1.0)} == {EU, AP}


def test_a_claim_without_an_answer_is_repeated_and_adopts_nothing():
    stage = Stage()
    stage.spend(1.0, EU, AP)
    [claim] = stage.spend(1.0, AP)
    stage.answer(claim, granted=False, seq=None)
    assert stage.core.ownership.adopted == {}
    assert len(stage.spend(0.4, AP)) == 1


def test_after_a_refusal_a_whole_lease_must_pass_without_a_write():
    stage = Stage()
    stage.spend(1.0, EU, AP)
    [claim] = stage.spend(1.0, AP)
    stage.answer(claim, granted=False, seq=5)
    assert stage.spend(LEASE_S - 0.1, AP) == []
    assert [claim.expected for claim in stage.spend(0.3, AP)] == [5]


def test_an_adopter_hands_work_over_in_its_own_name_and_under_its_term():
    stage = Stage(policy="least-load")
    stage.adopt_eu()
    beat = build.beat("eu-0", region=EU, owner=US, owner_taken={"r1": 3}, taken={"r1": 99})
    stage.feed(ev.HeartbeatSeen(beat))
    effects = stage.feed(ev.RequestArrived(build.request(1, arrived_at=stage.now)))
    [dispatch] = [effect for effect in effects if isinstance(effect, fx.Dispatch)]
    assert (dispatch.region, dispatch.replica, dispatch.term) == (EU, "eu-0", 9)
    assert [e.decision.replica for e in effects if isinstance(e, fx.Decided)] == ["eu/eu-0"]
    assert stage.told[-1].adopted == {EU: 9} and stage.told[-1].replicas_ready == 1


def test_heartbeats_of_a_region_that_is_not_ours_are_not_listened_to():
    stage = Stage()
    stage.feed(ev.HeartbeatSeen(build.beat("eu-0", region=EU)))
    assert list(stage.core.replicas) == []


@pytest.mark.parametrize("why", ["taken", "lapsed", "back for a lease", "draining"])
def test_an_adopter_lets_go(why):
    stage = Stage()
    stage.adopt_eu()
    stage.feed(ev.HeartbeatSeen(build.beat("eu-0", region=EU, owner=US)))
    if why == "taken":
        stage.hear(EU, EU, 12, 10)
    elif why == "lapsed":
        stage.now += GUARD * LEASE_S + 1.0
        stage.feed(ev.RequestArrived(build.request(1, arrived_at=stage.now)))
    elif why == "draining":
        stage.feed(ev.Drain())
        stage.spend(STEP_S, AP)
    else:
        for seq in range(10, 100):  # its routers are back, and know nothing of leases
            claims = stage.spend(STEP_S, EU, AP)
            for claim in claims:
                stage.answer(claim, granted=True, seq=seq)
            if not stage.core.ownership.adopted:
                break
        assert seq - 10 == pytest.approx(LEASE_S / STEP_S, abs=2)
    assert stage.core.ownership.adopted == {} and list(stage.core.replicas) == []
    assert stage.changes[-1] == ("eu", False)
    assert stage.core.ownership.hand_backs == 1


def test_what_runs_there_goes_on_as_if_its_own_region_had_placed_it():
    stage = Stage(policy="least-load")
    stage.adopt_eu()
    stage.feed(ev.HeartbeatSeen(build.beat("eu-0", region=EU, owner=US)))
    stage.feed(ev.RequestArrived(build.request(1, arrived_at=stage.now)))
    stage.hear(EU, EU, 12, 10)
    record = stage.core.inflight[1]
    assert (record.peer, record.replica, record.state) == (EU, "eu-0", RequestState.TRIED)
    stage.spend(1.5, EU, AP)
    assert 1 in stage.core.inflight, "it was not reported lost"
    effects = stage.feed(ev.ClientGone(1))
    [cancel] = [effect for effect in effects if isinstance(effect, fx.CancelAttempt)]
    assert (cancel.region, cancel.replica) == (EU, "eu-0")


def test_a_refused_renewal_waits_for_the_stream_to_report_the_writer():
    stage = Stage()
    stage.adopt_eu()
    [renewal] = [claim for claim in stage.spend(0.45, AP) if claim.lease.region == EU]
    stage.answer(renewal, granted=False, seq=10)
    assert EU in stage.core.ownership.adopted, "it may have been a sibling"
    assert stage.spend(0.1, AP) == [], "and it does not take it from the region itself"
    stage.hear(EU, US, 9, 10)
    assert [claim.expected for claim in stage.claims] == [10]


def test_our_own_replicas_get_nothing_while_a_peer_owns_them():
    stage = Stage(policy="least-load")
    stage.feed(ev.HeartbeatSeen(build.beat("us-0")))
    stage.hear(US, EU, 5, 5)
    stage.feed(ev.Tick())
    stage.feed(ev.RequestArrived(build.request(1, arrived_at=stage.now)))
    assert len(stage.core.held) == 1
    [claim] = [claim for claim in stage.claims if claim.expected == 5]
    stage.answer(claim, granted=True, seq=6)
    effects = [*stage.feed(ev.Tick())]
    assert [e.term for e in effects if isinstance(e, fx.Dispatch)] == [6]


# Whole meshes.


def test_one_adopts_within_two_seconds_and_gives_back_within_a_lease():
    world = LeaseWorld(1, REGIONS)
    world.run(4.0)
    world.crash_all(US)
    world.run(2.0)
    assert len(world.adopters(US)) == 1
    world.start_all(US)
    world.run(0.5)
    assert world.home_owns(US) and world.adopters(US) == set()


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3]))
def test_whatever_happens_no_two_own_one_region_and_in_the_end_all_is_well(seed, size):
    world = LeaseWorld(seed, REGIONS, routers_each=size)
    world.loss, world.jitter_s = world.dice.choice((0.0, 0.05, 0.3)), world.dice.choice((0.0, 0.1))
    world.run(4.0)
    for fault in faults(world, 8.0):
        note(fault)
    world.run(8.5)
    world.heal_all()
    for region in REGIONS:
        world.start_all(region)
    world.run(4.0)
    for region in REGIONS:
        assert world.home_owns(region) and not world.adopters(region)
    lost = world.dice.sample(REGIONS, world.dice.choice((1, 2)))
    for region in lost:
        world.crash_all(region)
    world.run(2.0)
    for region in lost:
        assert len(world.adopters(region)) == 1, f"{region} was not adopted in 2 s"
        world.start_all(region)
    world.run(1.0)
    for region in lost:
        assert world.home_owns(region) and not world.adopters(region)
        world.run(0.2)
        assert len(world.terms(region)) == 1


CARRIED = {US: ("us",), EU: ("eu",), AP: ("eu",)}


def test_who_may_send_nothing_to_a_region_does_not_claim_it():
    stage = Stage(ground=ground(CARRIED, {US: ("us",)}))
    stage.spend(1.0, EU, AP)
    stage.hear(EU, EU, 3, 8)
    assert stage.spend(10 * LEASE_S, AP) == []
    carries_both = Stage(ground=ground(CARRIED | {US: ("eu", "us")}, {US: ("eu",)}))
    carries_both.spend(1.0, EU, AP)
    carries_both.hear(EU, EU, 3, 8)
    assert carries_both.spend(LEASE_S + 0.2, AP) != []


def test_a_nearer_region_that_may_send_nothing_there_is_not_waited_for():
    free = ground(CARRIED | {AP: ("ap",)}, {AP: ("ap",)})
    stage = Stage(eu_rtt_s=0.2, ground=free)
    stage.spend(1.0, EU, AP)
    stage.hear(EU, EU, 3, 8)
    assert len(stage.spend(LEASE_S + 0.1, AP)) == 1
