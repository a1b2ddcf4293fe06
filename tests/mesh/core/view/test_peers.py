"""Peers: when a region may be asked, and what is forgotten of it."""

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.core.view import peers as module
from mesh.core.view.peers import Peer, PeerTable
from schemas.ids import ModelId, RouterId
from schemas.listed_replicas import ListedReplicas
from schemas.state import Health, ModelCapacity
from tests.mesh.core.build import AP, EU, MODEL, US, digest


@pytest.fixture
def table():
    return PeerTable(RouterSettings(), US)


def why(table, now=0.0, model=MODEL):
    return table.unavailable_because(table.get(EU), model, now)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"free": 0}, "full"),
        ({"queue": 10}, None),
        ({"queue": 11}, "queue"),
        ({"accepting": False}, "draining"),
        ({"ready": 0, "free": 0}, "no ready replica of this model"),
        ({"models": {}}, "no ready replica of this model"),
    ],
)
def test_a_digest_decides_whether_a_region_is_available(table, fields, reason):
    table.see(digest("eu", **fields), 0.0)
    assert why(table) == reason


@pytest.mark.parametrize(
    ("seq", "at", "are_lost"),
    [
        (2, 10.1, False),
        (2, 10.9, False),  # late
        (4, 10.2, False),  # others were sent those between
        (4, 10.4, True),
        (4, 12.0, True),
    ],
)
def test_missing_digests_show_that_a_link_was_lost(table, seq, at, are_lost):
    assert not table.see(digest("eu"), 9.0), "the first is none that is late"
    assert not table.see(digest("eu", seq=1, router=RouterId("r2")), 10.0), "nor a new router's"
    table.see(digest("eu", seq=1), 10.0)
    assert table.see(digest("eu", seq=seq, router=RouterId("r2")), at) is are_lost


def test_a_region_that_is_heard_again_had_lost_its_link(table):
    table.see(digest("eu"), 0.0)
    table.expire(2.0)
    assert table.see(digest("eu", seq=9), 2.0)


def test_other_models_are_another_question(table):
    table.see(digest("eu"), 0.0)
    assert why(table, model=ModelId("other")) == "no ready replica of this model"


def test_a_silent_region_is_not_asked(table):
    table.see(digest("eu"), 0.0)
    assert why(table, 1.0) is None
    assert why(table, 1.01) == "silent"


def test_round_trips_hold_until_the_next_ones(table):
    def told(seq, **fields):
        table.see(digest("eu", seq, **fields), 0.0)
        return [one.rtt_s for one in table.get(EU).seldom_sent.values()]

    assert told(1) == [{}]
    assert told(2, rtt_s={AP: 0.2}) == [{AP: 0.2}]
    assert told(3) == told(4) == [{AP: 0.2}]
    assert told(5, rtt_s={AP: 0.3}) == [{AP: 0.3}]


def test_what_was_forwarded_fills_the_free_replicas(table):
    table.measured(EU, 0.1)
    table.see(digest("eu", free=2), 0.0)
    table.forwarded(EU, 0.01)
    assert why(table) is None
    table.forwarded(EU, 0.02)
    assert why(table) == "full"
    table.see(digest("eu", 2, free=2), 0.105)
    assert why(table, 0.105) == "full"  # it left before either had arrived
    table.see(digest("eu", 3, free=2), 0.115)
    assert why(table, 0.115) is None


def test_an_unknown_round_trip_is_not_a_short_one(table):
    table.see(digest("eu", free=1), 0.0)
    table.forwarded(EU, 0.0)
    table.see(digest("eu", 2, free=1), 0.9)
    assert why(table, 0.9) == "full"
    table.see(digest("eu", 3, free=1), 1.1)
    assert why(table, 1.1) is None


def test_a_refusal_holds_until_the_next_digest(table):
    table.see(digest("eu"), 0.0)
    table.refused(EU, 0.0)
    assert why(table) == "refused"
    table.see(digest("eu"), 0.0)  # the same again
    assert why(table) == "refused"
    table.see(digest("eu", 2), 0.0)
    assert why(table) is None


def test_several_routers_speak_for_one_region(table):
    table.see(digest("eu", free=1, queue=6, router="r1"), 0.0)
    table.see(digest("eu", free=3, queue=4, router="r2", accepting=False), 0.0)
    peer = table.get(EU)
    assert (peer.free(MODEL), peer.ready(MODEL), peer.queue, peer.accepting) == (3, 4, 10, True)


def test_a_router_that_left_is_forgotten_while_others_speak(table):
    table.see(digest("eu", free=0, queue=50, router="gone"), 0.0)
    table.see(digest("eu", free=1, router="r1"), 0.9)
    assert why(table, 0.9) == "queue"
    table.expire(1.1)
    assert why(table, 1.1) is None


def test_a_region_that_fell_silent_is_forgotten(table):
    table.see(digest("eu"), 0.0)
    table.forwarded(EU, 0.0)
    table.expire(1.1)
    peer = table.get(EU)
    assert (peer.digests, peer.silent_from, list(peer.forwarded_at)) == ({}, {}, [])


def test_older_digests_change_nothing(table):
    table.see(digest("eu", 5, free=0), 0.0)
    table.see(digest("eu", 4, free=4), 0.5)
    table.see(digest("eu", 9, free=4, epoch=0), 0.5)
    assert why(table, 0.5) == "full"
    assert table.get(EU).seen_at == 0.0
    table.see(digest("eu", 1, free=4, epoch=2), 0.5)
    assert why(table, 0.5) is None


def test_pings_say_how_far_it_is_and_how_many_are_lost(table):
    table.see(digest("eu"), 0.0)
    peer = table.get(EU)
    assert (peer.rtt_s, peer.pings.loss_ratio) == (None, None)
    for rtt_s in (0.08, None, 0.08, 0.08):
        table.measured(EU, rtt_s)
    assert (peer.rtt_s, peer.pings.loss_ratio) == (0.08, 0.25)


def test_a_peer_is_green_then_yellow_then_red_and_a_false_down_heals_itself(table):
    def colour(now):
        return table.health(table.get(EU), now)

    table.measured(EU, 0.08)
    assert colour(0.0) is Health.RED  # it has said nothing yet
    table.see(digest("eu", 7, epoch=3), 0.0)
    assert [colour(at) for at in (0.1, 0.36, 1.0, 1.01)] == [
        Health.GREEN,
        Health.YELLOW,
        Health.YELLOW,
        Health.RED,
    ]
    table.expire(1.2)
    table.see(digest("eu", 19, epoch=3), 5.0)  # it lived all the time
    assert (colour(5.0), why(table, 5.0)) == (Health.GREEN, None)


def test_a_digest_of_an_earlier_epoch_does_not_count(table):
    table.see(digest("eu", 1, epoch=4), 0.0)
    table.see(digest("eu", 99, epoch=3), 0.9)
    assert table.health(table.get(EU), 0.9) is Health.YELLOW


def test_after_a_silence_any_epoch_counts(table):
    table.see(digest("eu", 500, epoch=1_700_000_000_000), 0.0)
    table.expire(1.1)
    table.see(digest("eu", 1, epoch=5), 1.2)  # a clock that was set back by decades
    assert (table.health(table.get(EU), 1.2), why(table, 1.2)) == (Health.GREEN, None)


def test_the_tables_have_limits(table, monkeypatch):
    monkeypatch.setattr(module, "PEERS_MAX", 1)
    monkeypatch.setattr(module, "ROUTERS_MAX", 2)
    for number in range(4):
        table.see(digest("eu", router=f"r{number}"), 0.0)
    table.see(digest("ap"), 0.0)
    table.measured(AP, 0.1)
    assert [name for name, _ in table] == [EU]
    assert list(table.get(EU).digests) == list(table.get(EU).silent_from) == ["r0", "r1"]


def test_a_policy_that_judges_load_gets_the_other_reasons(table):
    def why(now=0.0, model=MODEL):
        return table.unavailable_because(table.get(EU), model, now, busy_too=True)

    table.see(digest("eu", free=0, queue=99), 0.0)
    assert why() is None
    assert why(model=ModelId("other")) == "no ready replica of this model"
    assert why(1.01) == "silent"
    table.refused(EU, 0.0)
    assert why() == "refused"
    table.see(digest("eu", 2, accepting=False), 0.0)
    assert why() == "draining"


def test_several_routers_of_a_region_tell_of_the_same_replicas():
    peer = Peer()
    assert (peer.wait_s(MODEL), peer.running(MODEL), peer.ready(MODEL)) == (None, None, 0)
    for number, (wait_s, running) in enumerate([(None, 1.0), (0.5, 3.0), (0.2, 2.0)]):
        capacity = ModelCapacity(ready=4, free=number, wait_s=wait_s, running=running)
        name = RouterId(f"r{number}")
        peer.digests[name] = digest(
            "eu", router=name, models={MODEL: capacity}, requests_per_s=5.0, queue=1
        )
    assert (peer.wait_s(MODEL), peer.running(MODEL)) == (0.2, 3.0)
    assert (peer.ready(MODEL), peer.free(MODEL)) == (4, 2)
    assert (peer.requests_per_s, peer.queue) == (15.0, 3)
    assert peer.wait_s(ModelId("other")) is None


def test_time_in_which_this_router_was_suspended_is_no_peers_silence(table):
    table.see(digest("eu"), 0.0)
    table.expire(60.5, paused_s=lambda since: 60.0)
    assert table.get(EU).digests
    table.expire(90.0, paused_s=lambda since: 60.0)
    assert not table.get(EU).digests


def test_the_router_heard_last_says_which_replicas_are_listed(table):
    """And not one that will be silent for longer."""
    for number, name in enumerate(("r1", "r2", "r1")):
        listed = ListedReplicas(
            names=(name,),
            wait_s=(0.0,),
            running=(0,),
            kv_free_tokens=(None,),
            prefill_s_per_token=(1e-4,),
            prefill_base_s=(None,),
        )
        models = {MODEL: ModelCapacity(ready=1, free=1, listed=(0,))}
        within = {"ny": {MODEL: ModelCapacity(ready=1, free=1)}}
        table.see(
            digest(
                "eu",
                router=RouterId(name),
                models=models,
                models_by_label=within,
                residency=("eu", "ny"),
                replicas=listed,
                seq=number + 1,
                next_within_s=0.1 if name == "r1" else 2.0,
            ),
            float(number),
        )
    table.see(digest("eu", router=RouterId("r3")), 3.0)  # which lists none
    peer = table.get(EU)
    replicas, places = peer.listed(MODEL)
    assert (replicas.names, places) == (("r1",), (0,))
    assert peer.listed(ModelId("other")) is None
    assert peer.seen_within(frozenset({"eu"})).listed(MODEL) is not None
    assert peer.seen_within(frozenset({"ny"})).listed(MODEL) is None
