"""The counts that are kept are those that counting anew would find."""

from hypothesis import given
from hypothesis import strategies as st

from agents.core.requests import SETTLED_MAX, ScrapeCounters


def test_requests_settled_between_two_scrapes() -> None:
    seen = ScrapeCounters()
    seen.sent(1.0)
    seen.sent(1.5)
    seen.scraped(2.0, 3.0, [1.0, 1.5])
    seen.sent(3.5)
    assert (seen.waiting, seen.sent_before, seen.sent_since, seen.settled) == (3, 2, 1, 0)
    seen.settle(1.0, 4.0)
    seen.settle(3.5, 5.0)  # handed over after the look
    assert (seen.waiting, seen.sent_before, seen.sent_since, seen.settled) == (1, 1, 0, 1)
    seen.scraped(4.0, 6.0, [1.5])  # the first was settled before this one began
    assert (seen.waiting, seen.sent_before, seen.sent_since, seen.settled) == (1, 1, 0, 1)


ACTS = st.lists(st.tuples(st.sampled_from("hhsl"), st.integers(0, 2)), max_size=60)


@given(ACTS)
def test_counting_as_they_change_is_counting_anew(acts) -> None:
    seen, now, began_at, seen_at = ScrapeCounters(), 0.0, float("-inf"), float("-inf")
    waiting: list[float] = []
    settled: list[tuple[float, float]] = []
    for act, step in acts:
        now += step
        if act == "h":
            waiting.append(now)
            seen.sent(now)
        elif act == "l":
            began_at, seen_at = now, now + step
            now += step
            seen.scraped(began_at, seen_at, waiting)
        elif waiting:
            handed_at = waiting.pop(step % len(waiting))
            settled.append((handed_at, now))
            seen.settle(handed_at, now)
        assert seen.waiting == len(waiting)
        assert seen.sent_before == sum(at <= seen_at for at in waiting)
        assert seen.sent_since == sum(at > began_at for at in waiting)
        assert seen.settled == sum(at <= seen_at and end > began_at for at, end in settled)


def test_memory_is_bounded_without_a_scrape() -> None:
    seen = ScrapeCounters()
    for number in range(SETTLED_MAX + 100):
        seen.sent(float(number))
        seen.settle(float(number), float(number))
    seen.scraped(-1.0, float(2 * SETTLED_MAX), [])
    assert seen.settled == SETTLED_MAX
