"""Scrapes that nothing new can show are made when somebody is about to read them."""

import pytest

from agents.sim.events import SimRequest
from mesh.sim.engine import SCRAPE_EVERY_S, SCRAPE_S, MetricScrapes, ReplicaEngine
from mesh.sim.event_queue import EventQueue
from tests.mesh.sim.build import PLAIN

BUSY = SCRAPE_EVERY_S


class Scraped:
    """An engine, and what its scrapes found: when, and how many requests ran and waited."""

    def __init__(self, *, each=False):
        self.queue = EventQueue()
        self.engine = ReplicaEngine(PLAIN, lambda: self.queue.now)
        self.seen, self.made_at = [], []
        self.scrapes = MetricScrapes(self.engine, self.queue, self._take, lambda: True)
        self.scrapes.begin(each=each)
        self.seen.clear()

    def _take(self, result, at):
        assert result.began_at == pytest.approx(at - SCRAPE_S)
        self.made_at.append(self.queue.now)
        self.seen.append((round(at, 6), result.reading.running, result.reading.waiting))

    def submit(self, *numbers, output_tokens=10_000):
        """Requests for the engine, as an agent sends them."""
        self.scrapes.catch_up()
        for number in numbers:
            self.engine.submit(SimRequest(number, 16, output_tokens))
        self.scrapes.follow()

    def abort(self, number):
        self.scrapes.catch_up()
        self.engine.step()
        self.engine.abort(number)
        self.scrapes.follow()

    def until(self, at):
        """What scrapes have found by then. Call it once."""
        self.queue.at(at, self.queue.stop)
        self.queue.run()
        return self.seen


def times(since, until):
    """Those of the live cadence."""
    count = round((until - since) / BUSY)
    return [round(since + BUSY * number, 6) for number in range(1, count + 1)]


def test_while_nobody_waits_no_scrape_is_an_event():
    world = Scraped()
    world.queue.at(0.01, world.submit, 1)
    assert world.until(0.99) == []


def test_before_the_agent_or_its_engine_changes_the_last_one_is_made_as_of_its_time():
    world = Scraped()
    world.queue.at(0.01, world.submit, 1)
    world.queue.at(0.94, world.abort, 1)
    world.until(0.97)
    assert world.seen == [(0.9, 1, 0)]
    assert world.made_at[-1] == 0.94
    world.scrapes.catch_up()
    assert world.seen[-1] == (0.95, 0, 0)


def test_one_that_is_due_in_this_moment_comes_after_what_happens_in_it():
    world = Scraped()
    world.queue.at(BUSY, world.scrapes.catch_up)
    assert world.until(BUSY) == []


def test_while_a_request_waits_each_scrape_is_an_event():
    world = Scraped()
    most = PLAIN.max_seqs
    world.queue.at(0.51, world.submit, *range(most + 2))
    found = world.until(1.01)
    assert [at for at, _, _ in found] == [0.5, *times(0.5, 1.0)]  # the first: before they came
    assert [waiting for _, _, waiting in found[-3:]] == [2, 2, 2]


def test_an_agent_that_decides_by_every_scrape_gets_each():
    assert [at for at, _, _ in Scraped(each=True).until(0.51)] == times(0.0, 0.5)


def test_an_engine_that_is_down_or_stands_still_is_scraped_at_every_turn():
    world = Scraped()
    world.engine.set_rate(0.0)
    world.scrapes.follow()
    assert [at for at, _, _ in world.until(0.51)] == times(0.0, 0.5)


def test_none_is_made_of_an_agent_that_ended():
    world = Scraped()
    world.scrapes.end()
    world.queue.at(0.4, world.scrapes.catch_up)
    assert world.until(0.5) == []
