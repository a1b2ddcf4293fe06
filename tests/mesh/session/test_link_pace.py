"""How many bytes of bodies are on their way to a region, on simulated links."""

import random
from collections import deque

import pytest

from mesh.session.link_pace import (
    BLIND_S,
    LOST_S,
    PART_BYTES,
    QUEUE_S,
    SHORTEST_S,
    WINDOW_BYTES_MAX,
    WINDOW_BYTES_MIN,
    WINDOW_BYTES_START,
    LinkPace,
)

MBIT = 1e6 / 8


class Link:
    """Carries parts in order at a rate; answers come a round trip after a part has left it."""

    def __init__(self, mbits, rtt_s, routers=1, late_s=0.0):
        self.bytes_per_s, self.rtt_s = mbits * MBIT, rtt_s
        self.paces = [LinkPace() for _ in range(routers)]
        self.free_at = 0.0  # when all that was sent has left
        self.carried = 0
        self.queues_s = []  # what a message would have waited, at each step
        self._dice, self._late_s = random.Random(7), late_s
        self._answers = [deque() for _ in range(routers)]

    def run(self, begin_s, end_s, step_s=0.001):
        """Every router always has more to send."""
        for step in range(int(begin_s / step_s), int(end_s / step_s)):
            now = step * step_s
            for pace, answers in zip(self.paces, self._answers, strict=True):
                while answers and answers[0][0] <= now:
                    pace.passed(answers.popleft()[1], now)
                pace.expire(now)
                while pace.may_send(now):
                    self._send(pace, answers, now)
            self.queues_s.append(max(0.0, self.free_at - now))

    def _send(self, pace, answers, now):
        number = pace.sent(PART_BYTES, now)
        self.free_at = max(now, self.free_at) + PART_BYTES / self.bytes_per_s
        self.carried += PART_BYTES
        late_s = self._dice.random() * self._late_s
        at = max(self.free_at + self.rtt_s + late_s, answers[-1][0] if answers else 0.0)
        answers.append((at, number))


LINKS = [(mbits, rtt_s) for mbits in (10, 20, 50, 200) for rtt_s in (0.002, 0.08, 0.3)]


@pytest.mark.parametrize(("mbits", "rtt_s"), LINKS)
def test_a_link_is_filled_and_its_queue_stays_short(mbits, rtt_s):
    link = Link(mbits, rtt_s)
    link.run(0.0, 12.0)
    part_s = PART_BYTES / link.bytes_per_s
    steady = sorted(link.queues_s[4000:])
    assert link.carried > 0.7 * 12.0 * min(link.bytes_per_s, WINDOW_BYTES_MAX / rtt_s)
    assert steady[int(0.99 * len(steady))] <= QUEUE_S + 5 * part_s
    assert max(link.queues_s) <= 0.25, "also while it is being found out"
    assert link.paces[0].window_bytes <= (rtt_s + QUEUE_S) * link.bytes_per_s + 2 * PART_BYTES


@pytest.mark.parametrize("routers", [2, 4])
def test_the_routers_of_a_region_share_one_queue(routers):
    link = Link(50, 0.08, routers)
    link.run(0.0, 12.0)
    steady = sorted(link.queues_s[4000:])
    assert steady[int(0.9 * len(steady))] <= 2 * QUEUE_S + routers * PART_BYTES / link.bytes_per_s


def test_answers_that_come_late_now_and_then_do_not_stop_it():
    link = Link(50, 0.08, late_s=0.06)
    link.run(0.0, 10.0)
    assert link.carried > 0.25 * 10.0 * 50 * MBIT


def test_a_link_that_becomes_longer_is_measured_again():
    link = Link(50, 0.01)
    link.run(0.0, 5.0)
    link.rtt_s = 0.2
    link.run(5.0, SHORTEST_S + 2.0)
    carried = link.carried
    link.run(SHORTEST_S + 2.0, SHORTEST_S + 7.0)
    assert link.carried - carried > 0.5 * 5.0 * 50 * MBIT


def test_a_link_that_becomes_slower_is_followed():
    link = Link(200, 0.08)
    link.run(0.0, 5.0)
    link.bytes_per_s = 10 * MBIT
    link.run(5.0, 12.0)
    assert max(link.queues_s[10_000:]) <= QUEUE_S + 2 * PART_BYTES / link.bytes_per_s


def test_where_nobody_answers_parts_go_at_a_fixed_pace():
    pace, at = LinkPace(), []
    for step in range(int((LOST_S + 2.0) * 1000)):
        now = step / 1000
        pace.expire(now)
        while pace.may_send(now):
            pace.sent(PART_BYTES, now)
            at.append(now)
    begun = [one for one in at if one < LOST_S]
    assert len(begun) == WINDOW_BYTES_START // PART_BYTES
    assert len(at) - len(begun) == pytest.approx(2.0 / BLIND_S, rel=0.1)
    assert pace.window_bytes == WINDOW_BYTES_MIN
    pace.passed(1, LOST_S + 2.0)
    assert not pace.is_blind, "whoever answers late was there"
    pace.unanswered()
    assert pace.due_at <= LOST_S + 2.0 + BLIND_S, "who is known not to answer is not waited for"


@pytest.mark.parametrize("mbits", [2, 10])
def test_a_link_that_is_full_for_long_is_sent_no_more_than_it_carried(mbits):
    link = Link(mbits, 0.08)
    link.run(0.0, 5.0)
    [pace] = link.paces
    before, window_bytes = link.carried, pace.window_bytes
    link.free_at += 20.0  # something else fills it
    link.run(5.0, 20.0)
    assert pace.is_blind
    blind_s = 15.0 - LOST_S
    assert link.carried - before <= window_bytes + 1.1 * blind_s * link.bytes_per_s
    assert link.carried - before >= 0.3 * blind_s * link.bytes_per_s, "its region may be adopted"


def test_an_answer_counts_for_all_parts_before_it():
    pace = LinkPace()
    for _ in range(2):
        pace.sent(PART_BYTES, 0.0)
    assert not pace.may_send(0.0)
    pace.passed(2, 0.08)
    assert pace.unpassed_bytes == 0 and pace.due_at is None
    pace.passed(1, 0.09)
    assert pace.may_send(0.09)


def test_a_window_found_long_ago_counts_no_more():
    link = Link(200, 0.02)
    link.run(0.0, 3.0)
    [pace] = link.paces
    assert pace.window_bytes > WINDOW_BYTES_START
    pace.passed(1 << 40, 3.0)
    pace.sent(PART_BYTES, 60.0)
    assert pace.window_bytes == WINDOW_BYTES_START
