"""Did a stream end as its API promises? In each API, cut at every border between two events."""

import json
import random

import pytest

from agents.core.answer_stream import TAIL_BYTES
from agents.core.stream_end import (
    MISSES_MAX,
    REPEATS,
    PromisedEnds,
    has_last_event,
    has_promised_end,
    is_cut_json,
)
from schemas.http import CHAT, COMPLETIONS, MESSAGES, RESPONSES

DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n'


def choice(index: int, text: str = "", finish_reason: str | None = None) -> bytes:
    fields = {"index": index, "delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [fields]}).encode() + b"\n\n"


def named(name: str, line_end: bytes = b"\n", **fields: object) -> bytes:
    data = json.dumps({**fields, "type": name}).encode()
    return b"event: %b%bdata: %b%b" % (name.encode(), line_end, data, line_end * 2)


def unnamed(name: str) -> bytes:
    return b"data: " + json.dumps({"type": name}).encode() + b"\n\n"


# What comes before the end, and the end; a text that a model wrote may hold what ends a stream.
QUOTING = (
    'event: message_stop\n\n"type": "response.completed", "finish_reason": "stop" data: [DONE]'
)
STREAMS = [
    (CHAT, [choice(0, "a"), choice(0, QUOTING)], choice(0, "", "stop")),
    (CHAT, [choice(0, "a"), choice(0, "b")], DONE),
    (CHAT, [choice(0, "a"), choice(1, "b"), choice(1, "", "stop")], choice(0, "", "length")),
    (COMPLETIONS, [choice(0, "a")], choice(0, "b", "stop")),
    (MESSAGES, [named("message_start"), named("x", text=QUOTING)], named("message_stop")),
    (MESSAGES, [named("message_start", b"\r\n")], named("message_stop", b"\r\n")),
    (MESSAGES, [unnamed("message_start")], unnamed("message_stop")),
    (RESPONSES, [named("response.created"), named("x", t=QUOTING)], named("response.completed")),
    (RESPONSES, [named("response.created")], named("response.incomplete")),
    (RESPONSES, [named("response.created")], named("response.failed")),
    (RESPONSES, [named("response.created")], unnamed("response.completed")),
]


@pytest.mark.parametrize(("path", "events", "end"), STREAMS)
def test_the_promised_end_is_in_the_last_event_alone(path, events, end) -> None:
    for after in (b"", DONE, *([USAGE] if b"finish_reason" in end else [])):
        whole = b"".join([*events, end, after])
        assert not PromisedEnds(known=True).is_cut(path, whole, 0.0, 1.0)
    for count in range(1, len(events) + 1):
        assert PromisedEnds(known=True).is_cut(path, b"".join(events[:count]), 0.0, 1.0), count


@pytest.mark.parametrize("seed", range(40))
def test_every_choice_has_to_finish(seed) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 5)
    events = [choice(rng.randrange(count), "word " * rng.randrange(20)) for _ in range(60)]
    events += [choice(index) for index in range(count)]  # in turns, so all are near the end
    ends = [choice(index, "", "stop") for index in range(count)]
    rng.shuffle(ends)
    missing = rng.randrange(count + 1)
    events += ends[missing:]
    end = b"".join(events)[-TAIL_BYTES:]
    assert has_promised_end(CHAT, end) is (missing == 0), seed


def test_other_events_in_the_last_bytes_decide_nothing() -> None:
    odd = b'data: {"choices": 1}\n\ndata: {"choices": [1, {}]}\n\ndata: {\n\n: x\n\ndata: "a"\n\n'
    assert not has_promised_end(CHAT, odd)
    assert not has_promised_end(CHAT, USAGE)
    assert not has_promised_end(CHAT, b"")
    assert has_promised_end("/v1/audio/transcriptions", odd), "it promises none"


def test_a_last_response_that_is_longer_than_what_is_kept_is_its_end() -> None:
    last = named("response.completed", text="x" * 2 * TAIL_BYTES)
    end = (named("response.created") + last)[-TAIL_BYTES:]
    assert has_promised_end(RESPONSES, end)


@pytest.mark.parametrize("torn_at", [30, 31, TAIL_BYTES, 40_000])
def test_an_event_without_its_own_end_is_not_the_last(torn_at) -> None:
    last = named("response.completed", text="x" * 40_000)
    before = named("response.created") * 200
    assert has_last_event(RESPONSES, (before + last)[-TAIL_BYTES:])
    assert not has_last_event(RESPONSES, (before + last[:torn_at])[-TAIL_BYTES:])


def test_after_the_last_event_nothing_matters() -> None:
    assert has_last_event(MESSAGES, named("message_stop"))
    assert has_last_event(RESPONSES, named("response.completed"))
    assert has_last_event(CHAT, DONE)
    assert not has_last_event(CHAT, choice(0, "", "stop")), "its usage may follow"
    assert not has_last_event("/v1/audio/transcriptions", unnamed("transcript.text.done"))


class Engine:
    """Streams one after the other, at one a second."""

    def __init__(self, *, known: bool) -> None:
        self.ends, self.now = PromisedEnds(known=known), 0.0

    def cut(self, end: bytes, path: str = CHAT) -> bool:
        self.now += 1.0
        return self.ends.is_cut(path, end, self.now - 0.9, self.now)


def test_an_engine_that_never_sends_one_is_not_required_to() -> None:
    engine = Engine(known=False)
    assert not any(engine.cut(choice(0, "a")) for _ in range(20))


def test_an_engine_that_sent_one_is_required_to_for_that_api() -> None:
    engine = Engine(known=False)
    assert not engine.cut(DONE)
    assert engine.cut(choice(0, "a"))
    assert not engine.cut(named("message_start"), MESSAGES)
    assert not engine.cut(named("message_stop"), MESSAGES)
    assert engine.cut(named("message_start"), MESSAGES)


def test_one_whose_kind_alone_promises_it_is_believed_at_last() -> None:
    engine = Engine(known=True)
    verdicts = [engine.cut(choice(0, "a")) for _ in range(MISSES_MAX + 3)]
    assert verdicts == [True] * MISSES_MAX + [False] * 3


@pytest.mark.parametrize("known", [False, True])
def test_one_that_has_sent_it_is_required_to_until_another_may_be_there(known) -> None:
    engine = Engine(known=known)
    engine.cut(DONE)
    assert all(engine.cut(choice(0, "a")) for _ in range(50))
    engine.ends.restarted()
    assert not engine.cut(choice(0, "a")) or known
    assert not engine.cut(DONE)
    assert engine.cut(choice(0, "a")), "and again"


def test_streams_that_are_cut_together_count_once() -> None:
    engine = Engine(known=True)
    for _ in range(MISSES_MAX):
        began_at = engine.now = engine.now + 1.0
        for _ in range(50):
            engine.now += 0.01
            assert engine.ends.is_cut(CHAT, choice(0, "a"), began_at, engine.now)
        engine.now += 1.0
        assert not engine.cut(choice(0, "a", "stop"))


@pytest.mark.parametrize("seed", range(20))
def test_json_that_is_cut_anywhere_is_not_whole(seed) -> None:
    rng = random.Random(seed)
    texts = ["}", "]", "{}", '"', "a" * 50]
    body = {"choices": [{"text": rng.choice(texts)} for _ in range(rng.randrange(1, 9))]}
    whole = json.dumps(body).encode()
    assert not is_cut_json(whole + b"\n", len(whole) + 1, parses=True)
    for size in range(len(whole)):
        assert is_cut_json(whole[:size], size, parses=True), (seed, size)
    assert not is_cut_json(whole, len(whole), parses=False)
    assert is_cut_json(whole[:-1], len(whole), parses=False) is (whole[-2:-1] not in b"]}")
    assert not is_cut_json(whole[-5:], len(whole), parses=True), "not all of it is here"


def delta(text: str) -> bytes:
    return named("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def thought(text: str) -> bytes:
    fields = {"index": 0, "delta": {"content": "", "reasoning": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [fields]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("path", "said"), [(CHAT, lambda text: choice(0, text)), (CHAT, thought), (MESSAGES, delta)]
)
def test_a_model_that_goes_round_has_said_all(path, said) -> None:
    """Ollama ends its stream there, without an end."""
    before, same = said("a 'quoted' \"text\"\n"), [said(" round"), *[said("round")] * (REPEATS - 1)]
    for known in (True, False):
        ends = PromisedEnds(known=known)
        assert not ends.is_cut(path, before + DONE, 0.0, 1.0), "it sends ends"
        assert ends.is_cut(path, before + b"".join(same), 0.0, 1.0) is known
    different = [said(str(number)) for number in range(REPEATS)]
    for cut in ([*same[1:], before], same[1:], different, [said("")] * REPEATS):
        assert ends.is_cut(path, before + b"".join(cut), 0.0, 1.0)
