"""Bodies for agents of other regions leave in parts, in turn, as pings behind them are answered."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest

from agents.core.answer_stream import FlowWindow
from mesh.adapters.paced_links import PacedLinks
from mesh.core.model import effects as fx
from mesh.session.link_pace import FIRST_WINDOW_BYTES, PART_BYTES, WINDOW_BYTES_START
from mesh.session.record import Home, Identifiers, OpenRequest
from mesh.session.said import Said, Splice
from mesh.session.session import Session
from schemas import exchange, subjects, wire
from schemas.exchange import Frame, Outcome, Refusal, pack_frame
from schemas.ids import ReplicaId
from schemas.replies import PING_PREFIX, reply_inbox
from tests.mesh.core.build import EU, US, request
from tests.support.until import PATIENCE_S

PARTS_START = WINDOW_BYTES_START // PART_BYTES


class Sent:
    """What was published; `answer` the pings of it."""

    def __init__(self):
        self.parts, self.pings, self.takes = [], [], True
        self.bodies = PacedLinks("us", "r1", ("eu", "ap"), self.publish)

    def publish(self, subject, payload=b"", *, reply="", headers=None):
        if not self.takes:
            return False
        if headers is None:
            region = subjects.owner(subject)
            assert subject == subjects.ping(region)
            assert reply_inbox("ping", subject, reply, region, {"us"}) is not None
            self.pings.append((region, payload))
        else:
            assert subject == subjects.body("eu", "eu-0")
            at = int(headers[exchange.H_BODY_OFFSET])
            self.parts.append((headers[exchange.H_BODY_INBOX], at, payload))
        return True

    def send(self, inbox, size):
        body = bytes(range(256)) * (size // 256)
        record = SimpleNamespace(body=body)
        self.bodies.send_body(record, "eu", subjects.body("eu", "eu-0"), inbox, lambda: True)
        return record

    def answer(self):
        """Every ping; False if none is left."""
        pings, self.pings = self.pings, []
        for region, data in pings:
            assert self.bodies.passed(PING_PREFIX + region, data)
        return bool(pings)

    def body(self, inbox):
        """What arrived of it, in order and without a hole."""
        whole = b""
        for to, at, payload in self.parts:
            if to == inbox:
                assert at == len(whole) and len(payload) <= PART_BYTES
                whole += payload
        return whole


@pytest.fixture
async def sent():
    made = Sent()
    yield made
    made.bodies.close()


async def test_parts_leave_as_those_before_them_have_passed(sent):
    record = sent.send("a", 64 * PART_BYTES)
    assert len(sent.parts) == PARTS_START == len(sent.pings)
    await asyncio.sleep(0)
    while sent.answer():
        pass
    assert sent.body("a") == record.body


@pytest.mark.parametrize("region", [EU, None])
async def test_what_a_link_lost_holds_up_nothing_once_it_is_back(sent, region):
    sent.send("a", 64 * PART_BYTES)
    lost, sent.pings = sent.pings, []
    sent.bodies.returned("ap")
    assert len(sent.parts) == PARTS_START
    sent.bodies.returned(region)
    assert len(sent.parts) == 2 * PARTS_START
    for _, data in lost:  # late after all
        sent.bodies.passed(PING_PREFIX + EU, data)
    assert len(sent.parts) == 2 * PARTS_START
    assert sent.answer()
    assert len(sent.parts) > 2 * PARTS_START


async def test_regions_that_only_a_frame_names_get_no_part_and_no_ping(sent):
    record = SimpleNamespace(body=b"x" * PART_BYTES)
    for number in range(1000):
        name = f"made-up-{number}"
        assert not sent.bodies.send_body(record, name, subjects.body(name, "r"), "a", lambda: True)
    assert (sent.parts, sent.pings, sent.bodies._links) == ([], [], {})
    assert sent.bodies.send_body(record, "eu", subjects.body("eu", "eu-0"), "a", lambda: True)
    assert len(sent.parts) == 1


async def test_bodies_take_turns(sent):
    one, two = sent.send("a", 40 * PART_BYTES), sent.send("b", 3 * PART_BYTES)
    while len(sent.body("b")) < len(two.body):
        assert sent.answer()
    assert len(sent.body("a")) < len(one.body)
    while sent.answer():
        pass
    assert (sent.body("a"), sent.body("b")) == (one.body, two.body)


class Asking:
    """A session with one request of 20 parts, which eu was asked to place, and its bus."""

    is_connected = True

    def __init__(self, sent):
        self.sent, self.effects = sent, {"RequestArrived": [fx.Forward(1, 1, EU)]}
        self.session = Session(
            Home(US, "r1"),
            decide=lambda event, now: self.effects.get(type(event).__name__, []),
            clock=lambda: 5.0,
            bus=self,
            ids=Identifiers(lambda: "secret", count(1)),
        )
        body = bytes(20 * PART_BYTES)
        self.record = OpenRequest(request=request(1), body=body, kept_bytes=1)
        self.session.admit(self.record)
        self.inbox = self.record.answer.inbox
        self.frame(Frame.BODY_WANTED, 0, exchange.BodyWanted("eu", "eu-0"))

    def __getattr__(self, name):
        return lambda *args: True

    def send_body(self, record, region, replica, inbox, is_wanted):
        to = subjects.body(region, replica)
        return self.sent.bodies.send_body(record, region, to, inbox, is_wanted)

    def frame(self, kind, number, message):
        frame = pack_frame(kind, number, wire.encode(message))
        assert self.session.answers.receive_frame(self.inbox, frame)

    def decide(self, *effects):
        """Let the core decide so at the next tick."""
        self.effects["Tick"] = effects
        self.session.tick()

    def begin(self):
        """Its client gets the first byte: the body is not kept any longer."""
        self.frame(Frame.HEAD, 1, exchange.Head(200, "text/plain", "eu", "eu-0"))
        self.session.started(self.record)


END = exchange.End(Outcome.ENGINE_LOST, "", 9, 4, 2, 0.1)
ENDS = {
    "refused": lambda one: one.frame(
        Frame.REFUSED, 1, exchange.Refused(Refusal.FULL, "eu", "eu-0", 1, 1)
    ),
    "ended": lambda one: one.frame(Frame.END, 1, END),
    "cancelled": lambda one: one.decide(fx.CancelAttempt(1, 1, EU, ReplicaId("eu-0"))),
    "another attempt": lambda one: one.decide(fx.Forward(1, 2, EU)),
    "its client left": lambda one: one.session.close(one.record),
    "released": lambda one: one.begin(),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_body_that_nobody_waits_for_any_more_ends(sent, end):
    asking, two = Asking(sent), sent.send("b", 8 * PART_BYTES)
    ENDS[end](asking)
    while sent.answer():
        pass
    assert len(sent.body(asking.inbox)) == PARTS_START * PART_BYTES
    assert sent.body("b") == two.body


async def test_while_its_attempt_is_under_way_a_body_is_sent_to_its_end(sent):
    asking = Asking(sent)
    while sent.answer():
        asking.session.tick()
    assert sent.body(asking.inbox) == asking.record.body


async def test_a_bus_that_takes_no_more_ends_the_body(sent):
    sent.send("a", 20 * PART_BYTES)
    sent.takes = False
    sent.answer()
    sent.takes = True
    assert not sent.answer()
    assert len(sent.body("a")) == PARTS_START * PART_BYTES, "its agent finds the hole"


async def test_where_no_router_answers_a_body_goes_at_a_fixed_pace(sent):
    record = sent.send("a", 10 * PART_BYTES)
    sent.bodies.unanswered(PING_PREFIX + "ap")
    sent.bodies.unanswered(PING_PREFIX + "eu")
    async with asyncio.timeout(PATIENCE_S):
        while len(sent.body("a")) < len(record.body):
            await asyncio.sleep(0.001)
    assert sent.body("a") == record.body


async def test_answers_that_are_no_ones_are_left_to_others(sent):
    assert not sent.bodies.passed(PING_PREFIX + "eu", b"12345678")
    sent.send("a", 8 * PART_BYTES)
    assert not sent.bodies.passed(PING_PREFIX + "eu", b"12345678")
    assert not sent.bodies.passed(PING_PREFIX + "ap", sent.pings[0][1])
    assert sent.bodies.passed(PING_PREFIX + "eu", sent.pings[0][1])
    assert not sent.bodies.passed(PING_PREFIX + "eu", sent.pings[0][1]), "once"


ANSWER_ENDS = {
    "cancelled": ENDS["cancelled"],
    "another attempt": ENDS["another attempt"],
    "its client left": ENDS["its client left"],
}


def credits_of(asking):
    """What is published from now on. Its answer is expected from eu."""
    sent, published = asking.sent, []
    sent.bodies._publish = lambda subject, *args, **more: not published.append(subject)
    sent.bodies.expect_answer(asking.record, EU, {})
    return published


@pytest.mark.parametrize("end", ANSWER_ENDS)
async def test_an_answer_that_nobody_waits_for_any_more_gets_no_credit(sent, end):
    asking = Asking(sent)
    answer, published = asking.record.answer, credits_of(asking)
    answer.region, answer.replica = EU, ReplicaId("eu-0")
    answer.taken_bytes = answer.credit_at_bytes
    ANSWER_ENDS[end](asking)
    sent.bodies._links.clear()  # no body before it
    answer.pace()
    assert published == []


async def test_after_the_close_no_credit_leaves(sent):
    asking = Asking(sent)
    answer, published = asking.record.answer, credits_of(asking)
    answer.region, answer.replica = EU, ReplicaId("eu-0")
    answer.taken_bytes = answer.credit_at_bytes
    sent.bodies.close()
    answer.pace()
    assert published == []


async def test_credits_for_a_region_that_the_peer_adopted_are_paced_on_the_link_to_it(sent):
    asking = Asking(sent)
    answer, published = asking.record.answer, credits_of(asking)
    answer.region, answer.replica = "ap", ReplicaId("ap-0")
    answer.taken_bytes = answer.credit_at_bytes
    answer.pace()
    assert published == [subjects.credit("ap", "ap-0"), subjects.ping("ap")]


@pytest.mark.parametrize("over_a_link", [False, True])
@pytest.mark.parametrize("kib", [600, 4096])
async def test_a_stream_that_goes_on_does_not_wait_for_ever_at_a_long_event(sent, over_a_link, kib):
    """It comes whole, or its attempt fails: its agent is never left without a credit."""
    asking = Asking(sent)
    answer, number = asking.record.answer, count(2)
    said = Said(b'{"messages": [{"role": "user", "content": "hello"}]}', is_chat=True)
    said.chunks.append(b'data: {"choices": [{"index": 0, "delta": {"content": "one"}}]}\n\n')
    said.read()
    answer.splice = Splice(said, "one", 1, is_closing=False, more=1)
    window = FlowWindow(FIRST_WINDOW_BYTES if over_a_link else exchange.WINDOW_BYTES)
    give = lambda credit: window.credit(credit.consumed_bytes)  # noqa: E731
    asking.send_credit = lambda region, replica, credit: give(credit)
    if over_a_link:
        answer.begin_small(FIRST_WINDOW_BYTES, lambda: give(answer.next_credit()))
    asking.frame(Frame.HEAD, 1, exchange.Head(200, "text/event-stream", "eu", "eu-0"))
    text = b"x" * (kib * 1024)
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "' + text + b'"}}]}\n\n'
    given, at = b"", 0
    while at < len(event) and asking.session.answers.streams:
        assert window.open, "the agent waits for a credit"
        chunk = event[at : at + 8192]
        window.send(len(chunk))
        chunk = chunk[: len(chunk) - window.take_back()]
        at += len(chunk)
        frame = pack_frame(Frame.DATA, next(number), chunk)
        asking.session.answers.receive_frame(asking.inbox, frame)
        given += answer.take()
    is_whole = text in given
    assert is_whole == (kib == 600) == bool(asking.session.answers.streams)
