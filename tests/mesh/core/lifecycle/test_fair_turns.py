"""Tenants who wait for the same model: nobody gets more than its share, and no engine idles."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.lifecycle import fair_turns
from mesh.core.lifecycle.queue_scheduler import RETRY_S, UNCHANGED_S, place_waiting
from mesh.core.lifecycle.release_order import SORTED_MAX
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.placement.candidates import FOR_OTHERS
from mesh.core.placement.placement import PlacementResult
from mesh.core.requests.fair_shares import (
    ANSWER_FACTOR,
    CREDIT_S,
    FADED_S,
    KEPT_S,
    LOOK_S,
    USE_S,
    FairShares,
    Placed,
    engine_s,
)
from mesh.core.requests.hold_queue import HoldQueue
from schemas.decision import Placement
from schemas.exchange import TOKENS_MAX, Priority, Refusal
from schemas.settings import Pushing, PushingKind
from tests.mesh.core.build import MODEL, US, beat, core, foreign, request

S_PER_TOKEN = 0.001
ANSWER_TOKENS, ANSWER_S_PER_TOKEN = 200, 0.01
REPLICAS = ("a", "b", "c")
TENANTS = ("acme", "beta")
POLICIES = ("mesh", "least-load")


class Engines:
    """A router and replicas that compute one request each, in its tokens' time."""

    def __init__(self, policy, weights=(), replicas=REPLICAS, **fields):
        one = Pushing(PushingKind.OUTSTANDING, 1)
        self.core = core(
            policy=policy, pushing=one, tenant_weights=weights, queue_delay_s_max=0.0,
            hold_s_max=1e9, **fields,
        )  # fmt: skip
        self.now, self.seq, self.key = 10.0, 1, 0
        self.busy, self.asked, self.given = {}, {}, []  # by replica, by key, in order
        for name in replicas:
            self.tell(name)

    @property
    def idle(self):
        return [name for name in self.core.replicas.by_name if name not in self.busy]

    def tell(self, name):
        key = self.busy.get(name)
        self.seq += 1
        tokens = 0 if key is None else self.asked[key].prompt.tokens
        self.handle(ev.HeartbeatSeen(beat(
            name, seq=self.seq, prefill_s_per_token=S_PER_TOKEN, prefill_base_s=0.0,
            prefill_queued_tokens=tokens, outstanding=int(key is not None), outstanding_max=1,
            running=int(key is not None), batch_max=1, full=key is not None,
        )))  # fmt: skip

    def handle(self, event):
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, fx.Dispatch):
                self.given.append(self.asked[effect.key])
                self.take(effect)

    def take(self, dispatched):
        assert dispatched.replica not in self.busy
        self.busy[dispatched.replica] = dispatched.key

    def ask(self, tenant, tokens, **fields):
        self.key += 1
        own = {"prompt": Prompt(tokens, ()), "arrived_at": self.now, "tenant": tenant}
        kind = foreign if fields.pop("is_foreign", False) else request
        asked = self.asked[self.key] = kind(self.key, **(own | {"deadline": 1e9} | fields))
        self.handle(ev.RequestArrived(asked))
        return asked

    def end(self, name, answer_tokens):
        """That replica has answered."""
        self.answered(self.busy.pop(name), answer_tokens)
        self.wait()

    def answered(self, key, answer_tokens):
        served = Served(self.asked[key].prompt.tokens, 0, answer_tokens)
        attempt = self.core.inflight[key].attempt
        self.handle(ev.AnswerStarted(key, attempt, shows_ttft=False))
        self.handle(ev.AnswerEnded(key, attempt, served))

    def wait(self, seconds=UNCHANGED_S):
        self.now += seconds
        for name in self.core.replicas.by_name:
            self.tell(name)
        self.handle(ev.Tick())


WORK = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 3000)), min_size=1, max_size=60)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8)
@given(
    weights=st.sampled_from([(1.0, 1.0), (3.0, 1.0), (0.5, 4.0)]),
    longest=st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    seed=st.integers(0, 2**32),
)
def test_what_two_backlogged_tenants_are_given_differs_by_no_more_than_is_said(
    policy, weights, longest, seed
):
    dice, by_tenant = Random(seed), dict(zip(TENANTS, weights, strict=True))
    most = dict(zip(TENANTS, longest, strict=True))
    engines = Engines(policy, tuple(by_tenant.items()))
    first = dice.choice(TENANTS)  # has all engines, and a queue, before the other comes
    for _ in range(8):
        engines.ask(first, dice.randint(1, most[first]))
    answer_tokens = 200  # as expected: what estimates are wrong by is not in the bound
    since = None
    for _ in range(60):
        for tenant in TENANTS:
            while len(engines.core.held.of_tenants(MODEL).get(tenant, ())) < 3:
                engines.ask(tenant, dice.randint(1, most[tenant]))
        since = len(engines.given) if since is None else since
        engines.end(dice.choice(list(engines.busy)), answer_tokens)
    ahead = list(accumulate(
        (engine_s(one.prompt.tokens, answer_tokens, S_PER_TOKEN) / by_tenant[one.tenant]
         * (1 if one.tenant == TENANTS[0] else -1) for one in engines.given[since:]),
        initial=0.0,
    ))  # fmt: skip
    dearest = sum(engine_s(most[one], answer_tokens, S_PER_TOKEN) / by_tenant[one] for one in most)
    assert max(ahead) - min(ahead) <= 2 * CREDIT_S + dearest + 1e-6
    assert len(ahead) > 50


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8)
@given(work=WORK, seed=st.integers(0, 2**32))
def test_no_engine_idles_while_anybody_waits(policy, work, seed):
    dice, engines = Random(seed), Engines(policy)
    for tenant, tokens in work:
        engines.ask(tenant, tokens, priority=dice.choice(list(Priority)))
        if engines.busy and dice.random() < 0.3:
            engines.end(dice.choice(list(engines.busy)), dice.randint(0, 500))
        else:
            engines.wait()
        assert not (engines.idle and len(engines.core.held))
    while engines.busy:
        engines.end(dice.choice(list(engines.busy)), dice.randint(0, 500))
        assert not (engines.idle and len(engines.core.held))
    assert len(engines.given) == len(work)


class Batches(Engines):
    """Replicas that compute one prompt after the other, and up to `width` answers together."""

    def __init__(self, policy, weights, widths):
        self.widths = {f"r{number}": width for number, width in enumerate(widths)}
        self.prompts = {name: [] for name in self.widths}  # (key, tokens to compute), in order
        self.answers = {name: {} for name in self.widths}  # by key: seconds to its end
        super().__init__(policy, weights, tuple(self.widths))

    def tell(self, name):
        self.seq += 1
        inside, width = len(self.prompts[name]) + len(self.answers[name]), self.widths[name]
        self.handle(ev.HeartbeatSeen(beat(
            name, seq=self.seq, prefill_s_per_token=S_PER_TOKEN, prefill_base_s=0.0,
            prefill_queued_tokens=round(sum(tokens for _, tokens in self.prompts[name])),
            outstanding=inside, outstanding_max=width, running=inside, batch_max=width,
            full=inside >= width,
        )))  # fmt: skip

    def take(self, dispatched):
        asked, name = self.asked[dispatched.key], dispatched.replica
        self.prompts[name].append((asked.key, asked.prompt.tokens))
        assert len(self.prompts[name]) + len(self.answers[name]) <= self.widths[name]

    def compute(self, seconds=UNCHANGED_S):
        for name, prompts in self.prompts.items():
            answers = {key: left_s - seconds for key, left_s in self.answers[name].items()}
            for key in (*answers, *(key for key, _ in prompts)):
                self.handle(ev.AttemptProgressed(key, self.core.inflight[key].attempt))
            room = seconds / S_PER_TOKEN
            while prompts and room:
                key, tokens = prompts[0]
                done, room = min(tokens, room), max(0.0, room - tokens)
                prompts[0] = key, tokens - done
                if done == tokens:
                    prompts.pop(0)
                    answers[key] = ANSWER_TOKENS * ANSWER_S_PER_TOKEN
            self.answers[name] = {key: left_s for key, left_s in answers.items() if left_s > 0.0}
            for key in answers.keys() - self.answers[name].keys():
                self.answered(key, ANSWER_TOKENS)
        self.wait(seconds - 2 * RETRY_S)
        self.now += 2 * RETRY_S
        self.handle(ev.Tick())

    @property
    def idle(self):
        return [name for name in self.widths if not self.prompts[name] and not self.answers[name]]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=4)
@given(
    weights=st.sampled_from([(1.0, 1.0), (3.0, 1.0), (0.5, 4.0)]),
    widths=st.lists(st.integers(1, 32), min_size=1, max_size=3),
    longest=st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    other_s=st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9]),
    seed=st.integers(0, 2**32),
)
def test_beside_a_backlog_nobody_gets_more_than_is_said_and_no_engine_idles(
    policy, weights, widths, longest, other_s, seed
):
    """acme always waits; beta too, or it asks for `other_s` of each second of each engine."""
    dice, by_tenant = Random(seed), dict(zip(TENANTS, weights, strict=True))
    most = dict(zip(TENANTS, longest, strict=True))
    engines = Batches(policy, tuple(by_tenant.items()), widths)
    since, other_left_s = None, 0.0
    for _ in range(150):
        for tenant in TENANTS if other_s == 0.0 else TENANTS[:1]:
            while len(engines.core.held.of_tenants(MODEL).get(tenant, ())) <= sum(widths):
                engines.ask(tenant, dice.randint(1, most[tenant]))
        other_left_s += other_s * len(widths) * UNCHANGED_S
        while other_left_s > 0.0:
            tokens = dice.randint(1, most["beta"])
            other_left_s -= engine_s(tokens, ANSWER_TOKENS, S_PER_TOKEN)
            engines.ask("beta", tokens)
        since = len(engines.given) if since is None else since
        engines.compute()
        assert not engines.idle
    ahead = list(accumulate(
        (engine_s(one.prompt.tokens, ANSWER_TOKENS, S_PER_TOKEN) / by_tenant[one.tenant]
         * (1 if one.tenant == "beta" else -1) for one in engines.given[since:]),
        initial=0.0,
    ))  # fmt: skip
    dearest = sum(engine_s(most[one], ANSWER_TOKENS, S_PER_TOKEN) / by_tenant[one] for one in most)
    bound = 2 * CREDIT_S + dearest + 1e-6
    assert (
        max(now - least for now, least in zip(ahead, accumulate(ahead, min), strict=True)) <= bound
    )
    if other_s == 0.0:
        assert (
            max(most - now for now, most in zip(ahead, accumulate(ahead, max), strict=True))
            <= bound
        )
    while len(engines.core.held):  # nobody starves
        engines.compute()
        assert not (engines.idle and len(engines.core.held))
    assert len(engines.given) == len(engines.asked)


def backlogged(engines, tenant="acme", count=12, tokens=2000):
    for _ in range(count):
        engines.ask(tenant, tokens)
    engines.wait()


def test_who_has_had_less_does_not_wait_for_a_backlog():
    engines = Engines("mesh")
    backlogged(engines)
    asked = engines.ask("beta", 100)
    assert asked in engines.core.held
    engines.end("a", 200)
    assert engines.given[-1] is asked


def test_priorities_stay_above_shares():
    engines = Engines("least-load")
    backlogged(engines)
    low = engines.ask("beta", 100, priority=Priority.LOW)
    engines.end("a", 200)
    assert engines.given[-1] is not low and low in engines.core.held


def test_who_has_had_more_is_not_queued_in_an_engine_before_others():
    """Its prompts would go first there, whatever the shares."""
    engines = Engines("mesh", replicas=("a",))
    backlogged(engines)
    engines.ask("beta", 100)
    state = engines.core.state
    there = PlacementResult(Placement.LOCAL, "a", "free", "mesh")
    acme, beta = (request(90, tenant=one, arrived_at=9.0) for one in TENANTS)
    assert not fair_turns.leaves_room(state, acme, there, engines.now)
    assert fair_turns.leaves_room(state, beta, there, engines.now)
    later = engines.now + KEPT_S + 1.0
    assert fair_turns.leaves_room(state, acme, there, later)


def of_two(now=0.0):
    """Counters of two tenants, of whom acme was given more; beta uses 0.7 of replica a."""
    shares = FairShares({}, ["acme", "beta"], now)
    acme, beta = (Placed(one, tokens, 0.0, 1.0) for one, tokens in (("acme", 9.0), ("beta", 7.0)))
    for key, tenant in enumerate((acme, acme, beta)):
        shares.placed(key, tenant, is_followed=False)
    shares.computes("a", beta, now)
    shares.computes("b", acme, now)
    return shares, acme._replace(prompt_tokens=4.0)


def test_as_many_replicas_are_kept_as_those_use_who_were_given_less():
    shares, more = of_two()
    assert shares.kept(0.0) == set()  # 3 of a's 10 s are left, and anybody's
    shares.computes("a", more, 0.0)
    shares.computes("b", more, 0.0)
    assert shares.kept(LOOK_S) == {"a"}
    assert shares.kept(2.0) == set()
    shares.expire(["acme", "beta"], 200.0)
    assert not shares._uses


@pytest.mark.parametrize(
    ("is_over", "generates", "left_s"),
    [
        (lambda shares, now: shares.came_back(9, now), True, 0.0),
        (lambda shares, now: shares.served(9, 0.0, 0.0, now), True, 0.0),  # its client left
        (lambda shares, now: shares.served(9, 4.0, 5.0, now), True, 14.0),
        (lambda shares, now: shares.served(9, 4.0, 5.0, now), False, 4.0),
        (lambda shares, now: shares.served(9, None, None, now), False, 10.0),
    ],
)
def test_a_replica_s_use_is_what_was_computed_there(is_over, generates, left_s):
    """As if that had been known when it was placed, whoever had been given more."""
    for tenant in TENANTS:
        shares = of_two()[0]
        asked = Placed(tenant, 10.0, 100.0, 1.0)
        placed = shares.computes("c", asked, 1.0, generates=generates)
        shares.placed(9, placed, is_followed=True)
        other = shares.computes("c", Placed("acme", 3.0, 0.0, 1.0), 2.0)
        is_over(shares, 5.0)
        use = shares._uses["c"]
        assert other.use_s == 3.0 and use.at == 5.0
        expected = left_s * exp(-4.0 / USE_S) + 3.0 * exp(-3.0 / USE_S)
        assert use.first_s + use.more_s == pytest.approx(expected)


def test_what_a_replica_refuses_is_not_in_its_use():
    engines = Engines("mesh")
    backlogged(engines)
    engines.ask("beta", 100)
    shares = engines.core.state.shares[MODEL]
    engines.end("a", 200)
    key = engines.busy.pop("a")
    record = engines.core.inflight[key]
    assert record.request.tenant == "beta" and shares._uses["a"].first_s > 0.3
    engines.handle(ev.AttemptRefused(key, record.attempt, Refusal.FULL, US, "a", 0, 1))
    assert shares._uses["a"].first_s < FADED_S


def test_for_a_trickle_no_replica_is_kept():
    for seconds, kept in ((4.0, set()), (6.0, {"a"})):
        shares = FairShares({}, ["acme", "beta"], 0.0)
        for key, (tenant, tokens) in enumerate((("acme", 20.0), ("beta", seconds))):
            shares.placed(key, one := Placed(tenant, tokens, 0.0, 1.0), is_followed=False)
            shares.computes("a", one, 0.0)
        shares.computes("b", one._replace(tenant="acme", prompt_tokens=20.0), 0.0)
        assert shares.kept(0.0) == kept


def test_who_has_saved_up_most_is_behind_nobody_who_was_silent():
    shares = FairShares({}, ["acme", "beta"], 0.0)
    shares.placed(1, Placed("acme", 100.0, 0.0, 1.0), is_followed=False)
    shares.expire(["acme"], 1.0)
    shares.seen("gamma", ["acme"], 1.0)
    assert shares.given_s("gamma") == shares.given_s("beta") == 100.0 - CREDIT_S
    assert [shares.is_behind_others(one, 1.0) for one in ("acme", "gamma")] == [True, False]


def test_who_has_had_more_goes_to_a_kept_replica_only_if_it_has_no_work():
    engines = Engines("mesh", replicas=("a", "b"))
    state = engines.core.state
    shares, more = of_two(engines.now)
    shares.computes("a", more, engines.now)
    state.shares[MODEL] = shares
    acme, beta = (request(90 + n, tenant=one) for n, one in enumerate(TENANTS))
    assert fair_turns.kept_from(state, acme, engines.now, {}) == set()
    engines.ask("beta", 100)
    engines.ask("beta", 100)
    assert sorted(engines.busy) == ["a", "b"]
    assert fair_turns.kept_from(state, acme, engines.now, {}) == {"a"}
    assert fair_turns.kept_from(state, beta, engines.now, {}) == set()
    engines.end("b", 1)
    engines.end("a", 1)
    place = state.placer.place(acme, (), engines.now, kept_from=frozenset({"a"}))
    assert place.target == "b"
    whys = {one.name: one.why for one in place.candidates}
    assert whys["a"] == FOR_OTHERS


def test_where_all_who_wait_leave_replicas_to_others_a_try_ends_with_the_first(monkeypatch):
    engines = Engines("mesh")
    state = engines.core.state
    backlogged(engines, count=30)
    state.shares[MODEL] = shares = of_two(engines.now)[0]
    for name in REPLICAS:
        shares.computes(name, Placed("beta", 20.0, 0.0, 1.0), engines.now)
    first = next(iter(state.held))
    assert fair_turns.kept_from(state, first, engines.now, {}) == set(REPLICAS)
    assert {one.tenant for one in state.held} == {"acme"}
    looked, find = [], fair_turns.kept_from
    monkeypatch.setattr(
        fair_turns, "kept_from", lambda *given: looked.append(given) or find(*given)
    )
    place_waiting(state, engines.now)
    assert len(looked) == 1


def test_who_leaves_replicas_to_others_holds_none_of_these_up(monkeypatch):
    engines = Engines("mesh", replicas=("a",))
    backlogged(engines, count=3)
    asked = engines.ask("beta", 100)
    for _ in range(3):
        engines.ask("acme", 100, priority=Priority.HIGH)
    monkeypatch.setattr(
        fair_turns,
        "kept_from",
        lambda _, one, now, found: frozenset("a" if one.tenant == "acme" else ""),
    )
    engines.end("a", 200)
    assert engines.given[-1] is asked


def test_with_one_tenant_nothing_is_counted():
    engines = Engines("mesh")
    backlogged(engines)
    engines.end("a", 200)
    assert not engines.core.state.shares


def test_what_was_counted_is_corrected_by_what_was_computed():
    engines = Engines("least-load")
    backlogged(engines)
    engines.ask("beta", 100)
    shares = engines.core.state.shares[MODEL]
    engines.end("a", 200)
    engines.now += 12.0
    engines.wait()
    before = shares.given_s("beta")
    name = next(name for name, key in engines.busy.items() if engines.asked[key].tenant == "beta")
    engines.end(name, 1200)
    assert shares.given_s("beta") == pytest.approx(before + 1000 * ANSWER_FACTOR * S_PER_TOKEN)


def test_no_engine_has_computed_for_longer_than_it_had():
    """Its word may be false: for its sake no other is kept from that tenant."""
    engines = Engines("least-load")
    backlogged(engines)
    engines.ask("beta", 100)
    shares = engines.core.state.shares[MODEL]
    engines.end("a", 200)
    [placed] = [one for one in shares._open.values() if one.tenant == "beta"]
    before, usual = shares.given_s("beta"), shares.answer_tokens("beta")
    name = next(name for name, key in engines.busy.items() if engines.asked[key].tenant == "beta")
    engines.wait(5.0)
    took_s = engines.now - placed.at
    engines.end(name, TOKENS_MAX)
    assert shares.given_s("beta") - before == pytest.approx(took_s - placed.seconds)
    assert shares.answer_tokens("beta") < usual + took_s / S_PER_TOKEN


def test_peers_requests_are_counted_too():
    engines = Engines("mesh")
    backlogged(engines)
    asked = engines.ask("beta", 1000, is_foreign=True)
    shares = engines.core.state.shares[MODEL]
    before = shares.given_s("beta")
    engines.end("a", 200)
    assert engines.given[-1] is asked and shares.given_s("beta") > before


def test_a_tenant_that_is_gone_is_forgotten():
    engines = Engines("mesh")
    backlogged(engines, count=4)
    engines.ask("beta", 100)
    while engines.busy:
        engines.end(next(iter(engines.busy)), 200)
    assert len(engines.core.state.shares[MODEL]) == 2
    engines.wait(KEPT_S + 1.0)
    assert not engines.core.state.shares


def test_weights_change_in_a_running_router():
    engines = Engines("mesh")
    backlogged(engines)
    engines.ask("beta", 100)
    changed = engines.core.state.settings
    changed = replace(changed, tenant_weights=(("beta", 4.0),))
    engines.handle(ev.SettingsChanged(changed))
    assert engines.core.state.shares[MODEL].weight("beta") == 4.0


def test_of_a_full_queue_the_tenant_with_most_gives_up_its_newest():
    queue = HoldQueue(4)
    held = [request(key, tenant="acme", arrived_at=float(key)) for key in range(4)]
    for one in held:
        queue.put(one)
    assert queue.gives_way(request(9, tenant="beta", arrived_at=9.0)) is held[-1]
    assert queue.gives_way(request(9, tenant="acme", arrived_at=9.0)) is None
    low = request(9, tenant="beta", arrived_at=9.0, priority=Priority.LOW)
    assert queue.gives_way(low) is None


@given(counts=st.lists(st.integers(1, 12), min_size=2, max_size=4), seed=st.integers(0, 2**32))
def test_no_request_is_lost_or_tried_twice(counts, seed):
    dice, engines = Random(seed), Engines("mesh", replicas=("a",))
    asked = [str(tenant) for tenant, count in enumerate(counts) for _ in range(count)]
    dice.shuffle(asked)
    for tenant in asked:
        engines.ask(tenant, dice.randint(1, 3000), priority=dice.choice(list(Priority)))
    tried = Counter(one.key for one in fair_turns.in_order(engines.core.state, engines.now))
    assert tried == Counter(one.key for one in engines.core.held)


def test_of_however_many_tenants_no_more_requests_are_looked_up_than_without_any():
    engines = Engines("mesh", replicas=("a",))
    for number in range(3 * SORTED_MAX):
        engines.ask(f"t{number}", 100)
    state = engines.core.state
    tried = [one.key for one in fair_turns.in_order(state, engines.now)]
    assert sorted(tried) == sorted(one.key for one in state.held)
    assert len(state.turns) <= SORTED_MAX


def test_who_leaves_before_the_end_has_had_what_was_computed():
    engines = Engines("mesh", replicas=("a",))
    for _ in range(3):
        engines.ask("acme", 100)
        engines.ask("beta", 100)
    for _ in range(120):
        key = engines.busy["a"]
        asked = engines.asked[key]
        engines.now += 0.6 if asked.tenant == "beta" else 4.2
        if asked.tenant == "beta":
            engines.end("a", 200)
        else:  # it hangs up on each stream after 2,000 tokens
            attempt = engines.core.inflight[key].attempt
            engines.handle(ev.AnswerStarted(key, attempt, shows_ttft=False))
            del engines.busy["a"]
            engines.handle(ev.ClientGone(key))
            engines.handle(ev.CostEstimated(key, asked.model, 100, 2000))
        engines.tell("a")
        engines.ask(asked.tenant, 100)
        engines.handle(ev.Tick())
    turns = Counter(one.tenant for one in engines.given)
    assert turns["beta"] > 5 * turns["acme"]
