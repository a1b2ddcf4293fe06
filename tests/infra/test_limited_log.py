"""One line of each kind in a while, however many messages there are."""

import logging

from infra.process import KINDS_MAX, LOG_S, LimitedLog


def limited():
    now = [100.0]
    return LimitedLog(logging.getLogger("limited"), lambda: now[0]), now


def test_of_each_kind_one_line_is_logged_and_the_others_are_counted(caplog):
    lines, now = limited()
    for number in range(5):
        lines.warning("digest", "unreadable", "dropped %d", number)
        lines.warning("digest", "headers", "dropped %d", number)
    now[0] += LOG_S
    lines.warning("digest", "unreadable", "dropped %d", 9)
    more = "dropped 9 (and 4 more such messages before)"
    assert caplog.messages == ["dropped 0", "dropped 0", more]
    now[0] += LOG_S
    lines.warning("digest", "unreadable", "dropped %d", 10)
    assert caplog.messages[3:] == ["dropped 10"]


def test_kinds_without_end_take_neither_memory_nor_lines(caplog):
    lines, now = limited()
    for number in range(1000):
        lines.warning("digest", str(number), "dropped")
    assert len(caplog.messages) == KINDS_MAX + 1
    assert len(lines._due_at) == KINDS_MAX + 1
    now[0] += LOG_S
    lines.warning("digest", "later", "dropped")
    assert len(lines._due_at) == 1
