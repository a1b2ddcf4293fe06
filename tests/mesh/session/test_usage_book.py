"""Accounts of tokens: whatever is written, lost, written twice or anew, sums are what was added."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.usage import summed
from mesh.session import usage_book
from mesh.session.cost import Cost
from mesh.session.usage_book import OTHER, Series, UsageBook
from schemas.numbers import WHOLE_MAX
from schemas.usage import PAGE_BYTES_MAX, UsageKind, decode_page, encode_page

DAYS = [f"2026-11-{number:02}" for number in range(1, 9)]
SERIES = st.builds(
    Series,
    st.sampled_from(["", "k1", "k2"]),
    st.sampled_from(["", "acme"]),
    st.sampled_from(["m", "n"]),
    st.sampled_from(["us", "eu", "elsewhere"]),
    st.sampled_from(UsageKind),
)
COSTS = st.builds(
    Cost, *[st.integers(0, 10**6)] * 3, is_prompt_estimated=st.booleans(),
    is_output_estimated=st.booleans(),
)  # fmt: skip
STEPS = st.one_of(
    st.tuples(st.just("add"), SERIES, COSTS),
    st.tuples(st.just("write"), st.integers(1, 4), st.sampled_from(["taken", "lost", "unheard"])),
    st.tuples(st.sampled_from(["midnight", "emptied"])),
)


class Store:
    """A stream that keeps the last writing of each subject."""

    def __init__(self) -> None:
        self.pages = {}

    def write(self, book: UsageBook, most: int, how: str = "taken") -> None:
        for page in tuple(book.due(most)):
            assert len(encode_page(page)) <= PAGE_BYTES_MAX
            if how != "lost":
                self.pages[page.epoch, page.day, page.number] = decode_page(encode_page(page))
            if how != "taken":
                book.to_write(page.day, page.number)

    def rows(self, daily=True):
        return summed(self.pages.values(), lambda row: True, daily=daily)


class Processes:
    """Two that write into one stream, and what their accounts are to be."""

    def __init__(self) -> None:
        self.store, self.wanted, self.day = Store(), Counter(), 0
        self.books = [UsageBook("us", "r1", epoch, ("us", "eu")) for epoch in (1, 2)]
        for book in self.books:
            book.turn(DAYS[0])

    def add(self, which, series, cost):
        self.books[which].add(series, cost)
        region = OTHER if series.served_region == "elsewhere" else series.served_region
        place = DAYS[self.day], *series._replace(served_region=region)
        is_estimated = cost.is_prompt_estimated or cost.is_output_estimated
        self.wanted.update({(place, "requests"): 1, (place, "estimated"): is_estimated})
        self.wanted.update({(place, "prompt"): cost.prompt, (place, "output"): cost.output})

    def write(self, which, most, how):
        self.store.write(self.books[which], most, how)

    def write_all(self):
        for book in self.books:
            self.store.write(book, 1000)
            assert not book.is_due

    def emptied(self, which):
        """Each process writes what it still has: today's, and of the day before."""
        self.store.pages.clear()
        for book in self.books:
            book.to_write_all()
        gone = DAYS[: max(0, self.day - 1)]
        self.wanted = Counter({key: n for key, n in self.wanted.items() if key[0][0] not in gone})

    def midnight(self, which):
        self.write_all()
        self.day = min(self.day + 1, len(DAYS) - 1)
        for book in self.books:
            book.turn(DAYS[self.day])


@given(st.lists(st.tuples(st.integers(0, 1), STEPS), max_size=60))
def test_sums_are_what_was_added(steps):
    """Writings are lost, or repeated as their answer was; days end; the stream is emptied."""
    processes, found = Processes(), Counter()
    for which, (what, *rest) in steps:
        getattr(processes, what)(which, *rest)
    processes.write_all()
    for day, row in processes.store.rows():
        place = day, row.key, row.tenant, row.model, row.served_region, row.kind
        found[place, "requests"] += row.requests
        found[place, "prompt"] += row.uncached + row.cached
        found[place, "output"] += row.output
        found[place, "estimated"] += row.estimated_requests
    assert +found == +processes.wanted


def test_accounts_are_bounded_and_sums_stay_whole(monkeypatch):
    monkeypatch.setattr(usage_book, "SERIES_MAX", 100)
    book, store = UsageBook("us", "r1", 1, ("us",)), Store()
    book.turn(DAYS[0])
    for number in range(1000):
        book.add(Series(f"k{number}", "t", "m", "us", UsageKind.ONLINE), Cost(1, 2, 3))
    store.write(book, 1000)
    rows = [row for _, row in store.rows()]
    assert len(rows) == 101
    assert sum(row.requests for row in rows) == 1000
    [rest] = [row for row in rows if row.key == OTHER]
    assert (rest.requests, rest.uncached, rest.cached, rest.output) == (900, 900, 1800, 2700)


def test_what_was_not_written_is_kept_for_some_days_alone():
    book = UsageBook("us", "r1", 1, ("us",))
    for day in DAYS:
        book.turn(day)
        book.add(Series("k", "t", "m", "us", UsageKind.ONLINE), Cost(1))
    assert [page.day for page in book.due(100)] == DAYS[-usage_book.DAYS_MAX :]


def test_regions_that_answers_invent_take_no_account_of_others(monkeypatch):
    monkeypatch.setattr(usage_book, "SERIES_MAX", 100)
    book = UsageBook("us", "r1", 1, ("us",))
    book.turn(DAYS[0])
    for number in range(1000):
        book.add(Series("k", "t", "m", f"eu-{number}", UsageKind.ONLINE), Cost(1))
    book.add(Series("late", "t", "m", "us", UsageKind.ONLINE), Cost(1))
    [page] = book.due(10)
    assert [(row.key, row.served_region, row.requests) for row in page.rows] == [
        ("k", OTHER, 1000), ("late", "us", 1),
    ]  # fmt: skip


def test_a_sum_beyond_what_pages_tell_leaves_the_page_readable():
    book = UsageBook("us", "r1", 1, ("us",))
    book.turn(DAYS[0])
    for _ in range(3):
        book.add(Series("k", "t", "m", "us", UsageKind.ONLINE), Cost(2**62, 2**53, 1))
    [page] = book.due(10)
    [row] = decode_page(encode_page(page)).rows
    assert (row.uncached, row.cached, row.output) == (WHOLE_MAX, WHOLE_MAX, 3)
