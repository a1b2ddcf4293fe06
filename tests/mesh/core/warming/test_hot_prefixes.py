"""What is shared is kept, what is not isn't, and never more of it than may be."""

from itertools import count
from random import Random

import pytest

from mesh.core.warming import hot_prefixes as module
from mesh.core.warming.hot_prefixes import HotPrefixes
from schemas.residency import Label
from tests.mesh.core.build import request

SYSTEM = "S" * 10  # 640 tokens
EU, CH = Label("eu"), Label("ch")


def unlike(number):
    """Three blocks that no other prompt has there."""
    return "".join(chr(0x41 + number // 26**place % 26) for place in range(3))


def saw(known, text, now=0.0, numbers=count(1), **fields):  # noqa: B008 - one counter for all
    return known.saw(request(next(numbers), text, now, **fields), now)


def ask(known, prefix, times, now=0.0, numbers=count(1), **fields):  # noqa: B008
    return [
        kept
        for _ in range(times)
        if (kept := saw(known, prefix + unlike(next(numbers)), now, **fields))
    ]


def test_the_third_prompt_that_parts_from_others_at_one_place_shows_what_they_share():
    known = HotPrefixes(10**6, 900.0)
    assert ask(known, SYSTEM, 2) == []
    [kept] = ask(known, SYSTEM, 1)
    assert len(kept.prompt.hashes) == 10 and kept.prompt.tokens == 640
    assert ask(known, SYSTEM, 5) == [], "once is enough"
    assert known.keep(kept.name, 1000) and len(known) == 1 and known.kept_bytes == 1000


def test_short_beginnings_and_long_talks_are_not_shared_text():
    known = HotPrefixes(10**6, 900.0)
    assert ask(known, "S" * 7, 50) == []
    talk = SYSTEM
    for turn in range(30):
        talk += unlike(turn + 1000)
        assert saw(known, talk) is None


def test_what_is_kept_has_a_limit_and_the_longest_unused_makes_room():
    known = HotPrefixes(2500, 900.0)
    names = []
    for now, letter in enumerate("PQRST"):
        [kept] = ask(known, letter * 10, 3, float(now))
        known.keep(kept.name, 1000)
        names.append(kept.name)
        assert known.kept_bytes <= 2500
    assert len(known) == 2
    assert known.dropped == names[:3]


def test_what_the_edge_cannot_keep_or_was_not_asked_for_is_not_kept():
    known = HotPrefixes(10**6, 900.0)
    [kept] = ask(known, SYSTEM, 3)
    assert not known.keep(kept.name, None) and len(known) == 0
    assert not known.keep(4711, 10) and known.dropped == [4711]
    assert ask(known, SYSTEM, 9) == [], "nor is it asked for again"


def test_a_request_is_read_for_one_place_at_most_and_the_next_for_the_next():
    known, texts = HotPrefixes(10**6, 100.0), (SYSTEM, SYSTEM + "T", SYSTEM + "TU")
    ask(known, texts[-1], 1)
    for now in range(6):  # long apart: two part at each place, and none of them gets hot
        assert ask(known, texts[now % 3], 1, 1000.0 * now) == []
    kept = ask(known, texts[-1], 5, 9000.0)
    assert [len(one.prompt.hashes) for one in kept] == [10, 11, 12]


def test_uses_fade_and_order():
    known = HotPrefixes(10**6, 100.0)
    for letter, times in (("P", 4), ("Q", 8)):
        [kept] = ask(known, letter * 10, times)
        known.keep(kept.name, 10)
    first, second = known.hottest(9, 0.0)
    assert known.share(first, 0.0) > known.share(second, 0.0)
    assert known.hottest(1, 0.0) == [first]
    assert known.hottest(9, 1000.0) == []


def test_labels_of_all_requests_with_a_text_restrict_it():
    known = HotPrefixes(10**6, 900.0)
    [kept] = ask(known, SYSTEM, 3)
    known.keep(kept.name, 10)
    assert kept.residency == ()
    ask(known, SYSTEM, 1, residency=(CH, EU))
    assert kept.residency == (CH, EU)
    ask(known, SYSTEM, 1)
    ask(known, SYSTEM, 1, residency=(EU,))
    assert kept.residency == (EU,)
    ask(known, SYSTEM, 1, residency=(CH,))
    assert len(known) == 0 and known.dropped == [kept.name]
    assert ask(known, SYSTEM, 9) == [], "nor is it kept again"


@pytest.mark.parametrize("seed", range(3))
def test_every_table_has_its_limit(monkeypatch, seed):
    for name, most in (("SEEN_MAX", 200), ("FORKS_MAX", 5), ("WANTED_MAX", 2)):
        monkeypatch.setattr(module, name, most)
    dice, known = Random(seed), HotPrefixes(3000, 900.0)
    for number in range(600):
        prefix = dice.choice("PQRSTUVW") * dice.randint(8, 12)
        kept = saw(known, prefix + unlike(number), float(number))
        if kept is not None and dice.random() < 0.5:
            known.keep(kept.name, dice.randint(1, 2000))
        assert len(known._seen) <= 200 and len(known._forks) <= 5 and len(known._wanted) <= 2
        assert known.kept_bytes <= 3000
        assert known.kept_bytes == sum(kept.body_bytes for kept in known.hottest(99, 0.0))
