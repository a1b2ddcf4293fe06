"""Warming keeps its promises whatever happens: its budget, its manners, its labels, its limits."""

import pytest

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.warming import warming
from schemas.exchange import Refusal
from schemas.gossip import TrieDelta
from schemas.state import ReplicaState
from tests.mesh.core.build import AP, EU, MODEL, US, foreign, prompt, request
from tests.mesh.core.warming.world import ABROAD, HOME, S_PER_TOKEN, SYSTEM, WARM, World


def warm_world(**settings):
    """A hot prefix is on one of two idle replicas; every request begins with it."""
    world = World(**settings)
    world.pass_time(5.0)
    world.share()
    return world


def under_way(world):
    return world.core.warming._under_way


def test_a_prefix_of_all_requests_is_computed_on_every_idle_replica_once():
    world = warm_world()
    world.pass_time(3.0)
    [opened] = world.sent()
    [dispatch] = [e for e in world.sent(fx.Dispatch) if e.key == opened.request.key]
    assert opened.request.prompt == prompt(SYSTEM, 640)
    assert dispatch.prefill_tokens == 640
    [decided] = [e for e in world.sent(fx.Decided) if e.key == opened.request.key]
    assert decided.decision.policy == "warm" and decided.decision.reason.startswith("warm")
    world.answer(opened.request.key)
    assert world.closed == [opened.request.key] and world.core.warming.counts.ended == 1
    world.pass_time(5.0)
    assert len(world.sent()) == 1, "it is there now"


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_used_ratio": 0.6},
        {"kv_used_ratio": None},
        {"outstanding": 1},
        {"running": 1},
        {"state": ReplicaState.DRAINING},
        {"prefill_s_per_token": None},
    ],
)
def test_nothing_goes_to_a_replica_that_is_busy_full_or_silent_about_it(fields):
    world = World()
    for name in world.names:
        world.fields[name] = {"kv_used_ratio": 0.1} | fields
    world.pass_time(5.0)
    world.share()
    world.pass_time(5.0)
    assert world.sent() == []


def test_no_adapter_is_loaded_for_a_warm_up():
    adapter = "sql"
    world = World()
    first, second = world.names
    world.fields[first]["models"] = (MODEL, adapter)
    world.fields[second]["loadable"] = {adapter: 0.5}
    world.pass_time(5.0)
    world.share(model=adapter)
    world.pass_time(5.0)
    assert world.sent() == []
    world.fields[second] |= {"models": (MODEL, adapter), "loadable": {}}
    world.pass_time(5.0)
    assert [one.replica for one in world.sent(fx.Dispatch) if one.key < 0] == [second]


def test_nothing_is_warmed_while_the_bus_is_away():
    world = warm_world()
    world.feed(ev.BusLost())
    for _ in range(60):
        world.now += 0.05
        world.feed(ev.Tick())
    assert world.sent() == []


def test_nothing_is_warmed_while_demand_falls():
    world = World(warm_trend_s=20.0)
    world.pass_time(1.0)
    for _ in range(100):
        world.ask("short")
        world.answer(world.key)
        world.pass_time(0.1)
    world.pass_time(10.0)
    world.share(times=3)
    world.pass_time(5.0)
    assert world.sent() == []


def test_a_request_on_its_replica_or_held_stops_it():
    world = warm_world()
    world.pass_time(3.0)
    [key] = under_way(world)
    [name] = [name for name, load in world.inside.items() if key in load]
    for _ in range(40):  # until one of them goes there, or none has room
        world.ask(world.unlike())
        if not under_way(world):
            break
    assert key in world.closed and key not in world.inside[name]
    [cancel] = [e for e in world.sent(fx.CancelAttempt) if e.key == key]
    assert cancel.replica == name
    assert world.core.warming.counts.stopped == 1


def test_no_request_waits_behind_it():
    world = warm_world()
    for name in world.names:
        world.fields[name]["state"] = ReplicaState.DOWN
    world.pass_time(0.2)
    world.ask("other")
    assert len(world.core.held) == 1
    for name in world.names:
        world.fields[name].pop("state")
        world.fields[name]["models"] = ("another",)
    world.pass_time(5.0)
    assert len(world.core.held) == 1 and world.sent() == []


def asked_by(world, region, told_by=None, **fields):
    """A peer that publishes what it would take, and other prefixes."""
    for _ in range(20):
        world.digest(region, warm_tokens=5000, residency=(ABROAD,), **fields)
        world.pass_time(0.1)


def test_a_peer_that_asks_is_sent_what_it_lacks_once_and_never_past_a_label():
    for labels, expected in (((), 1), ((HOME,), 0), ((ABROAD,), 1)):
        world = World(replicas=1)
        world.pass_time(5.0)
        told = TrieDelta(EU, "r1", 1, 1, (123,), ())
        world.core.gossip.remote.add(Origin(EU, "r1"), told.gained)
        world.core.gossip.remote.trust(Origin(EU, "r1"), True)
        world.digest(EU, warm_tokens=5000, residency=(ABROAD,))
        world.share(residency=labels)
        asked_by(world, EU)
        sent = world.sent(fx.Forward)
        sent = [effect for effect in sent if effect.key < 0]
        assert len(sent) == expected, labels
        if labels == (ABROAD,):  # no replica at home carries it
            assert not [e for e in world.sent(fx.Dispatch) if e.key < 0]


def test_a_peer_that_holds_it_or_is_not_trusted_is_sent_nothing():
    for blocks, trusted in ((prompt(SYSTEM).hashes, True), ((1,), False)):
        world = World(replicas=1)
        world.pass_time(5.0)
        world.core.gossip.remote.add(Origin(EU, "r1"), blocks)
        world.core.gossip.remote.trust(Origin(EU, "r1"), trusted)
        world.share()
        asked_by(world, EU)
        assert [e for e in world.sent(fx.Forward) if e.key < 0] == []


def guest(number, text=SYSTEM, **fields):
    return foreign(number, text, warm=True, **({"prompt": prompt(text, 640)} | fields))


def test_a_peers_warm_up_is_placed_where_requested_and_gives_way():
    world = World()
    world.pass_time(5.0)
    world.share("T")
    world.pass_time(3.0)
    assert world.core.warming.wanted_tokens(world.now) > 640
    found = world.feed(ev.RequestArrived(guest(900, deadline=world.now + 60)))
    [dispatch] = [effect for effect in found if isinstance(effect, fx.Dispatch)]
    assert dispatch.answer_inbox == "inbox-900"
    again = world.feed(ev.RequestArrived(guest(901)))
    assert [type(e) for e in again] == [fx.RefusePeer], "it is there already"
    world.pass_time(0.2)
    for _ in range(40):
        world.ask(world.unlike())
    [stop] = world.sent(fx.StopForwarded)
    assert stop == fx.StopForwarded("inbox-900", dispatch.replica)


def test_a_peers_warm_up_is_refused_where_off_not_requested_or_forbidden():
    off, quiet, on = World(warm_idle_share=0.0), World(), World()
    for world in (off, quiet, on):
        world.pass_time(5.0)
    off.share("T")
    on.share("T")
    on.pass_time(3.0)
    for world, labels, why in (
        (off, (), Refusal.NOT_IDLE),
        (quiet, (), Refusal.NOT_IDLE),
        (on, (ABROAD,), Refusal.RESIDENCY),
    ):
        [refusal] = world.feed(ev.RequestArrived(guest(900, residency=labels)))
        assert isinstance(refusal, fx.RefusePeer) and refusal.reason == why


def test_what_no_engine_computes_is_not_tried_again():
    world = warm_world()
    world.pass_time(3.0)
    [key] = under_way(world)
    world.feed(ev.AttemptFailed(key, 1, "the engine answered 400", status=400))
    assert world.closed == [key] and len(world.sent(fx.DropPrefix)) == 1
    world.inside = {name: set() for name in world.names}
    world.share(times=6)
    world.pass_time(3.0)
    assert len(world.sent()) == 1


def test_no_more_are_under_way_than_may_be_here_or_abroad(monkeypatch):
    monkeypatch.setattr(warming, "UNDER_WAY_MAX", 2)
    world = World(replicas=6)
    world.pass_time(5.0)
    world.core.gossip.remote.add(Origin(EU, "r1"), (123,))
    world.core.gossip.remote.trust(Origin(EU, "r1"), True)
    for letter in "PQRT":
        world.share(letter * 10)
    world.pass_time(5.0)
    assert len(under_way(world)) == 2
    asked_by(world, EU)
    assert len(under_way(world)) == 2 and not [e for e in world.sent(fx.Forward) if e.key < 0]
    key = min(under_way(world))
    world.answer(key)
    asked_by(world, EU)
    assert len(under_way(world)) == 2 < len(world.sent()), "the next has its turn"


def test_nothing_of_clients_leaves_a_region_that_forwards_nothing():
    for hops_max in (1, 0):
        world = World(hops_max=hops_max)
        world.pass_time(5.0)
        world.core.gossip.remote.add(Origin(EU, "r1"), (123,))
        world.core.gossip.remote.trust(Origin(EU, "r1"), True)
        world.share()
        asked_by(world, EU)
        sent = [effect for effect in world.sent(fx.Forward) if effect.key < 0]
        assert bool(sent) == bool(hops_max)


def test_a_drain_and_a_deadline_end_it():
    for end in ("drain", "deadline"):
        world = warm_world()
        world.pass_time(3.0)
        [key] = under_way(world)
        if end == "drain":
            world.feed(ev.Drain())
        else:
            world.pass_time(61.0)
        assert key in world.closed and key not in under_way(world)


def test_a_policy_that_follows_no_prefixes_is_refused():
    with pytest.raises(ValueError, match="follows prefixes"):
        World(policy="least-load")


def test_off_it_does_nothing():
    world = warm_world(warm_idle_share=0.0)
    world.pass_time(3.0)
    assert not any(isinstance(effect, WARM) for _, effect in world.effects)
    assert world.core.warming.among({}) == {}
    assert all(e.digest.warm_tokens is None for e in world.sent(fx.PublishDigest))


class Watch(World):
    """Checks, at every event, what must always hold."""

    def feed(self, event):
        found = super().feed(event)
        warming = self.core.warming
        budget = warming.budget
        assert budget.spent_s <= 0.5 * budget.idle_s + 1e-6
        assert warming.hot.kept_bytes <= self.limit
        assert warming.hot.kept_bytes <= sum(self.bodies.values())
        assert set(under_way(self)) == set(self.open)
        here = [one for one in under_way(self).values() if one.peer is None]
        assert not (here and len(self.core.held)), "it gives way to held requests"
        for opened in (effect for effect in found if isinstance(effect, fx.OpenWarmUp)):
            assert not len(self.core.held)
            record = under_way(self).get(opened.request.key)
            if record is None:
                continue
            labels = set(opened.request.residency)
            if record.peer is not None:
                carried = {EU: {ABROAD}, AP: {ABROAD, HOME}}[record.peer]
            else:
                carried = {HOME} if record.replica == "us-0" else set()
            assert not labels or labels & carried
        return found


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens(seed):
    world = Watch(seed, replicas=3, warm_bytes_max=9000, hold_max=5)
    world.limit = 9000
    for name in world.names[1:]:
        world.fields[name]["residency"] = ()
    dice = world.dice
    for region in (EU, AP):
        world.core.gossip.remote.add(Origin(region, "r1"), (123,))
        world.core.gossip.remote.trust(Origin(region, "r1"), True)
    for number in range(1200):
        act = dice.random()
        keys = [*world.core.inflight, *under_way(world)]
        if act < 0.35:
            labels = dice.choice(((), (), (HOME,), (ABROAD,), (ABROAD, HOME)))
            text = dice.choice("PQRS") * 10 + world.unlike()
            world.ask(text, residency=labels)
        elif act < 0.6 and keys:
            world.answer(dice.choice(keys))
        elif act < 0.65 and keys:
            world.feed(
                ev.AttemptFailed(
                    dice.choice(keys), 1, "broke", 500 if dice.random() < 0.5 else None
                )
            )
        elif act < 0.7 and keys:
            key = dice.choice(keys)
            world.feed(ev.AttemptRefused(key, 1, Refusal.FULL, US, None, -1, -1))
        elif act < 0.75:
            world.digest(
                dice.choice((EU, AP)), warm_tokens=dice.choice((None, 900)), residency=(ABROAD,)
            )
        elif act < 0.8:
            world.feed(
                ev.RequestArrived(
                    guest(10_000 + number, dice.choice("TUV") * 10, deadline=world.now + 60)
                )
            )
        else:
            world.pass_time(dice.uniform(0.1, 1.0))
    assert world.sent(), "there was something to watch"
    world.feed(ev.Drain())
    assert not under_way(world) and not world.open


def test_request_of_a_warm_up_is_no_clients():
    world = warm_world()
    world.pass_time(3.0)
    [key] = under_way(world)
    assert key < 0 and key not in world.core.inflight
    assert request(1).warm is False and world.sent()[0].request.warm
    assert world.sent()[0].request.model == MODEL and S_PER_TOKEN > 0
