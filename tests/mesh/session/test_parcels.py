"""Frames of several answers in one message: damage harms no more than it must."""

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.record import OpenRequest
from schemas import exchange, subjects, wire
from schemas.exchange import Frame, Outcome, pack_frame
from schemas.ids import RegionId, ReplicaId
from schemas.parcels import pack_parcels
from tests.mesh.core.build import request
from tests.mesh.session.test_session import HEAD, Router

INBOXES = f"{subjects.inbox_prefix('us', 'r1')}."
EVENT = b'data: {"choices": []}\n\n'
END = exchange.End(Outcome.DONE, "", 10, 0, 1, 0.01)


class TwoAnswers:
    """Two requests under way at us-0, whose frames come in parcels."""

    def __init__(self) -> None:
        self.router = router = Router()
        self.records = []
        for key in (1, 2):
            router.effects["RequestArrived"] = [fx.Dispatch(key, 1, ReplicaId("us-0"), key, None)]
            record = OpenRequest(request=request(key), body=b"{}")
            router.session.admit(record)
            self.records.append(record)
        router.sent.clear()

    def come(self, *posts, cut=0):
        """Frames as one message, its last bytes cut off."""
        named = [(inbox.removeprefix(INBOXES), frame) for inbox, frame in posts]
        [parcel] = pack_parcels(named)
        self.router.session.answers.receive_parcel(INBOXES, parcel[: len(parcel) - cut])

    def frames(self, which, text=EVENT):
        """All of a short stream."""
        kinds = [(Frame.HEAD, wire.encode(HEAD)), (Frame.DATA, text), (Frame.END, wire.encode(END))]
        inbox = self.records[which].answer.inbox
        return [(inbox, pack_frame(kind, n, data)) for n, (kind, data) in enumerate(kinds)]

    def taken(self):
        return [record.answer.take() for record in self.records]

    def failed(self):
        return [event for event in self.router.events if isinstance(event, ev.AttemptFailed)]

    def asked_again(self):
        return [args[-1] for name, *args in self.router.sent if name == "send_credit"]


@pytest.fixture
def two():
    return TwoAnswers()


def mixed(one, other):
    """Frames of two answers in turns."""
    return [post for pair in zip(one, other, strict=True) for post in pair]


def test_each_client_gets_its_own(two):
    woken = []
    for record in two.records:
        record.changed = lambda record=record: woken.append(record.request.key)
    two.come(*mixed(two.frames(0, b"data: 1\n\n"), two.frames(1, b"data: 2\n\n")))
    assert two.taken() == [b"data: 1\n\n", b"data: 2\n\n"]
    assert woken == [1, 2], "once, when all is here"


def test_a_frame_that_can_not_be_read_fails_its_own_answer(two):
    head, *_ = two.frames(1)
    inbox = head[0]
    two.come(*mixed(two.frames(0), [head, (inbox, b"?0000"), (inbox, b"?0000")]))
    [failed] = two.failed()
    assert (failed.key, two.records[0].answer.end) == (2, END)


def test_what_a_cut_parcel_lost_is_requested_by_its_number(two):
    first, *rest = two.frames(1)
    two.come(*two.frames(0), first, rest[0], cut=1)
    two.come(rest[1])
    inbox = first[0]
    assert two.asked_again() == [exchange.Credit(inbox, 0, missing_from=1)]
    two.come(*rest)
    assert [record.answer.end for record in two.records] == [END, END]
    assert two.failed() == []


def test_what_is_lost_for_good_fails_its_own_answer_and_no_agent(two):
    first, _, last = two.frames(1)
    two.come(*two.frames(0), first, last)
    for _ in range(8):
        two.router.now += 0.5
        two.router.session.tick()
    [failed] = two.failed()
    assert (failed.key, failed.blameless) == (2, True)
    assert len(two.asked_again()) == 3
    assert two.router.session.answers.missing == 0


def test_a_body_that_is_wanted_twice_is_sent_once(two):
    """An agent that repeats what it said last still has the parts that came."""
    wanted = wire.encode(exchange.BodyWanted("us", "us-0"))
    inbox = two.records[0].answer.inbox
    for _ in range(2):
        two.come((inbox, pack_frame(Frame.BODY_WANTED, 0, wanted)))
    assert [name for name, *_ in two.router.sent] == ["send_body"]


def test_after_a_loss_of_its_bus_a_router_requests_the_rest_of_what_has_begun(two):
    two.come(*two.frames(0)[:2])
    two.router.session.bus_returned()
    inbox = two.records[0].answer.inbox
    assert two.asked_again() == [exchange.Credit(inbox, 0, missing_from=2)]


def test_after_a_loss_of_a_link_the_rest_of_what_that_region_answers_is_requested(two):
    two.router.session.answers.link_returned(RegionId("eu"))
    assert two.asked_again() == []
    two.come(*two.frames(0)[:2])
    two.router.session.answers.link_returned(RegionId("us"))
    first, second = (record.answer.inbox for record in two.records)
    assert two.asked_again() == [
        exchange.Credit(first, 0, missing_from=2),
        exchange.Credit(second, 0, missing_from=0),  # its head may be lost, too
    ]


def test_a_parcel_for_nobody_and_bytes_that_are_none_change_nothing(two):
    nobody = subjects.inbox("us", "r1", "nobody")
    two.come(*[(nobody, frame) for _, frame in two.frames(0)])
    two.router.session.answers.receive_parcel(INBOXES, b"\xff" * 7)
    two.come(*two.frames(0), *two.frames(1))
    assert two.taken() == [EVENT, EVENT]


def test_a_client_is_given_nothing_of_an_attempt_that_failed_before_its_first_byte(two):
    """Its engine died at once, and no other place is free yet: the next attempt says it all."""
    head, data, (inbox, _) = two.frames(0)
    lost = exchange.End(Outcome.ENGINE_LOST, "", -1, -1, -1, -1.0)
    began = []
    record = two.records[0]
    record.changed = lambda: began.append(record.answer.is_startable)
    two.come(head, data, (inbox, pack_frame(Frame.END, 2, wire.encode(lost))), *two.frames(1))
    assert [failed.key for failed in two.failed()] == [1]
    assert began == [False]
    assert two.records[1].answer.is_startable


def test_no_frame_of_the_next_attempt_is_written_as_one_of_the_attempt_before(two):
    two.come(*two.frames(0)[:2])
    record = two.records[0]
    record.direct_writer = object()  # asked for nothing from here on
    two.router.session.stop_listening(record)
    assert record.direct_writer is None
