"""A session without any world: what goes out for what comes in, and in which order."""

from dataclasses import replace
from itertools import count

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.answer import EVENT_STREAM, WORKING, Held
from mesh.session.bus_receiver import CANCEL_AGAIN_S, CANCELLED_MAX, REQUEST_S, REQUESTS_MAX
from mesh.session.record import Home, Identifiers, Observer, OpenRequest
from mesh.session.session import Session
from schemas import exchange, wire
from schemas.exchange import Frame, Outcome, Refusal, pack_frame
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.residency import OPEN_GROUND, Ground, Label
from schemas.state import ModelCapacity
from tests.mesh.core.build import EU, US, digest, foreign, request

PLACE = fx.Dispatch(1, 1, ReplicaId("us-0"), 1, None)
HEAD = exchange.Head(200, EVENT_STREAM, "us", "us-0")
END = exchange.End(Outcome.DONE, "", 9, 4, 2, 0.1)


class RecordingObserver(Observer):
    """Keeps what was told of ends and bodies, and which refusals and failures were counted."""

    def __init__(self):
        self.calls, self.told = [], []

    def handed_out(self, key, region):
        self.told.append(("handed_out", key, region))

    def body_dropped(self, kept_bytes):
        self.told.append(("body_dropped", kept_bytes))

    def request_ended(self, record, ending):
        assert record.ending is ending
        self.told.append((ending.outcome, ending.status, ending.detail))

    def residency_refused(self, asker):
        self.calls.append(("residency_refused", asker))

    def attempt_failed(self, record, event):
        self.calls.append(("attempt_failed", event.detail))


class Router:
    """A session whose core answers by a script, and its bus."""

    is_connected = True
    now = 5.0

    def __init__(self, ground=OPEN_GROUND, **effects):
        self.effects = effects  # by event
        self.events, self.sent, self.takes = [], [], True
        self.observer = RecordingObserver()
        self.session = Session(
            Home(US, "r1", ground),
            decide=self.decide,
            clock=lambda: self.now,
            bus=self,
            ids=Identifiers(lambda: "secret", count(1)),
            observer=self.observer,
            keep_alive_s=10.0,
        )

    def decide(self, event, now):
        self.events.append(event)
        return self.effects.get(type(event).__name__, [])

    def __getattr__(self, name):
        def send(*args):
            self.sent.append((name, *args))
            return self.takes

        return send

    def admitted(self, **fields):
        record = OpenRequest(**{"request": request(1), "body": b"{}", **fields})
        self.session.admit(record)
        return record


def test_an_attempt_goes_out_with_an_inbox_that_only_its_replica_knows():
    router = Router(RequestArrived=[PLACE])
    record = router.admitted()
    [(name, sent, region, replica, inbox, headers)] = router.sent
    assert (name, sent, region, replica) == ("send_work", record, US, "us-0")
    assert inbox == "_INBOX.us.r1.p-1-1-secret"
    assert (headers[exchange.H_FROM], headers[exchange.H_HANDOFF]) == ("r1", "1")


def test_a_client_whose_stream_is_silent_is_told_with_a_tick():
    router, told = Router(), []
    record = router.admitted(fell_silent=lambda: told.append(router.now))
    for router.now in (9.0, 10.0, 14.9, 15.0, 15.1, 20.0, 25.0):
        router.session.tick()
    assert told == [15.0, 25.0]
    router.session.end(record, "ok", 200)
    router.now = 60.0
    router.session.tick()
    assert told == [15.0, 25.0]


def test_what_comes_up_while_effects_are_performed_waits_until_they_are():
    router = Router(RequestArrived=[PLACE, fx.CancelAttempt(1, 1, US, ReplicaId("us-0"))])
    router.takes = False
    router.admitted()
    assert [name for name, *_ in router.sent] == ["send_work", "send_cancel"]
    [_, failed] = router.events
    assert failed == ev.AttemptFailed(1, 1, "the bus does not take it", blameless=True)
    assert router.observer.calls == [("attempt_failed", "the bus does not take it")]


def test_an_attempt_that_is_taken_from_its_place_says_why_in_its_requests_story():
    why = "us-0 brought nothing in 1.2 s, while other replicas answered: moved"
    router = Router(RequestArrived=[PLACE, fx.CancelAttempt(1, 1, US, ReplicaId("us-0"), why)])
    assert router.admitted().steps[-1].what == ev.AttemptFailed(1, 1, why)


@pytest.mark.parametrize(
    ("effect", "region"), [(PLACE, US), (fx.Forward(1, 1, EU), EU)], ids=["here", "at a peer"]
)
def test_a_request_ends_once_and_what_is_told_of_it_is_its_ending(effect, region):
    router = Router(RequestArrived=[effect])
    record = router.admitted(kept_bytes=2)
    assert record.ending is None
    assert router.session.end(record, "client_gone", 499, "client_gone", "the client hung up")
    assert not router.session.end(record, "ok", 200), "it is over"
    told = [("handed_out", 1, region), ("body_dropped", 2)]
    assert router.observer.told == [*told, ("client_gone", 499, "the client hung up")]
    assert (record.ending.request, record.ending.ended_at) == ("request-1", router.now)


def test_a_peers_request_ends_when_it_is_refused():
    router = Router(RequestArrived=[fx.RefusePeer(1, "inbox", exchange.Refusal.FULL)])
    record = OpenRequest(request=foreign(1), body=b"{}", kept_bytes=2)
    router.session.admit_forwarded(record)
    assert router.observer.told == [("refused", 0, "full"), ("body_dropped", 2)]
    assert record.ending.origin == record.request.origin


@pytest.mark.parametrize("as_bytes", [False, True])
def test_frames_and_decoded_messages_end_in_the_same_events(as_bytes):
    router = Router(RequestArrived=[PLACE])
    record = router.admitted()
    answers, inbox = router.session.answers, record.answer.inbox
    messages = [(Frame.HEAD, HEAD), (Frame.DATA, b"\n\n"), (Frame.WORKING, WORKING)]
    for number, (kind, message) in enumerate([*messages, (Frame.END, END)]):
        if as_bytes:
            payload = message if isinstance(message, bytes) else b""
            if kind in (Frame.HEAD, Frame.END):
                payload = wire.encode(message)
            assert answers.receive_frame(inbox, pack_frame(kind, number, payload))
        else:
            assert answers.receive(inbox, message)
    [_, progressed, ended] = router.events
    assert progressed == ev.AttemptProgressed(1, 1)
    assert isinstance(ended, ev.AnswerEnded) and ended.served.cached_tokens == 4
    assert not answers.receive(inbox, WORKING), "nobody waits any more"


@pytest.mark.parametrize("answer_tokens", [None, 0])
@pytest.mark.parametrize("content_type", [EVENT_STREAM, "application/json"])
def test_the_end_of_an_answer_says_whether_its_start_shows_the_first_token(
    answer_tokens, content_type
):
    router = Router(RequestArrived=[PLACE])
    record = router.admitted(request=request(1, answer_tokens=answer_tokens))
    for message in (replace(HEAD, content_type=content_type), b"1\n\n", END):
        router.session.answers.receive(record.answer.inbox, message)
    router.session.started(record)
    ended, started = router.events[-2:]
    assert isinstance(ended, ev.AnswerEnded) and isinstance(started, ev.AnswerStarted)
    expected = content_type == EVENT_STREAM or answer_tokens == 0
    assert ended.shows_ttft == started.shows_ttft == expected


def test_frames_that_are_lost_again_are_requested_again():
    """The first one comes a second time, and none after it does."""
    router = Router(RequestArrived=[PLACE])
    record = router.admitted()
    answers, inbox = router.session.answers, record.answer.inbox
    frames = [pack_frame(Frame.HEAD, 0, wire.encode(HEAD)), pack_frame(Frame.DATA, 1, b"1\n\n")]
    frames += [pack_frame(Frame.DATA, 2, b"2\n\n"), pack_frame(Frame.END, 3, wire.encode(END))]
    for came in (0, 2, 3, 1):
        answers.receive_frame(inbox, frames[came])
    router.now += REQUEST_S
    answers.tick()
    asked = [args[-1].missing_from for name, *args in router.sent if name == "send_credit"]
    assert asked == [1, 2] and answers.missing == 1
    for came in (2, 3):
        answers.receive_frame(inbox, frames[came])
    router.now += REQUEST_S
    answers.tick()
    assert (record.answer.end, answers.missing) == (END, 0)


def test_whoever_sends_a_stray_is_told_to_stop():
    router = Router()
    router.session.answers.receive_stray("inbox", pack_frame(Frame.HEAD, 0, wire.encode(HEAD)))
    assert router.sent == [("send_cancel", "us", "us-0", "inbox")]


HEAD_FRAME = pack_frame(Frame.HEAD, 0, wire.encode(HEAD))
FAILED_END = exchange.End(Outcome.CANCELLED, "", -1, -1, -1, -1.0)


@pytest.mark.parametrize(
    ("second", "cancels"),
    [
        (pack_frame(Frame.HEAD, 1, wire.encode(HEAD)), 1),  # a second one
        (pack_frame(Frame.BODY_WANTED, 1, b"no message pack"), 1),
        (pack_frame(Frame.END, 1, b"no message pack"), 0),
        (pack_frame(Frame.DATA, 2, b"2\n\n"), 1),  # frame 1 never comes
        (pack_frame(Frame.END, 1, wire.encode(FAILED_END)), 0),
    ],
    ids=["two heads", "unreadable", "unreadable end", "lost", "it says so itself"],
)
def test_an_agent_whose_answer_the_router_gives_up_is_told_to_stop(second, cancels):
    router = Router(RequestArrived=[PLACE])
    record, answers = router.admitted(), router.session.answers
    inbox = record.answer.inbox
    for frame in (HEAD_FRAME, second):
        answers.receive_frame(inbox, frame)
    for _ in range(REQUESTS_MAX):
        router.now += REQUEST_S * 2**REQUESTS_MAX
        answers.tick()
    assert isinstance(router.events[-1], ev.AttemptFailed)
    cancelled = [args for name, *args in router.sent if name == "send_cancel"]
    assert cancelled == [[US, PLACE.replica, inbox]] * cancels


def test_a_cancel_is_sent_again_while_frames_come_that_name_nobody():
    router = Router(RequestArrived=[PLACE], ClientGone=[fx.CancelAttempt(1, 1, US, PLACE.replica)])
    record, answers = router.admitted(), router.session.answers
    inbox = record.answer.inbox
    data, end = pack_frame(Frame.DATA, 4, b"x"), pack_frame(Frame.END, 5, wire.encode(END))
    answers.receive_stray(inbox, data)  # another inbox's sender is not known
    router.session.feed(ev.ClientGone(1))
    cancel = ("send_cancel", US, PLACE.replica, inbox)
    for router.now, sent in ((5.9, 1), (6.0, 2), (6.9, 2), (7.0, 3)):
        answers.receive_stray(inbox, data)
        assert router.sent[1:] == [cancel] * sent
    answers.receive_stray(inbox, end)
    router.now = 9.0
    answers.receive_stray(inbox, data)
    assert router.sent[1:] == [cancel] * 3, "it has ended"


def test_of_many_answers_that_go_on_the_first_are_not_cancelled_again():
    router = Router()
    answers = router.session.answers
    for number in range(CANCELLED_MAX + 1):
        answers.cancel(US, PLACE.replica, f"inbox-{number}")
    router.sent.clear()
    router.now += CANCEL_AGAIN_S
    for number in (0, 1, CANCELLED_MAX):
        answers.receive_stray(f"inbox-{number}", pack_frame(Frame.DATA, 4, b"x"))
    assert [inbox for *_, inbox in router.sent] == ["inbox-1", f"inbox-{CANCELLED_MAX}"]


def test_a_peer_is_told_who_will_answer_before_anybody_can():
    inbox = "inbox-1"
    placed = fx.Dispatch(1, 1, ReplicaId("us-0"), 1, inbox)
    held = fx.TellHeld(inbox, 1)
    router = Router(RequestArrived=[held, placed])
    record = OpenRequest(request=foreign(1), received={exchange.H_REQUEST: "q"}, body=b"{}")
    router.session.admit_forwarded(record)
    assert [name for name, *_ in router.sent] == ["answer_peer", "answer_peer", "send_work"]
    assert router.sent[0][2] == Held(1)
    assert router.sent[1][2] == exchange.Placed("us", "us-0")
    assert router.sent[2][4] == inbox and router.session.forwarded == 0


def test_where_nobody_listens_it_is_a_refusal():
    router = Router(RequestArrived=[fx.Forward(1, 1, EU)])
    record = router.admitted()
    assert router.session.answers.no_subscriber(record.answer.inbox)
    refused = router.events[-1]
    assert (refused.reason, refused.region) == ("nobody_listens", RegionId("us"))
    assert not router.session.answers.no_subscriber(record.answer.inbox)


@pytest.mark.parametrize("why", [Refusal.FULL, Refusal.RESIDENCY])
def test_a_refusal_of_a_peers_request_is_counted_and_small(why):
    models = {ModelId(f"m{number}" * 20): ModelCapacity(ready=4, free=1) for number in range(400)}
    fresh = replace(digest("us"), models=models)
    refuse = fx.RefusePeer(1, "_INBOX.eu.r1.x", why, fresh)
    router = Router(RequestArrived=[refuse])
    router.session.admit_forwarded(OpenRequest(request=foreign(1), body=b"{}"))
    counted = why is Refusal.RESIDENCY
    assert router.observer.calls.count(("residency_refused", "peer")) == counted
    [(_, inbox, refused)] = [one for one in router.sent if one[0] == "answer_peer"]
    assert (inbox, refused.reason, refused.digest) == ("_INBOX.eu.r1.x", why, "")
    assert wire.decode_as(exchange.Refused, wire.encode(refused)) == refused


def test_after_an_exception_events_keep_their_order():
    router = Router(RequestArrived=[PLACE])
    router.takes = False

    def fail(effect):
        router.session.feed(ev.Tick())
        raise RuntimeError("a defect")

    router.session.performers[fx.Dispatch] = fail
    with pytest.raises(RuntimeError):
        router.admitted()
    router.session.feed(ev.Drain())
    assert [type(one) for one in router.events] == [ev.RequestArrived, ev.Tick, ev.Drain]


def test_a_body_that_a_region_nobody_knows_wants_ends_the_attempt():
    router = Router(RequestArrived=[fx.Forward(1, 1, EU)])
    record = router.admitted()
    router.takes = False  # the bus: that region is no peer
    wanted = wire.encode(exchange.BodyWanted("made-up", "x"))
    router.session.answers.receive_frame(
        record.answer.inbox, pack_frame(Frame.BODY_WANTED, 0, wanted)
    )
    [(name, _, region, *_)] = router.sent[1:]
    assert (name, region) == ("send_body", "made-up")
    failed = router.events[-1]
    assert isinstance(failed, ev.AttemptFailed) and not failed.blameless


def test_a_body_that_may_not_go_there_is_a_failure_of_the_region_that_sent_its_request_on():
    ground = Ground(carried=((US, (Label("de"),)),))
    router = Router(RequestArrived=[fx.Forward(1, 1, EU)], ground=ground)
    record = router.admitted(request=request(1, residency=(Label("de"),)))
    frame = pack_frame(Frame.BODY_WANTED, 0, wire.encode(exchange.BodyWanted("eu", "eu-0")))
    router.session.answers.receive_frame(record.answer.inbox, frame)
    failed = router.events[-1]
    assert isinstance(failed, ev.AttemptFailed) and not failed.blameless
    assert "may not go there" in failed.detail
    assert router.observer.calls[0] == ("residency_refused", "body")
    assert [name for name, *_ in router.sent] == ["send_ingress"]
