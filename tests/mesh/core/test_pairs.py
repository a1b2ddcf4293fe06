"""Prefill and decode replicas at the router's core: which pair, and the life of its attempts."""

from dataclasses import replace

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.core.policies import POLICIES
from mesh.core.requests.fair_shares import FairShares
from schemas.decision import candidate_name, chosen_of, place_name
from schemas.exchange import Refusal
from schemas.http import Fault
from schemas.ids import ReplicaId
from schemas.residency import Label, ground
from schemas.state import ModelCapacity, ReplicaState
from tests.mesh.core import build
from tests.mesh.core.pair_region import ENDS, Region, only, part


@pytest.fixture
def nixl() -> Region:
    """Two pairs; policies that price no pairs use them for every request."""
    region = Region("least-load")
    for number in (1, 2):
        region.says(f"p{number}", part("prefill"))
        region.says(f"d{number}", part("decode"))
    return region


def test_decode_follows_prefill_and_both_count_while_they_are_under_way(nixl):
    effects = nixl.asks(1)
    [first], [] = only(effects, fx.DispatchPrefill), only(effects, fx.Dispatch)
    record = nixl.core.inflight[1]
    assert first.work.replica in ("p1", "p2") and first.work.answer_inbox is None
    assert record.replica in ("d1", "d2")
    assert (nixl.sent_to(first.work.replica), nixl.sent_to(record.replica)) == (1, 1)
    [second] = only(nixl.feed(ev.PrefillEnded(1, 1)), fx.Dispatch)
    assert (second.replica, second.attempt, second.pair) == (record.replica, 1, first.pair)
    assert second.handoff > first.work.handoff
    assert (nixl.sent_to(first.work.replica), nixl.sent_to(record.replica)) == (0, 1)
    nixl.feed(ev.AnswerStarted(1, 1))
    assert not only(nixl.feed(ev.AnswerEnded(1, 1)), ENDS)
    assert not nixl.core.inflight and nixl.sent_to(record.replica) == 0


def test_engines_that_meet_in_a_room_get_both_stages_at_once():
    region = Region("least-load")
    region.says("p", part("prefill", "sglang"))
    region.says("d", part("decode", "sglang", address=None))
    effects = region.asks(1)
    [first], [second] = only(effects, fx.DispatchPrefill), only(effects, fx.Dispatch)
    assert first.pair == second.pair and first.pair.prefill_address == "host-prefill:7"
    region.feed(ev.AnswerStarted(1, 1))
    assert not region.feed(ev.AttemptFailed(1, 1, "late", prefill=True)), "its work was done"
    region.feed(ev.AnswerEnded(1, 1))
    assert (region.sent_to("p"), region.sent_to("d")) == (0, 0)


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_stage_that_fails_leads_to_the_other_pair_and_cancels_what_is_left(nixl, at):
    [first] = only(nixl.asks(1), fx.DispatchPrefill)
    decode = nixl.core.inflight[1].replica
    if at == "decode":
        nixl.feed(ev.PrefillEnded(1, 1))
    effects = nixl.feed(ev.AttemptFailed(1, 1, "it broke", prefill=at == "prefill"))
    assert bool(only(effects, fx.CancelPrefill)) == (at == "prefill")
    [again] = only(effects, fx.DispatchPrefill)
    blamed = first.work.replica if at == "prefill" else decode
    assert nixl.core.inflight[1].avoid == {blamed}
    if at == "prefill":
        assert again.work.replica != first.work.replica
    assert again.work.attempt == 2


def test_a_decode_engines_error_may_be_its_partners_fault(nixl):
    """One member of each role dies: what is left still serves the request."""
    [first] = only(nixl.asks(1), fx.DispatchPrefill)
    record = nixl.core.inflight[1]
    decode, dead = record.replica, "d1" if record.replica == "d2" else "d2"
    nixl.feed(ev.PrefillEnded(1, 1))
    nixl.says(first.work.replica, state=ReplicaState.DOWN)
    nixl.says(dead, state=ReplicaState.DOWN)
    effects = nixl.feed(ev.AttemptFailed(1, 1, "the engine answered 500", 500))
    [again] = only(effects, fx.DispatchPrefill)
    assert again.work.replica not in (first.work.replica,)
    assert nixl.core.inflight[1].replica == decode, "the only one that is left"


def test_a_held_request_goes_back_to_a_doubted_decode_replica_when_the_other_one_dies(nixl):
    [first] = only(nixl.asks(1), fx.DispatchPrefill)
    doubted = nixl.core.inflight[1].replica
    other = "d1" if doubted == "d2" else "d2"
    nixl.feed(ev.PrefillEnded(1, 1))
    nixl.says(other, full=True, pending=3)
    nixl.feed(ev.AttemptFailed(1, 1, "the engine answered 500", 500))
    assert nixl.core.inflight[1].held_since is not None, "it waits for the other one"
    nixl.says(other, state=ReplicaState.DOWN)
    nixl.now += 0.1
    nixl.says(doubted)
    [again] = only(nixl.feed(ev.Tick()), fx.DispatchPrefill)
    assert (again.work.replica == first.work.replica, nixl.core.inflight[1].replica) == (
        False,
        doubted,
    )


@pytest.mark.parametrize(
    ("at", "status", "bad"),
    [
        ("prefill", None, "p1"),
        ("prefill", 500, "p1"),
        ("decode", None, "d1"),
        ("decode", 500, None),
    ],
)
def test_a_replica_of_pairs_whose_stages_fail_is_left_out(nixl, at, status, bad):
    """Unless it may be the other one's fault, or the transfer's."""
    given = []
    for key in range(1, 31):
        nixl.now += 0.1
        for name in ("p1", "p2", "d1", "d2"):
            nixl.says(name)
        attempt, [work] = 1, only(nixl.asks(key), fx.DispatchPrefill)
        given.append((work.work.replica, nixl.core.inflight[key].replica))
        for _ in range(3):
            prefill, decode = work.work.replica, nixl.core.inflight[key].replica
            is_bad = "1" in (prefill if at == "prefill" else decode)
            if at == "decode" or not is_bad:
                nixl.feed(ev.PrefillEnded(key, attempt))
            if not is_bad:
                break
            event = ev.AttemptFailed(key, attempt, "it broke", status, prefill=at == "prefill")
            works = only(nixl.feed(event), fx.DispatchPrefill)
            if not works:
                break
            [work], attempt = works, attempt + 1
        if key in nixl.core.inflight:
            nixl.feed(ev.AnswerStarted(key, attempt))
            nixl.feed(ev.AnswerEnded(key, attempt, Served(100, 0, 16)))
    assert set(nixl.core.replicas.failing.out()) == ({bad} if bad else set())
    if bad:
        assert sum(bad in pair for pair in given[10:]) == 0


def test_a_prefill_replica_that_is_lost_takes_the_attempt_with_it(nixl):
    [first] = only(nixl.asks(1), fx.DispatchPrefill)
    effects = nixl.says(first.work.replica, state=ReplicaState.GONE)
    [again] = only(effects, fx.DispatchPrefill)
    assert (again.work.attempt, again.work.replica == first.work.replica) == (2, False)


def expires(region: Region, name: str, *others: str) -> list[fx.Effect]:
    """That replica falls silent until it is lost, others don't."""
    effects: list[fx.Effect] = []
    for _ in range(30):
        region.now += 0.1
        for other in others:
            region.says(other)
        effects += region.feed(ev.Tick())
    assert region.core.replicas.get(ReplicaId(name)) is None
    return effects


@pytest.mark.parametrize("foreign", [False, True])
def test_a_decode_replica_that_is_lost_before_its_stage_takes_the_attempt_with_it(nixl, foreign):
    [first] = only(nixl.asks(1, foreign=foreign), fx.DispatchPrefill)
    lost = nixl.core.inflight[1].replica
    other = "d1" if lost == "d2" else "d2"
    effects = expires(nixl, lost, "p1", "p2", other)
    assert only(effects, fx.CancelPrefill) == [fx.CancelPrefill(1, 1, first.work.replica)]
    [again] = only(effects, fx.DispatchPrefill)
    record = nixl.core.inflight[1]
    assert (again.work.attempt, record.replica, record.avoid) == (2, other, frozenset())


def test_a_prefill_stage_that_ends_without_its_decode_replica_leads_to_another_attempt(nixl):
    nixl.asks(1)
    nixl.core.replicas.remove(nixl.core.inflight[1].replica)
    [again] = only(nixl.feed(ev.PrefillEnded(1, 1)), fx.DispatchPrefill)
    assert (again.work.attempt, nixl.core.inflight[1].avoid) == (2, frozenset())


def test_a_client_that_leaves_frees_both(nixl):
    [first] = only(nixl.asks(1), fx.DispatchPrefill)
    effects = nixl.feed(ev.ClientGone(1))
    assert only(effects, fx.CancelPrefill) == [fx.CancelPrefill(1, 1, first.work.replica)]
    assert not only(effects, fx.CancelAttempt), "nothing was sent to the decode replica"
    nixl.asks(2)
    nixl.feed(ev.PrefillEnded(2, 1))
    effects = nixl.feed(ev.ClientGone(2))
    assert only(effects, fx.CancelAttempt) and not only(effects, fx.CancelPrefill)
    assert sum(map(nixl.sent_to, ("p1", "p2", "d1", "d2"))) == 0


def test_without_a_prefill_replica_decode_replicas_of_nixl_answer_whole(nixl):
    for name in ("p1", "p2"):
        nixl.says(name, state=ReplicaState.DOWN)
    effects = nixl.asks(1)
    [whole] = only(effects, fx.Dispatch)
    assert whole.pair is None and whole.prefill_tokens == 4000


def test_without_a_prefill_replica_sglang_serves_nothing_and_says_so():
    region = Region("least-load", hold_s_max=1.0)
    region.says("p", part("prefill", "sglang"))
    region.says("d", part("decode", "sglang", address=None))
    assert region.core.models() == (build.MODEL,)
    region.says("p", state=ReplicaState.DOWN)
    region.says("d")
    assert region.core.models() == ()
    assert not only(region.asks(1), fx.Dispatch | fx.DispatchPrefill)
    region.now += 1.1
    region.says("d")
    [fail] = only(region.feed(ev.Tick()), fx.Fail)
    assert fail.fault is Fault.NO_REPLICA and "no replica serves" in fail.message


def test_a_prefill_replica_gets_no_request_alone():
    for policy in POLICIES:
        region = Region(policy)
        region.says("p", part("prefill"))
        assert not only(region.asks(1), fx.Dispatch | fx.DispatchPrefill), policy
        assert region.core.models() == (), "nobody is told that the model is served"


def test_only_replicas_of_one_transfer_kind_make_a_pair():
    region = Region("least-load")
    region.says("p", part("prefill", "p2p"))
    region.says("d", part("decode", "sglang", address=None))
    assert not only(region.asks(1), fx.Dispatch | fx.DispatchPrefill)
    region.says("x", part("prefill", "carrier-pigeon"))
    region.says("y", part("decode", "carrier-pigeon"))
    assert not only(region.asks(2), fx.Dispatch | fx.DispatchPrefill), "an unknown kind"


def test_a_prompt_that_was_never_computed_is_not_taken_for_held():
    region = priced()
    first, _ = chosen(region, 1, tokens=8000)
    hashes = build.prompt("ABCD").hashes
    [index] = region.core.state.placer.replica_indexes
    assert index.depth(first, hashes)[0] == len(hashes)
    region.feed(ev.ClientGone(1))
    assert index.depth(first, hashes)[0] == 0


def test_peers_hear_of_replicas_that_answer(nixl):
    nixl.says("whole")
    nixl.now += 1.0
    for name in ("p1", "p2", "d1", "d2", "whole"):
        nixl.says(name)
    [digest] = only(nixl.feed(ev.Tick()), fx.PublishDigest)
    assert (digest.digest.replicas_ready, digest.digest.replicas_free) == (3, 3)
    assert digest.digest.models.keys() == {build.MODEL} and not digest.digest.models_by_path


# By price.


def chosen(region: Region, key: int, **fields: object) -> tuple[str | None, str | None]:
    """The prefill and the answering replica of a new request."""
    effects = region.asks(key, **fields)
    [decided] = [effect for effect in only(effects, fx.Decided) if effect.key == key]
    return decided.decision.prefill, decided.decision.replica


def priced() -> Region:
    region = Region("mesh")
    region.says("p1", part("prefill"))
    region.says("p2", part("prefill"))
    region.says("d1", part("decode"), running=30, batch_max=64)
    return region


def test_a_long_prompt_goes_to_a_pair_and_a_short_one_stays_at_a_busy_decode_replica():
    region = priced()
    assert chosen(region, 1, tokens=8000)[0] in ("p1", "p2")
    region = priced()
    assert chosen(region, 2, tokens=50) == (None, "d1")


def test_a_prompt_that_the_decode_replica_holds_needs_no_transfer():
    region = priced()
    first, decode = chosen(region, 1, tokens=8000)
    region.feed(ev.PrefillEnded(1, 1))
    region.feed(ev.AnswerStarted(1, 1))
    region.feed(ev.AnswerEnded(1, 1, Served(8000, 8000, 40)))
    region.says("d1", running=30, batch_max=64)
    assert (first is None, decode) == (False, "d1")
    assert chosen(region, 2, tokens=8000) == (None, "d1")


def test_the_prefix_index_leads_to_the_prefill_replica_that_computed_it():
    region, prefills = Region("mesh"), [f"p{number}" for number in range(12)]
    for name in prefills:
        region.says(name, part("prefill", "sglang"))
    region.says("d1", part("decode", "sglang", address=None))
    for name in prefills:  # more replicas hold something than are candidates
        other = build.prompt("XYZ", 500).hashes
        region.core.state.placer.index.insert(name, other, region.now)
    first, _ = chosen(region, 1, tokens=8000)
    region.now += 0.82  # as long as it takes, so that the replica doesn't count as a faster one
    region.feed(ev.PrefillEnded(1, 1))
    for name in (*prefills, "d1"):
        region.says(name)
    assert chosen(region, 2, tokens=8000)[0] == first


def test_what_a_prefill_replica_has_evicted_is_forgotten():
    region = Region("mesh")
    region.says("p", part("prefill", "sglang"))
    region.says("d", part("decode", "sglang", address=None))
    [index] = region.core.state.placer.replica_indexes
    region.asks(1, tokens=900)
    region.feed(ev.PrefillEnded(1, 1, Served(900, 0, 1)))
    old = build.prompt("OLD", 900).hashes
    index.insert("p", old, region.now)
    region.now += 10.0
    for name in ("p", "d"):
        region.says(name)
    region.asks(2, tokens=900)
    assert index.depth("p", old)[0] == len(old)
    region.feed(ev.PrefillEnded(2, 1, Served(900, 0, 1)))
    assert index.depth("p", old)[0] == 0, "what is as old as what was missed is gone too"


def test_the_busy_prefill_replica_is_left_for_an_idle_one():
    region = priced()
    region.says("p1", prefill_queued_tokens=20_000)
    assert chosen(region, 1, tokens=8000)[0] == "p2"


def test_a_prefill_replica_counts_as_used_by_prompts_alone():
    region = priced()
    shares = FairShares({}, ["acme", "beta"], region.now)
    region.core.state.shares[build.MODEL] = shares
    first, _ = chosen(region, 1, tokens=8000, tenant="acme")
    assert shares.given_s("acme") > 8000 * 1e-4
    [(name, use)] = shares._uses.items()
    assert (name, use.first_s + use.more_s) == (first, pytest.approx(8000 * 1e-4))


def test_who_leaves_a_prefill_replica_to_others_may_try_one_that_failed(monkeypatch):
    """It has failed nowhere itself."""
    region = priced()
    region.says("p3", part("prefill"), prefill_queued_tokens=20_000)
    failing = region.core.replicas.failing
    failing.places["p1", build.MODEL] = None
    bars = {"p1": "tried again"}
    monkeypatch.setattr(
        type(failing),
        "bars",
        lambda _, name, model, now, has_failed=False: bars.get(name) if has_failed else None,
    )
    asked = build.request(1, "", region.now, prompt=build.prompt("ABCD", 8000))
    placer = region.core.state.placer
    place = placer.place(asked, (), region.now, kept_from=frozenset({"p2"}))
    assert place.prefill.replica == "p1"


def test_a_plain_replica_competes_with_pairs():
    region = priced()
    region.says("whole")
    assert chosen(region, 1, tokens=8000) == (None, "whole")
    region.says("whole", prefill_queued_tokens=30_000, running=60, batch_max=64)
    assert chosen(region, 2, tokens=8000)[0] in ("p1", "p2")


def test_a_secret_prefix_is_published_for_neither_replica_of_a_pair():
    home = Label("home")
    region = Region("mesh", ground=ground({build.US: (home,), build.EU: ()}))
    region.feed(ev.DigestSeen(build.digest("eu")))
    region.says("p", part("prefill", "sglang"))
    region.says("d", part("decode", "sglang", address=None))
    region.asks(1, tokens=900)  # open: its prefix may be published
    region.feed(ev.PrefillEnded(1, 1))
    prompt = build.prompt("SECRET", 900)
    secret = build.request(2, "", region.now, prompt=prompt, residency=(home,))
    assert only(region.feed(ev.RequestArrived(secret)), fx.DispatchPrefill)
    published = set()
    for _ in range(40):
        region.now += 0.1
        for delta in only(region.feed(ev.Tick()), fx.PublishTrie):
            published.update(delta.delta.gained)
    assert published and published.isdisjoint(prompt.hashes)


# Peers' requests.


def test_a_peers_request_waits_here_for_its_prefill_stage_and_then_answers_there(nixl):
    effects = nixl.asks(1, foreign=True)
    [first], [held] = only(effects, fx.DispatchPrefill), only(effects, fx.TellHeld)
    assert first.work.answer_inbox is None and held.answer_inbox == "inbox-1"
    nixl.now += 1.1
    for name in ("p1", "p2", "d1", "d2"):
        nixl.says(name)
    assert only(nixl.feed(ev.Tick()), fx.TellHeld), "so that its router goes on waiting"
    [second] = only(nixl.feed(ev.PrefillEnded(1, 1)), fx.Dispatch)
    assert second.answer_inbox == "inbox-1" and not nixl.core.inflight


def test_a_peers_request_is_placed_again_after_its_prefill_stage_failed(nixl):
    nixl.asks(1, foreign=True)
    [again] = only(nixl.feed(ev.AttemptFailed(1, 1, "it broke", prefill=True)), fx.DispatchPrefill)
    assert again.work.attempt == 2
    effects = nixl.feed(ev.AttemptFailed(1, 2, "it broke", prefill=True))
    [whole] = only(effects, fx.Dispatch)
    assert (whole.pair, whole.answer_inbox) == (None, "inbox-1"), "no prefill replica is left"


def test_a_peers_request_whose_body_is_elsewhere_is_not_computed_in_stages(nixl):
    [whole] = only(nixl.asks(1, foreign=True, is_whole_here=False), fx.Dispatch)
    assert whole.pair is None


def test_a_peers_request_whose_body_is_elsewhere_does_not_wait_for_a_pair():
    """It would wait for as long as any may, and clients' requests behind it."""
    region = Region("mesh")
    region.says("p", part("prefill", "sglang"))
    region.says("d", part("decode", "sglang", address=None))
    [refused] = only(region.asks(1, foreign=True, is_whole_here=False), fx.RefusePeer)
    assert refused.reason is Refusal.WRONG_MODEL and not region.core.inflight
    region.says("whole")
    assert only(region.asks(2, foreign=True, is_whole_here=False), fx.Dispatch)


def test_a_peer_whose_engines_can_not_serve_a_request_is_asked_for_others():
    region = Region("mesh")
    known = {build.MODEL: ModelCapacity(ready=1, free=1)}
    region.feed(ev.DigestSeen(build.digest(build.EU, models=known)))
    for key, refused in ((1, True), (2, False)):
        assert only(region.asks(key), fx.Forward)
        if refused:
            never = ev.AttemptRefused(key, 1, Refusal.WRONG_MODEL, build.EU, None, -1, -1)
            assert not only(region.feed(never), fx.Forward)
    region.feed(ev.DigestSeen(build.digest(build.EU, 2, models=known)))
    assert region.core.inflight[1].held_since is not None, "not asked for it again"


def test_a_peer_is_told_when_the_prefill_stage_of_an_answer_under_way_fails():
    region = Region("least-load")
    region.says("p", part("prefill", "sglang"))
    region.says("d", part("decode", "sglang", address=None))
    effects = region.asks(1, foreign=True)
    assert only(effects, fx.Dispatch)[0].answer_inbox == "inbox-1"
    effects = region.feed(ev.AttemptFailed(1, 1, "it broke", prefill=True))
    assert only(effects, fx.StopForwarded) == [fx.StopForwarded("inbox-1", ReplicaId("d"))]
    assert only(effects, fx.TellLost) == [fx.TellLost("inbox-1", ReplicaId("d"))]
    assert not region.core.inflight


@pytest.mark.parametrize("busy", ["p1", "p2"])
@pytest.mark.parametrize("policy", ["round-robin", "least-load"])
def test_the_chosen_pair_is_among_the_candidates_where_a_policy_prices_no_pairs(policy, busy):
    region = Region(policy)
    for name in ("p1", "p2"):
        region.says(name, part("prefill"), prefill_queued_tokens=5000 * (name == busy))
    for name in ("d1", "d2"):
        region.says(name, part("decode"))
    made = []
    for key in range(1, 5):
        [decided] = only(region.asks(key), fx.Decided)
        late = decided.unlisted
        listed = decided.decision.candidates if late is None else late.candidates()
        made.append(replace(decided.decision, candidates=listed))
    for one in made:
        chosen = chosen_of(one, one.candidates)
        assert one.prefill is not None and chosen is not None
        assert candidate_name(one, chosen) == place_name(one.replica, one.prefill)
