"""Many large answers over one link, in virtual time: real pace, credits and windows, and a link
that carries bytes in order at a rate."""

import asyncio
import selectors
from types import SimpleNamespace

import pytest

from agents.core.answer_stream import FlowWindow
from mesh.adapters.paced_links import PacedLinks
from mesh.session.answer import AnswerReceiver
from mesh.session.link_pace import FIRST_WINDOW_BYTES, FIRST_WINDOW_BYTES_MIN, FirstWindows
from schemas import exchange, subjects, wire
from schemas.exchange import H_WINDOW, Frame, FrameView, Head, Outcome
from schemas.ids import RegionId, ReplicaId

MBIT = 1e6 / 8
EVENT = b"data: " + b"x" * 4000 + b"\n\n"


class VirtualTime(selectors.SelectSelector):
    """What would be waited for passes at once."""

    now = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "everything waits for ever"
        self.now += timeout
        return []


class Link:
    """Between us, whose router asks, and eu, whose agents answer."""

    def __init__(self, mbits, rtt_s):
        self.loop = asyncio.get_running_loop()
        self.bytes_per_s, self.one_way_s = mbits * MBIT, rtt_s / 2
        self.free_at = 0.0
        self.queues = []  # when something was put on the link, and what waited before it
        self.links = PacedLinks(RegionId("us"), "r1", (RegionId("eu"),), self.publish)
        self.agents, self.routers = True, True  # whether agents know small windows; pings' answers
        self.sending = {}

    def publish(self, subject, payload=b"", *, reply="", headers=None):
        if subject == subjects.ping("eu"):
            if self.routers:
                token = reply.rpartition(".")[2]
                self.loop.call_later(
                    self.one_way_s, self.carry, 64, self.links.passed, token, payload
                )
        else:
            credit = wire.decode_as(exchange.Credit, payload)
            self.loop.call_later(self.one_way_s, self.sending[credit.inbox].credit, credit)
        return True

    def carry(self, size, arrive, *args):
        now = self.loop.time()
        self.queues.append((now, max(0.0, self.free_at - now)))
        self.free_at = max(now, self.free_at) + size / self.bytes_per_s
        self.loop.call_at(self.free_at + self.one_way_s, arrive, *args)

    async def send(self, answers, events):
        """So many answers of that many events each begin at once; returns when all are over."""
        names = [f"_INBOX.us.r1.{number}" for number in range(answers)]
        sent = [Sending(self, name, events) for name in names]
        await asyncio.gather(*(answer.over for answer in sent))
        return sent


class Sending:
    """One answer: what its agent has left, and its receiver."""

    def __init__(self, link, inbox, events):
        self.link, self.left, self.over = link, EVENT * events, link.loop.create_future()
        self.answer = AnswerReceiver(1, 1, inbox)
        self.answer.region, self.answer.replica = RegionId("eu"), ReplicaId("eu-0")
        self.ends, self.number, headers = events, 0, {}
        record = SimpleNamespace(answer=self.answer)
        link.links.expect_answer(record, RegionId("eu"), headers)
        first = int(headers[H_WINDOW]) if link.agents else exchange.WINDOW_BYTES
        self.window = FlowWindow(first)
        link.sending[inbox] = self
        link.loop.call_later(link.one_way_s, self.begin)

    def begin(self):
        self.frame(Frame.HEAD, wire.encode(Head(200, "text/event-stream", "eu", "eu-0")))
        self.go_on()

    def frame(self, kind, payload):
        self.link.carry(len(payload), self.arrived, FrameView(kind, self.number, payload))
        self.number += 1

    def credit(self, credit):
        self.window.credit(credit.consumed_bytes)
        self.go_on()

    def go_on(self):
        while self.left and self.window.open:
            chunk = self.left[: len(EVENT)]
            self.window.send(len(chunk))
            chunk = chunk[: len(chunk) - self.window.take_back()]
            self.left = self.left[len(chunk) :]
            self.frame(Frame.DATA, chunk)

    def arrived(self, frame):
        self.answer.feed(frame, self.link.loop.time())
        self.answer.take()
        if self.answer.is_credit_due:
            self.answer.pace()
        if self.answer.taken_bytes == self.ends * len(EVENT):
            self.answer.receive(exchange.End(Outcome.DONE, "", 1, 0, 1, 0.1), 0.0)
            self.over.set_result(self.link.loop.time())


def played(test):
    selector = VirtualTime()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    try:
        loop.run_until_complete(test())
    finally:
        loop.close()


LINKS = [(mbits, rtt_s) for mbits in (10, 20, 50, 200) for rtt_s in (0.08, 0.3)]


@pytest.mark.parametrize(("mbits", "rtt_s"), LINKS)
def test_sixty_large_answers_fill_a_link_and_nothing_waits_long_behind_them(mbits, rtt_s):
    async def test():
        link = Link(mbits, rtt_s)
        sent = await link.send(60, 64)
        took_s = max(answer.over.result() for answer in sent)
        needed_s = 60 * 64 * len(EVENT) / link.bytes_per_s
        assert max(wait for _, wait in link.queues) < 0.3, "as they all begin at once"
        assert max(wait for at, wait in link.queues if at > min(3.0, took_s / 2)) < 0.26
        assert took_s < 1.5 * needed_s + 12 * rtt_s
        link.links.close()

    played(test)


def test_answers_take_turns():
    async def test():
        link = Link(10, 0.08)
        over = [answer.over.result() for answer in await link.send(8, 64)]
        assert max(over) < 1.5 * min(over)
        link.links.close()

    played(test)


def test_agents_that_know_no_small_windows_are_never_kept_waiting_for_a_credit():
    async def test():
        link = Link(200, 0.08)
        link.agents = False
        [answer] = await link.send(1, 512)
        took_s = answer.over.result()
        assert took_s < 2.0 * 512 * len(EVENT) / (exchange.WINDOW_BYTES / 0.08)
        link.links.close()

    played(test)


def test_answers_go_on_where_no_router_answers_pings():
    async def test():
        link = Link(200, 0.08)
        link.routers = False
        sent = await link.send(4, 64)
        assert max(answer.over.result() for answer in sent) < 30.0
        link.links.close()

    played(test)


def test_first_windows_are_small_while_many_answers_begin():
    windows = FirstWindows()
    first = [windows.next(0.0) for _ in range(60)]
    assert first[0] == FIRST_WINDOW_BYTES and first[-1] == FIRST_WINDOW_BYTES_MIN
    assert sum(first) <= 128 * 1024 + 60 * FIRST_WINDOW_BYTES_MIN
    assert windows.next(1.0) == FIRST_WINDOW_BYTES
