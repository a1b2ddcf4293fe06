"""Which clients are told that their answer is still coming, and when."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.session.answer import AnswerReceiver
from mesh.session.record import OpenRequest
from mesh.session.silent_streams import SilentStreams
from schemas.engine_routes import TRANSCRIPTIONS
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from tests.mesh.core.build import request

EVERY_S = 10.0


def opened(key: int = 1, path: str = CHAT, *, streams: bool = True) -> OpenRequest:
    return OpenRequest(request=replace(request(key), streams=streams), path=path)


def told(
    silent: SilentStreams, record: OpenRequest, until_s: float, writes: set[int] = frozenset()
) -> list[int]:
    """At which seconds, of ticks once in one; at those of `writes`, just before, bytes go out."""
    silent.opened(record, 0.0)
    found = []
    for now in range(int(until_s) + 1):
        if now in writes and record.answer is not None:
            record.answer.taken_bytes += 1
        if silent.due({record.request.key: record}, float(now)):
            found.append(now)
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_who_waits_is_told_every_ten_seconds(path):
    assert told(SilentStreams(EVERY_S), opened(path=path), 45.0) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("every_s", "record"),
    [
        (0.0, opened()),
        (EVERY_S, opened(streams=False)),
        (EVERY_S, opened(path=EMBEDDINGS)),
        (EVERY_S, opened(path=TRANSCRIPTIONS)),
    ],
    ids=["off", "no stream", "embeddings", "another kind of stream"],
)
def test_others_are_told_nothing(every_s, record):
    assert told(SilentStreams(every_s), record, 100.0) == []


def test_nor_is_who_has_been_answered():
    silent = SilentStreams(EVERY_S)
    silent.opened(opened(), 0.0)
    assert silent.due({}, 10.0) == []
    assert not silent._looks


@given(st.sets(st.integers(0, 200)))
def test_no_stream_is_silent_for_longer_than_half_as_much_again(writes):
    record = opened()
    record.answer = AnswerReceiver(1, 1, "inbox")
    found = told(SilentStreams(EVERY_S), record, 200, writes)
    heard = sorted({0, *writes, *found})
    assert all(late - early <= 1.5 * EVERY_S for early, late in pairwise(heard))
    for at in found:  # and none is told that was written to just now
        assert not any(at - EVERY_S / 2 <= one <= at for one in writes)


def test_a_clock_that_stood_still_is_made_up_for_once():
    silent, record = SilentStreams(EVERY_S), opened()
    silent.opened(record, 0.0)
    records = {1: record}
    assert [silent.due(records, now) for now in (100.0, 104.0, 105.0)] == [[], [], [record]]
