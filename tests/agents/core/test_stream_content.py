"""What of a stream is content, in each API, wherever its bytes are cut."""

import json
import random
from itertools import pairwise

import pytest

from agents.core.stream_content import StreamContent
from agents.core.stream_errors import BOM, EVENT_BYTES_MAX
from schemas.http import CHAT, COMPLETIONS, MESSAGES, RESPONSES


def chat(delta: object, **choice: object) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}]
    return b"data: " + json.dumps({"id": "c", "choices": choices}).encode() + b"\n\n"


def named(name: str, fields: object = None) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps(fields or {"a": 1}).encode())


ROLE = chat({"role": "assistant", "content": ""})
TEXT = chat({"content": "a"})
COMMENT = b": keep-alive\n\n"
ERROR = b'data: {"error": {"message": "broke", "code": 503}}\n\n'
TWO = {"index": 1, "delta": {"role": "assistant", "content": None}}
NONE = [
    (CHAT, COMMENT),
    (CHAT, b"\n"),
    (CHAT, b"\r\n\r\n"),
    (CHAT, b": a\r\n\r\n: b\r\n\r\n"),
    (CHAT, b"data:\n\n"),
    (CHAT, b"event: ping\n\n"),
    (CHAT, b'data: {"type": "ping"}\n\n'),
    (CHAT, b"retry: 1000\n\n"),
    (CHAT, ROLE),
    (CHAT, ROLE.replace(b"\n", b"\r\n")),
    (CHAT, chat({"role": "assistant"})),
    (CHAT, chat({"role": "assistant", "content": None, "tool_calls": [], "refusal": None})),
    (CHAT, chat({"role": "assistant", "content": "", "reasoning_content": ""})),
    (CHAT, chat({"role": "assistant", "content": ""}, logprobs={"content": []})),
    (
        CHAT,
        b"data: "
        + json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant"}}, TWO]}).encode()
        + b"\n\n",
    ),
    (MESSAGES, named("message_start", {"message": {"role": "assistant", "content": []}})),
    (MESSAGES, named("content_block_start")),
    (MESSAGES, b"event: ping\r\ndata: {}\r\n\r\n"),
    (MESSAGES, b'data: {"type":"message_start","message":{"content":"x"}}\n\n'),
    (RESPONSES, named("response.created")),
    (RESPONSES, named("response.in_progress")),
    (RESPONSES, named("keepalive")),
]
SOME = [
    (CHAT, TEXT),
    (CHAT, chat({"content": ""})),  # a token that gave no text yet
    (CHAT, chat({})),
    (CHAT, chat({"role": "assistant", "content": "a"})),
    (CHAT, chat({"role": "assistant", "reasoning": "a"})),
    (CHAT, chat({"role": "assistant", "reasoning_content": "a"})),
    (CHAT, chat({"role": "assistant", "refusal": "a"})),
    (CHAT, chat({"role": "assistant", "audio": {"id": "a"}})),
    (CHAT, chat({"role": "assistant", "tool_calls": [{"index": 0}]})),
    (CHAT, chat({"role": "assistant", "content": ""}, finish_reason="stop")),
    (CHAT, chat({"role": "assistant", "content": ""}, logprobs={"content": [{"token": "a"}]})),
    (CHAT, chat({"role": "assistant", "content": ""}, token_ids=[1])),
    (CHAT, chat({"content": '"role"'})),
    (CHAT, chat("role")),
    (CHAT, b'data: {"choices": 1, "role": 2}\n\n'),
    (CHAT, b'data: ["role"]\n\n'),
    (CHAT, b'data: {"role": \n\n'),
    (CHAT, b'data: {"choices": [], "usage": {}}\n\n'),
    (CHAT, b"data: [DONE]\n\n"),
    (CHAT, ERROR),
    (CHAT, b"event: error\n: no worker\n\n"),
    (CHAT, COMMENT + TEXT),
    (CHAT, ROLE + TEXT),
    (COMPLETIONS, b'data: {"choices":[{"text":"a"}]}\n\n'),
    (MESSAGES, named("content_block_delta", {"delta": {"text": "event: ping"}})),
    (MESSAGES, named("message_stop")),
    (RESPONSES, named("response.output_text.delta")),
    (RESPONSES, named("response.completed")),
]


@pytest.mark.parametrize(("path", "events", "is_content"), [
    *((*each, False) for each in NONE), *((*each, True) for each in SOME)
])  # fmt: skip
def test_what_is_content(path, events, is_content) -> None:
    """As a stream's first bytes, and behind others; whole, and byte by byte."""
    for before in (b"", TEXT, COMMENT):
        for size in (len(events), 1):
            content = StreamContent(path)
            content.came(before)
            parts = [events[at : at + size] for at in range(0, len(events), size)]
            came = [content.came(part) for part in parts]
            assert any(came) is is_content, (before, size)


@pytest.mark.parametrize("seed", range(60))
def test_where_the_bytes_are_cut_does_not_matter(seed) -> None:
    """Nothing is content before the first event of content is whole, and then it is; an error is
    seen if that event is one."""
    rng = random.Random(seed)
    path = rng.choice([CHAT, MESSAGES, RESPONSES])
    silent = [events for of, events in NONE if of == path] + [COMMENT]
    loud = [events for of, events in SOME if of == path and events.count(b"\n\n") == 1]
    opening = b"".join(rng.choices(silent, k=rng.randrange(6)))
    first = rng.choice([ERROR, rng.choice(loud)])
    whole = opening + first + b"".join(rng.choices([*silent, *loud, ERROR], k=rng.randrange(6)))
    cuts = sorted({0, len(whole), *rng.choices(range(len(whole)), k=rng.randrange(40))})
    content, came_at = StreamContent(path), None
    for start, end in pairwise(cuts):
        if content.came(whole[start:end]) and came_at is None:
            came_at = end
    decided_at = min(cut for cut in cuts if cut >= len(opening) + len(first))
    assert came_at == decided_at, seed
    assert (content.error is not None) is (b"error" in first), seed


@pytest.mark.parametrize("seed", range(30))
def test_progress_of_a_stream_that_flows_is_seen_alike_in_any_pieces(seed) -> None:
    """Behind the first content a piece counts if it ends an event of content."""
    rng = random.Random(seed)
    path = rng.choice([CHAT, MESSAGES, RESPONSES])
    pool = [(e, False) for of, e in NONE if of == path] + [
        (e, True) for of, e in SOME if of == path and e.count(b"\n\n") == 1
    ]
    content = StreamContent(path)
    assert content.came(named("x") if path != CHAT else TEXT)
    for events, is_content in rng.choices(pool, k=20):
        cut = rng.randrange(len(events))
        came = [content.came(part) for part in (events[:cut], events[cut:]) if part]
        assert any(came) is is_content, (seed, events)


def test_a_long_event_counts_as_it_comes_and_holds_no_memory() -> None:
    content = StreamContent(CHAT)
    assert not content.came(b'data: {"choices":[{"delta":{"content":"')
    assert content.came(b"x" * (EVENT_BYTES_MAX + 1))
    assert content.came(b"x") and content.came(b'"}}]}\n') and content.came(b"\n")
    assert not content.came(COMMENT)
    assert content.came(TEXT)


def test_comments_without_blank_lines_never_become_content() -> None:
    content = StreamContent(CHAT)
    assert not any(content.came(b": keep-alive\n") for _ in range(5000))
    assert content.came(TEXT)
    assert not content.came(b":")
    assert not any(content.came(b"x" * 1000) for _ in range(100))


def test_a_byte_order_mark_hides_nothing() -> None:
    content = StreamContent(CHAT)
    assert not content.came(BOM + ROLE)
    assert content.came(TEXT)
    assert StreamContent(CHAT).came(BOM + TEXT)


@pytest.mark.parametrize("begin", [b"event: error\n: no worker", ERROR.rstrip(), b"data: 1"])
def test_the_end_of_a_stream_ends_its_last_event(begin) -> None:
    content = StreamContent(CHAT)
    assert not content.came(ROLE + begin)
    content.ended()
    assert (content.error is not None) is (b"error" in begin)
