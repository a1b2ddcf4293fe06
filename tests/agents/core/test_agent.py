"""AgentCore: rows of events, and what comes of each."""

import pytest

from agents.core import effects, events
from agents.core.events import NOTHING_KNOWN, EngineReading, TokenUsage
from agents.core.heartbeat import GAP_MIN_S
from agents.core.requests import HELD_BYTES_MAX, PART_TIMEOUT_S
from agents.core.routers import RouterKey
from schemas.exchange import BODY_BYTES_MAX, Outcome, Refusal
from schemas.http import RESPONSES
from schemas.response_calls import RESPONSE
from schemas.response_ids import response_id
from schemas.state import ReplicaState
from tests.agents.core.bench import HEADERS, MODEL, Bench, inbox


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.read()
    return bench


def only(found: list, kind: type):
    assert [type(effect) for effect in found] == [kind]
    return found[0]


def test_good_work_is_handed_over_untouched(bench) -> None:
    hand = only(bench.work(1, body=b'{"a":1}', **{"Mesh-Request": "q-1"}), effects.StartRelay)
    assert (hand.inbox, hand.work.path, hand.body) == (inbox(1), "/v1/completions", b'{"a":1}')
    assert hand.work.request_id == "q-1"
    assert bench.core.outstanding == 1


@pytest.mark.parametrize(
    ("prepare", "headers", "reason"),
    [
        (lambda b: b.feed(events.DrainRequested()), {}, Refusal.DRAINING),
        (lambda b: b.fail(), {}, Refusal.ENGINE_DOWN),
        (lambda b: b.read(models=("other",)), {}, Refusal.WRONG_MODEL),
        (lambda b: b.read(EngineReading(waiting=1, running=3)), {}, Refusal.FULL),
        (lambda b: [b.work(n) for n in range(10, 14)], {}, Refusal.FULL),
        (lambda b: None, {"Mesh-Path": "/metrics"}, Refusal.WRONG_MODEL),
        (lambda b: None, {"Mesh-Path": "/v1/load_lora_adapter"}, Refusal.WRONG_MODEL),
        (lambda b: None, {"Mesh-Path": "/v1/completions/../x"}, Refusal.BAD_WORK),
    ],
)
def test_refusals(bench, prepare, headers, reason) -> None:
    prepare(bench)
    refuse = only(bench.work(1, **headers), effects.Refuse)
    assert refuse.message.reason == reason
    assert (refuse.message.region, refuse.message.replica) == ("us", "g0")
    assert bench.beat.refused_total == 1


CALL = {
    "Mesh-Path": RESPONSES,
    "Mesh-Call": f"GET /v1/responses/{response_id('us', 'g0', bytes(16))}",
    "Mesh-Model": "whatever",
}


def test_a_call_about_a_response_is_taken_where_responses_are_made(bench) -> None:
    assert (
        only(bench.work(1, body=b"", **CALL), effects.Refuse).message.reason == Refusal.WRONG_MODEL
    )
    bench.feed(events.EngineScraped(bench.now, NOTHING_KNOWN, (MODEL,), paths=(RESPONSES,)))
    hand = only(bench.work(2, body=b"", **CALL), effects.StartRelay)
    assert (hand.work.call.text, hand.work.path, hand.body) == (CALL["Mesh-Call"], RESPONSE, b"")
    assert bench.core.adapter_of(hand.work) is None


def test_a_refusal_carries_the_fresh_load(bench) -> None:
    bench.read(EngineReading(waiting=2, running=5))
    message = only(bench.work(1), effects.Refuse).message
    assert (message.pending, message.running) == (2, 5)
    bench.read(NOTHING_KNOWN, models=("other",))
    message = only(bench.work(1), effects.Refuse).message
    assert (message.pending, message.running) == (-1, -1)


def test_before_the_engine_answers_work_is_refused() -> None:
    bench = Bench()
    assert only(bench.work(1), effects.Refuse).message.reason == Refusal.ENGINE_DOWN
    assert bench.beats[0].state is ReplicaState.STARTING
    assert bench.beats[0].pending is None


@pytest.mark.parametrize(
    "reply", ["", "_INBOX.us.r1", "_INBOX.us.r1.>", "_INBOX.us.*.1", "mesh.us.r1.1", "_INBOX.U.r.1"]
)
def test_work_with_an_illegal_reply_subject_is_dropped(bench, reply) -> None:
    [dropped] = bench.feed(events.WorkArrived(reply, HEADERS, b"{}"))
    assert dropped == effects.DropWork(reply, 2)
    assert bench.core.outstanding == 0


def test_a_second_request_for_the_same_inbox_is_dropped(bench) -> None:
    bench.work(1)
    assert bench.work(1) == []
    assert bench.core.outstanding == 1


def test_no_time_left_on_arrival(bench) -> None:
    finish = only(bench.work(1, **{"Mesh-Deadline-Ms": "0"}), effects.SendEnd)
    assert finish.outcome is Outcome.DEADLINE
    assert bench.core.outstanding == 0


def test_a_cancel_aborts_once(bench) -> None:
    bench.work(1)
    abort = only(bench.feed(events.CancelArrived(inbox(1))), effects.AbortRelay)
    assert (abort.inbox, abort.outcome) == (inbox(1), Outcome.CANCELLED)
    assert bench.feed(events.CancelArrived(inbox(1))) == []
    assert bench.core.outstanding == 1
    bench.end(1, Outcome.CANCELLED)
    assert bench.core.outstanding == 0
    assert bench.feed(events.CancelArrived(inbox(1))) == []


def test_a_deadline_passes_while_the_router_is_alive(bench) -> None:
    bench.work(1)
    bench.now += 2.5
    bench.feed(events.AliveArrived("us", "r1", 1))
    assert bench.tick(2.4) == []
    abort = only(bench.tick(0.1), effects.AbortRelay)
    assert abort.outcome is Outcome.DEADLINE


def test_taken_counts_refused_work_and_starts_anew_with_its_router(bench) -> None:
    bench.feed(events.AliveArrived("us", "r1", 1))
    bench.work(1, **{"Mesh-From": "r1", "Mesh-Handoff": "4"})
    bench.work(2, **{"Mesh-From": "r1", "Mesh-Handoff": "5", "Mesh-Path": "/nowhere"})
    assert bench.beat.taken == {"r1": 5}
    bench.feed(events.AliveArrived("us", "r1", 2))
    assert bench.beat.taken == {}


def test_a_body_in_parts(bench) -> None:
    only(bench.work(1, body=b"", **{"Mesh-Body-Bytes": "6"}), effects.RequestBody)
    assert bench.feed(events.BodyPartArrived(inbox(1), 0, b"abc")) == []
    hand = only(bench.feed(events.BodyPartArrived(inbox(1), 3, b"def")), effects.StartRelay)
    assert hand.body == b"abcdef"


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        (lambda b: b.feed(events.BodyPartArrived(inbox(1), 2, b"x")), Outcome.BODY_LOST),
        (lambda b: b.feed(events.CancelArrived(inbox(1))), Outcome.CANCELLED),
        (lambda b: b.feed(events.StopRequested()), Outcome.ENGINE_LOST),
    ],
)
def test_a_body_that_never_gets_whole(bench, ending, outcome) -> None:
    bench.work(1, body=b"", **{"Mesh-Body-Bytes": "6"})
    finish = only(ending(bench), effects.SendEnd)
    assert finish.outcome is outcome
    assert bench.core.outstanding == 0
    assert bench.feed(events.BodyPartArrived(inbox(1), 0, b"abcdef")) == []


def test_an_overdue_part_loses_the_body(bench) -> None:
    bench.work(1, body=b"", **{"Mesh-Body-Bytes": "6", "Mesh-Deadline-Ms": "60000"})
    ended = []
    for _ in range(int(PART_TIMEOUT_S)):
        bench.feed(events.AliveArrived("us", "r1", 1))
        ended += bench.tick(1.0)
    assert only(ended, effects.SendEnd).outcome is Outcome.BODY_LOST


def test_work_that_may_queue_is_taken_up_to_the_cap() -> None:
    bench = Bench(outstanding_max=2)
    bench.read(EngineReading(waiting=5, running=3))
    for number in (1, 2):
        assert only(bench.work(9), effects.Refuse).message.reason == Refusal.FULL
        only(bench.work(number, **{"Mesh-May-Queue": "1"}), effects.StartRelay)
    beat = bench.core.heartbeat(bench.now)
    assert (beat.pending, beat.full) == (5, True)  # for routers that don't judge by themselves
    assert only(bench.work(3, **{"Mesh-May-Queue": "1"}), effects.Refuse).message.reason == (
        Refusal.FULL
    )


def test_bodies_waiting_for_a_first_byte_are_bounded() -> None:
    bench = Bench(outstanding_max=100)
    bench.read()
    for number in range(HELD_BYTES_MAX // BODY_BYTES_MAX):
        only(
            bench.work(number, b"", **{"Mesh-Body-Bytes": str(BODY_BYTES_MAX)}), effects.RequestBody
        )
    assert only(bench.work(99), effects.Refuse).message.reason == Refusal.FULL
    bench.feed(events.CancelArrived(inbox(0)))
    only(bench.work(99), effects.StartRelay)


def test_a_dead_engine_is_published_at_once_and_its_answers_end_after_silence(bench) -> None:
    bench.work(1, **{"Mesh-Deadline-Ms": "60000"})
    bench.now += 1.0
    bench.fail()
    bench.tick(GAP_MIN_S)
    assert bench.beats[-1].state is ReplicaState.DOWN
    bench.feed(events.AliveArrived("us", "r1", 1))
    assert bench.tick(2.9) == []
    bench.feed(events.AliveArrived("us", "r1", 1))
    assert only(bench.tick(0.1), effects.AbortRelay).outcome is Outcome.ENGINE_LOST


def test_a_lost_engine_is_looked_at_at_once(bench) -> None:
    bench.work(1)
    only(bench.end(1, Outcome.ENGINE_LOST), effects.ScrapeNow)
    bench.work(2)
    assert bench.end(2) == []
    assert bench.beat.served_total == 1


def test_heartbeats_keep_the_beat_and_count(bench) -> None:
    count = len(bench.beats)
    for _ in range(30):
        bench.tick(0.05)
    assert len(bench.beats) - count == 15
    assert [beat.seq for beat in bench.beats] == list(range(1, len(bench.beats) + 1))
    assert {beat.epoch for beat in bench.beats} == {7}


def test_turning_full_is_published_at_once_but_never_faster_than_the_gap(bench) -> None:
    bench.tick(0.05)
    count = len(bench.beats)
    bench.read(EngineReading(waiting=1, running=8))
    assert [beat.full for beat in bench.beats[count:]] == [True]
    bench.now += 0.002
    bench.read(EngineReading(waiting=0, running=8))
    assert len(bench.beats) == count + 1
    assert bench.core.wake_at == pytest.approx(bench.now + 0.008)
    bench.tick(GAP_MIN_S)
    assert [beat.full for beat in bench.beats[count:]] == [True, False]


def test_another_model_is_published_at_once(bench) -> None:
    bench.tick(0.05)
    bench.read(models=("other",))
    assert bench.beats[-1].models == ("other",)
    bench.read(models=None)
    assert bench.beat.models == ("other",)


def test_what_was_handed_over_since_the_reading_counts_beyond_the_room() -> None:
    bench = Bench(batch_max=2)
    bench.read()
    for number in range(2):
        bench.now += 0.001
        only(bench.work(number), effects.StartRelay)
    assert (bench.beat.pending, bench.beat.full) == (0, False)
    bench.now += 0.001
    bench.work(3)
    assert (bench.beat.pending, bench.beat.full) == (1, True)
    bench.feed(events.RelayBegan(inbox(3)))
    assert (bench.beat.pending, bench.beat.full) == (0, False)


def test_a_glimpse_of_a_request_that_waits_is_forgotten_when_it_has_begun(bench) -> None:
    bench.work(1)
    bench.now += 0.01
    bench.read(EngineReading(waiting=1, running=0))
    assert (bench.beat.pending, bench.beat.full) == (1, True)
    bench.now += 0.01
    bench.feed(events.RelayBegan(inbox(1)))
    assert (bench.beat.pending, bench.beat.full) == (0, False)
    bench.end(1)
    only(bench.work(2), effects.StartRelay)


def test_a_reading_that_is_late_does_not_bring_back_what_has_ended(bench) -> None:
    bench.work(1)
    bench.now += 0.01
    began_at = bench.now
    bench.now += 0.01
    bench.feed(events.RelayBegan(inbox(1)))
    bench.end(1)
    bench.feed(events.EngineScraped(began_at, EngineReading(waiting=1, running=0), None))
    assert (bench.beat.pending, bench.beat.full) == (0, False)


def test_an_engine_without_counts_is_bounded_by_what_it_was_handed() -> None:
    bench = Bench(counts_own=True, engine="openai", outstanding_max=2)
    bench.read(NOTHING_KNOWN)
    bench.work(1)
    assert (bench.beat.pending, bench.beat.running, bench.beat.full) == (None, 1, False)
    bench.work(2)
    assert (bench.beat.pending, bench.beat.running, bench.beat.full) == (None, 2, True)


def test_missing_counts_are_not_zero(bench) -> None:
    bench.read(NOTHING_KNOWN)
    beat = bench.beat
    unknown = (beat.pending, beat.running, beat.kv_used_ratio, beat.batch_occupancy)
    assert unknown == (None, None, None, None)


def test_speeds_are_learned_from_unqueued_streamed_answers() -> None:
    bench = Bench()
    for number in range(40):
        bench.read()
        uncached = 100 * (number % 7 + 1)
        bench.work(number)
        bench.now += 0.05 + 0.0002 * uncached
        bench.feed(events.RelayBegan(inbox(number)))
        bench.now += 1.0
        bench.end(number, usage=TokenUsage(uncached + 50, 50, 101), streamed=True)
    beat = bench.beat
    assert beat.prefill_s_per_token == pytest.approx(0.0002)
    assert beat.prefill_base_s == pytest.approx(0.05)
    assert beat.decode_tokens_per_s == pytest.approx(100.0)
    assert 0.0 < beat.prefix_hit_ratio < 0.5


@pytest.mark.parametrize(("companion", "streamed", "cached"), [(1, 1, 0), (0, 0, 0), (0, 1, -1)])
def test_answers_without_prefill_information_are_not_learned_from(
    companion, streamed, cached
) -> None:
    bench = Bench(outstanding_max=1000)
    for number in range(40):
        bench.read()
        if companion:
            only(bench.work(1000 + number), effects.StartRelay)
        uncached = 100 * (number % 7 + 1)
        only(bench.work(number), effects.StartRelay)
        bench.now += 0.0002 * uncached
        bench.feed(events.RelayBegan(inbox(number)))
        bench.end(number, usage=TokenUsage(uncached, cached, 5), streamed=bool(streamed))
        if companion:
            bench.end(1000 + number)
    assert bench.beat.prefill_s_per_token is None


def test_draining_finishes_running_requests_and_publishes_a_last_heartbeat(bench) -> None:
    bench.work(1)
    bench.now += 1.0
    bench.feed(events.DrainRequested())
    assert bench.beats[-1].state is ReplicaState.DRAINING
    assert bench.beats[-1].outstanding == 1
    bench.end(1)
    bench.feed(events.DrainFinished())
    assert bench.beats[-1].state is ReplicaState.GONE
    count = len(bench.beats)
    assert bench.tick(10.0) == []
    assert bench.work(2) == []
    assert len(bench.beats) == count
    assert bench.core.wake_at == float("inf"), "its host wakes it no more"


ADOPTED = {"Mesh-Owner": "eu", "Mesh-Term": "5"}


def test_work_of_a_region_that_does_not_own_the_replica_is_refused(bench) -> None:
    refuse = only(bench.work(1, **{"Mesh-Owner": "eu"}), effects.Refuse)
    assert refuse.message.reason == Refusal.NOT_OWNER
    refuse = only(bench.work(2, **ADOPTED), effects.Refuse)
    assert refuse.message.reason == Refusal.NOT_OWNER, "nor does it by saying so with its work"
    bench.feed(events.AliveArrived("eu", "r1", 1, 5))
    only(bench.work(3, **ADOPTED), effects.StartRelay)
    refuse = only(bench.work(4), effects.Refuse)
    assert refuse.message.reason == Refusal.NOT_OWNER, "its own region does not own it now"
    bench.feed(events.AliveArrived("us", "r1", 1, 6))
    only(bench.work(5, **{"Mesh-Term": "6"}), effects.StartRelay)
    refuse = only(bench.work(6, **ADOPTED), effects.Refuse)
    assert refuse.message.reason == Refusal.NOT_OWNER


@pytest.mark.parametrize("owner", ["", "x y!", "eu\n", "e" * 33])
def test_an_owner_whose_name_is_none_is_bad_work(bench, owner) -> None:
    headers = {"Mesh-Owner": owner, "Mesh-From": "r1", "Mesh-Handoff": "7"}
    refuse = only(bench.work(1, **headers), effects.Refuse)
    assert refuse.message.reason == Refusal.BAD_WORK
    assert (bench.beat.taken, bench.beat.owner_taken) == ({}, {})


def test_a_sign_of_life_settles_whose_the_replica_is(bench) -> None:
    bench.feed(events.AliveArrived("eu", "r1", 1, 5))
    assert (bench.beat.owner, bench.beat.term) == ("eu", 5)
    assert only(bench.work(1), effects.Refuse).message.reason == Refusal.NOT_OWNER
    bench.feed(events.AliveArrived("us", "r1", 1, 6))
    assert (bench.beat.owner, bench.beat.term) == (None, 6)
    only(bench.work(2), effects.StartRelay)


def test_each_change_of_owner_by_a_claim_is_logged_once(bench) -> None:
    def claimed(region: str, term: int | None) -> list[effects.AgentEffect]:
        done = bench.feed(events.AliveArrived(region, "r1", 1, term))
        return [one for one in done if isinstance(one, effects.LogOwnerChange)]

    assert claimed("us", 1) == claimed("us", None) == []
    assert claimed("eu", 5) == [effects.LogOwnerChange(RouterKey("eu", "r1"), 5)]
    assert claimed("eu", 5) == claimed("us", 4) == []
    assert claimed("us", 6) == [effects.LogOwnerChange(RouterKey("us", "r1"), 6)]


def test_hand_offs_of_an_adopter_are_kept_apart_from_those_at_home(bench) -> None:
    bench.work(1, **{"Mesh-From": "r1", "Mesh-Handoff": "7"})
    assert (bench.beat.taken, bench.beat.owner_taken) == ({"r1": 7}, {})
    bench.feed(events.AliveArrived("eu", "r1", 1, 5))
    bench.work(2, **ADOPTED, **{"Mesh-From": "r1", "Mesh-Handoff": "3"})
    assert (bench.beat.taken, bench.beat.owner_taken) == ({"r1": 7}, {"r1": 3})


def test_what_was_taken_before_the_change_of_hands_is_finished(bench) -> None:
    bench.work(1)
    bench.feed(events.AliveArrived("eu", "r1", 1, 5))
    assert bench.end(1) == [] and bench.beat.served_total == 1


@pytest.mark.parametrize(("engine", "takes"), [("vllm", True), ("openai", False)])
def test_only_kinds_that_go_on_with_an_assistants_message_are_asked_to(engine, takes) -> None:
    bench = Bench(engine=engine)
    bench.read()
    [taken] = bench.work(1, **{"Mesh-Continues": "1"})
    assert isinstance(taken, effects.StartRelay) is takes
    if not takes:
        assert taken.message.reason is Refusal.WRONG_MODEL
