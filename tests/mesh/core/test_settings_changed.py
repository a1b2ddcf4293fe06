"""Other settings in a running router: what they change, what is kept, what nobody notices."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mesh.core import recording
from mesh.core.lifecycle import timeouts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES
from mesh.core.policies.base import PrefixFollowing
from schemas.decision import CandidateKind, Placement
from schemas.exchange import Priority
from schemas.gossip import TrieDelta
from schemas.ids import RegionId
from schemas.state import ModelCapacity
from tests.mesh.core import build
from tests.mesh.core.chaos import Chaos

FOLLOWING = [
    name
    for name, make in POLICIES.items()
    if isinstance(make(RouterSettings(), Random(1)), PrefixFollowing)
]


class Router:
    """A core, its clock, and what it decided last."""

    def __init__(self, **settings):
        self.core, self.now, self.seq = build.core(**settings), 100.0, 0
        self.settings = RouterSettings(**settings)

    def feed(self, event):
        return self.core.handle(event, self.now)

    def follow(self, **changes):
        self.settings = replace(self.settings, **changes)
        return self.feed(ev.SettingsChanged(self.settings))

    def see(self, *names, **fields):
        self.seq += 1
        for name in names:
            self.feed(ev.HeartbeatSeen(build.beat(name, self.seq, **fields)))

    def ask(self, key, text="A", **fields):
        request = build.request(key, text, self.now, **fields)
        return decided(self.feed(ev.RequestArrived(request)))

    def answer(self, key, **served):
        self.feed(ev.AnswerStarted(key, 1))
        self.feed(ev.AnswerEnded(key, 1, Served(**served)))


def decided(effects):
    """The last receipt among them."""
    return [effect.decision for effect in effects if isinstance(effect, fx.Decided)][-1]


def busy(router, name="us-0"):
    """A replica that nobody may be given by `pending`, and all by `blind`."""
    router.see(name, pending=3, running=8, outstanding=11, prefill_queued_tokens=90_000)


def test_held_requests_are_priced_again_at_once_and_their_receipts_name_the_new_policy():
    router = Router(policy="skywalker")
    busy(router)
    assert router.ask(1).placement is Placement.HOLD
    assert router.ask(2).policy == "skywalker"
    found = router.follow(policy="least-load", pushing="blind")
    receipts = [effect.decision for effect in found if isinstance(effect, fx.Decided)]
    assert [(one.policy, one.placement) for one in receipts] == [
        ("least-load", Placement.LOCAL)
    ] * 2
    assert [one.key for one in found if isinstance(one, fx.Dispatch)] == [1, 2]
    assert len(router.core.held) == 0


def test_an_option_of_the_policy_opens_a_replica_with_a_longer_queue():
    router = Router(policy="mesh")
    router.see("us-0", running=1, prefill_queued_tokens=20_000, prefill_s_per_token=1e-4)
    assert router.ask(1).placement is Placement.HOLD
    [receipt] = [one.decision for one in router.follow(policy="mesh:5") if hasattr(one, "decision")]
    assert (receipt.policy, receipt.replica) == ("mesh:5", "us-0")


def test_what_is_under_way_goes_on_and_is_answered_once():
    router = Router(policy="mesh")
    router.see("us-0")
    router.ask(1)
    assert router.follow(policy="round-robin") == []
    assert router.feed(ev.AnswerStarted(1, 1)) == []
    assert router.feed(ev.AnswerEnded(1, 1, Served())) == []
    assert not router.core.inflight


@pytest.mark.parametrize("after", FOLLOWING)
@pytest.mark.parametrize("before", FOLLOWING)
def test_what_replicas_hold_is_known_to_the_next_policy(before, after):
    router = Router(policy=before)
    router.see("us-0", "us-1")
    router.ask(1, "ABCDEFGH")
    router.now += 0.2  # some wait for a batch to fill
    router.feed(ev.Tick())
    placed = router.core.inflight[1].replica
    router.answer(1, prompt_tokens=100, output_tokens=5)
    router.follow(policy=after)
    index = router.core.state.placer.index
    assert index.depth(placed, build.prompt("ABCDEFGHI").hashes)[0] == 8
    router.follow(policy=before)
    assert router.core.state.placer.index.depth(placed, build.prompt("ABCDEFGH").hashes)[0] == 8


def test_a_policy_of_one_class_gets_a_copy():
    router = Router(policy="mesh")
    router.see("us-0")
    router.ask(1, "ABCD")
    router.follow(policy_by_priority=((Priority.HIGH, "skywalker"),))
    pairs = router.core.state.placer._pairs
    mesh, other = (pairs[name].local.indexes for name in ("mesh", "skywalker"))
    kind = CandidateKind.REPLICA
    assert mesh[kind].held("us-0") == other[kind].held("us-0") != []
    mesh[kind].forget("us-0")
    assert len(other[kind].held("us-0")) == 4
    assert router.ask(2, priority=Priority.HIGH).policy == "skywalker"
    assert router.ask(3).policy == "mesh"


def test_learned_speeds_are_kept_and_weighed_as_the_options_say():
    router = Router(policy="mesh")
    for key in range(1, 9):
        router.see("us-0", running=4)
        router.ask(key, "ABCD"[key % 4] * 4)
        router.now += 0.3
        router.answer(key, prompt_tokens=100, output_tokens=20)
    [before] = router.core.state.placer._pairs["mesh"].local._models.values()
    speed = before.replicas["us-0"].speed
    router.follow(policy="mesh:0.5/0.3")
    [after] = router.core.state.placer._pairs["mesh:0.5/0.3"].local._models.values()
    assert after.replicas["us-0"].speed == speed
    assert after.stall_weight == 0.3


def test_e2_goes_on_with_its_loads_over_another_window():
    router = Router(policy="e2")
    router.see("us-0", "us-1")
    placed = router.ask(1, "ABCD").replica
    router.follow(policy="e2:7")
    policy = router.core.state.placer._pairs["e2:7"].local
    assert policy._window.window_s == 7.0
    assert policy._accounts[placed].requests == 1
    assert policy.hit_ratio(build.request(2, "ABCD")) == 1.0
    policy._expire(router.now + 8.0)
    assert policy._accounts[placed].requests == 0


def test_a_policy_without_an_index_withdraws_what_was_announced():
    router = Router(policy="mesh")
    router.see("us-0")
    router.ask(1, "ABCD")
    gained = published(router)
    assert len(gained[0]) == 4
    router.follow(policy="round-robin")
    assert set(published(router)[1]) == set(gained[0])
    router.follow(policy="mesh")
    router.ask(2, "ABCD")
    assert set(published(router)[0]) == set(gained[0])


def published(router) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks that peers are told to have been gained, and lost, within some seconds."""
    gained, lost = [], []
    for _ in range(40):
        router.now += 0.1
        router.see("us-0")
        for effect in router.feed(ev.Tick()):
            if isinstance(effect, fx.PublishTrie):
                assert isinstance(effect.delta, TrieDelta)
                gained += effect.delta.gained
                lost += effect.delta.lost
    return tuple(gained), tuple(lost)


def test_forwarding_ends_and_begins_again():
    router = Router(policy="mesh")
    router.feed(ev.RttMeasured(RegionId("eu"), 0.01))
    ready = {build.MODEL: ModelCapacity(ready=4, free=4)}

    def place(key):
        router.seq += 1
        router.feed(ev.DigestSeen(build.digest("eu", router.seq, models=ready, free=4)))
        return router.ask(key)

    assert place(1).peer == "eu"
    router.follow(hops_max=0)
    assert place(2).placement is Placement.HOLD
    assert router.follow(hops_max=1) != []
    assert place(3).peer == "eu"


def test_the_limits_of_waits_and_of_peers_requests_follow():
    router = Router(policy="skywalker", queue_delay_s_max=0.0)
    router.follow(queue_delay_s_max=7.0, own_ttft_goal_s=0.5)
    assert timeouts.queue_delay_s(router.core.state, build.request(1)) == 7.0
    assert router.core.state.settings.own_ttft_goal_s == 0.5


def test_what_was_settled_at_the_start_stays():
    router = Router(policy="mesh")
    router.feed(
        ev.SettingsChanged(
            RouterSettings(hold_max=1, lease_s=0.0, index_blocks_max=1, trie_bytes_per_s=0)
        )
    )
    assert router.core.state.settings == RouterSettings(policy="mesh")


def test_a_policy_that_is_unknown_changes_nothing_because_the_host_has_checked_it():
    with pytest.raises(ValueError, match="unknown policy"):
        Router().follow(policy="fastest")


class Restless(Chaos):
    """Somebody changes the settings all the time."""

    def __init__(self, seed):
        super().__init__(seed)
        self.wanted = self.core.state.settings
        # The most that any policy may do; what each of them may not has its own tests.
        self.ledger.settings = replace(self.wanted, policy="mesh")

    def run(self, steps):
        for _ in range(steps):
            if self.dice.random() < 0.03:
                self.other_settings()
            super().run(1)

    def other_settings(self):
        names = [*POLICIES, "mesh:0.1/0.5", "e2:20", "cache-aware:0.3/64/1.5"]
        classes = self.dice.sample(tuple(Priority), self.dice.randint(0, 2))
        self.wanted = replace(
            self.wanted,
            policy=self.dice.choice(names),
            policy_by_priority=tuple((one, self.dice.choice(names)) for one in classes),
            pushing=self.dice.choice(("pending", "blind", "outstanding:2")),
            hops_max=self.dice.choice((0, 1, 1)),
            queue_delay_s_max=self.dice.choice((0.0, 0.5, 10.0)),
            own_ttft_goal_s=self.dice.choice((None, 0.2)),
        )
        self.feed(ev.SettingsChanged(self.wanted))


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=25)
@given(SEEDS)
@example(1)
def test_every_request_ends_once_whatever_changes_meanwhile(seed):
    chaos = Restless(seed)
    chaos.run(400)
    chaos.feed(ev.SettingsChanged(replace(chaos.wanted, policy="skywalker", hops_max=1)))
    chaos.heal()
    assert [case.request.key for case in chaos.ledger.cases.values() if not case.ended_by] == []
    assert (len(chaos.core.inflight), len(chaos.core.held)) == (0, 0)
    for replica in chaos.core.replicas:
        assert (len(replica.on_the_way), len(replica.relayed)) == (0, 0)


@settings(max_examples=15)
@given(SEEDS)
@example(1)
def test_a_recording_with_changes_replays_to_the_same_effects(seed):
    chaos = Restless(seed)
    start = chaos.core.state.settings
    chaos.run(200)
    chaos.other_settings()
    pairs = zip(chaos.history, chaos.effects, strict=True)
    again = build.core(seed, **{name: getattr(start, name) for name in start.__slots__})
    for (event, now), effects in pairs:
        step = recording.decode_line(recording.encode_step(now, event, effects))
        assert recording.plain_effects(again.handle(step.event, step.now)) == step.effects
