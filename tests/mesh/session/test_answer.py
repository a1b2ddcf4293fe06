"""One attempt's answer, frame by frame: order, what may be given out, credit, and its limits."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.session.answer import (
    BUFFERED_BYTES_MAX,
    ERROR_BYTES_MAX,
    EVENT_BYTES_MAX,
    PLAIN_BYTES_MAX,
    PROGRESS_S,
    AnswerReceiver,
    EngineError,
)
from schemas import exchange, wire
from schemas.exchange import WINDOW_BYTES, Frame, FrameView, Outcome, Refusal

KEY, ATTEMPT, INBOX = 7, 2, "_INBOX.us.r1.7-2-x"
EVENTS, JSON = "text/event-stream; charset=utf-8", "application/json"
BLOCK = 64 * 1024

SERVED = Served(prompt_tokens=9, cached_tokens=4, output_tokens=2)


class Sender:
    """Feeds an answer numbered frames, as an agent sends them; `heard` is what the core hears."""

    def __init__(self, content_type: str | None = None, status: int = 200) -> None:
        self.answer = AnswerReceiver(KEY, ATTEMPT, INBOX)
        self.number = 0
        self.heard: list[ev.Event | None] = []
        if content_type is not None:
            self.head(content_type, status)

    def send(self, kind: Frame, payload: bytes = b"", number: int | None = None) -> ev.Event | None:
        if number is None:
            number, self.number = self.number, self.number + 1
        event = self.answer.feed(FrameView(kind, number, payload), now=0.0)
        self.heard.append(event)
        return event

    def head(self, content_type: str = EVENTS, status: int = 200) -> ev.Event | None:
        return self.send(Frame.HEAD, wire.encode(exchange.Head(status, content_type, "eu", "g1")))

    def data(self, payload: bytes) -> ev.Event | None:
        return self.send(Frame.DATA, payload)

    def end(self, outcome: Outcome = Outcome.DONE, detail: str = "") -> ev.Event | None:
        return self.send(Frame.END, wire.encode(exchange.End(outcome, detail, 9, 4, 2, 0.1)))


def failure(detail: str, status: int | None = None, **about: bool) -> ev.AttemptFailed:
    return ev.AttemptFailed(KEY, ATTEMPT, detail, status, **about)


# Order.


def test_an_answer_from_its_head_to_its_end() -> None:
    sender = Sender()
    answer = sender.answer
    assert not answer.is_startable
    sender.head()
    assert (answer.region, answer.replica) == ("eu", "g1")
    assert not answer.is_startable  # an engine says 200 long before its first token
    assert sender.data(b"data: 1\n\n") is None
    assert answer.is_startable
    assert answer.take() == b"data: 1\n\n"
    sender.data(b"data: 2\n\n")
    assert sender.end() == ev.AnswerEnded(KEY, ATTEMPT, SERVED, shows_ttft=True)
    assert (answer.take(), answer.take(), answer.end is not None) == (b"data: 2\n\n", b"", True)
    assert answer.end is not None and answer.end.prompt_tokens == 9


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("content_type", [EVENTS, JSON])
def test_streams_and_a_prompts_work_alone_show_the_first_token(generates, status, content_type):
    sender = Sender()
    sender.answer.generates = generates
    sender.head(content_type, status)
    sender.data(b"data: 1\n\n")
    expected = content_type == EVENTS if generates else status == 200
    assert sender.answer.shows_ttft == expected
    assert sender.end() == ev.AnswerEnded(KEY, ATTEMPT, SERVED, shows_ttft=expected)


def test_what_is_said_again_is_passed_over() -> None:
    sender = Sender(EVENTS)
    sender.data(b"1\n\n")
    assert sender.send(Frame.HEAD, b"", 0) is None
    assert sender.send(Frame.DATA, b"1\n\n", 1) is None
    assert sender.answer.take() == b"1\n\n"


@pytest.mark.parametrize("kind", [Frame.WORKING, Frame.BODY_WANTED])
def test_signs_of_work_are_numbered_and_carry_no_answer(kind) -> None:
    sender = Sender()
    sender.send(kind)
    sender.head()
    sender.send(Frame.WORKING)
    sender.data(b"data: 1\n\n")
    assert sender.answer.take() == b"data: 1\n\n"


def test_the_core_hears_of_progress_now_and_then() -> None:
    answer = AnswerReceiver(KEY, ATTEMPT, INBOX)
    times = [0.0, PROGRESS_S / 2, PROGRESS_S - 0.001, PROGRESS_S, PROGRESS_S + 0.1, 10.0]
    heard = [
        answer.feed(FrameView(Frame.WORKING, number, b""), now) for number, now in enumerate(times)
    ]
    progressed = ev.AttemptProgressed(KEY, ATTEMPT)
    assert heard == [progressed, None, None, progressed, None, progressed]


def test_data_or_an_end_without_a_head_fail() -> None:
    assert Sender().data(b"data: 1\n\n") == failure("the answer began without its head")
    assert Sender().end() == failure("the answer ended without a head")


def test_a_second_head_fails() -> None:
    assert Sender(EVENTS).head(JSON) == failure("the answer has two heads")


@pytest.mark.parametrize("kind", [Frame.HEAD, Frame.END, Frame.PLACED, Frame.REFUSED, Frame.LOST])
@pytest.mark.parametrize("payload", [b"", b"\xff\x00", wire.encode(exchange.Cancel("x"))])
def test_a_payload_that_is_no_such_message_is_the_sender_s_fault(kind, payload) -> None:
    with pytest.raises(wire.WireError):
        Sender().send(kind, payload, 0)


# Who answers: outside the numbering, at any time.


@pytest.mark.parametrize("headed", [False, True])
def test_a_peer_says_who_will_answer(headed) -> None:
    sender = Sender(EVENTS if headed else None)  # the agent may be quicker than its router
    assert (sender.send(Frame.HELD, b"", 0) is None) is headed, "who is known waits no more"
    if not headed:  # its number is of older routers that forwarded over several borders
        for number in (0, 1, 2):
            progressed = ev.AttemptProgressed(KEY, ATTEMPT)
            assert sender.send(Frame.HELD, b"", number) == progressed
    placed = wire.encode(exchange.Placed("eu", "g1"))
    assert sender.send(Frame.PLACED, placed, 0) == ev.PlacedByPeer(KEY, ATTEMPT, "g1")
    assert (sender.answer.region, sender.answer.replica) == ("eu", "g1")
    if not headed:
        sender.head()
    sender.data(b"data: 1\n\n")
    assert sender.answer.take() == b"data: 1\n\n"


@pytest.mark.parametrize(("replica", "named"), [("g1", "g1"), ("", None)])
def test_a_refusal_carries_the_load_of_whoever_refuses(replica, named) -> None:
    refused = wire.encode(exchange.Refused(Refusal.FULL, "eu", replica, 3, 20, "no digest"))
    event = (sender := Sender()).send(Frame.REFUSED, refused, 0)
    assert sender.answer.fresh is None  # a refusal stands whatever is said beside it
    assert event == ev.AttemptRefused(KEY, ATTEMPT, Refusal.FULL, "eu", named, 3, 20)


def test_a_peer_says_that_its_replica_is_lost() -> None:
    sender = Sender(EVENTS)
    sender.data(b"data: 1\n\n")
    event = sender.send(Frame.LOST, wire.encode(exchange.Lost("eu", "g1")), 0)
    assert event == failure("replica g1 of region eu was lost", blameless=True, replica_lost=True)


# Events are given out whole.


@pytest.mark.parametrize(
    ("chunks", "given_out"),
    [
        ([b"data: 1\n\n"], b"data: 1\n\n"),
        ([b"data: 1\n\ndata: 2"], b"data: 1\n\n"),
        ([b"data: 1\n", b"\n"], b"data: 1\n\n"),
        ([b"data: 1", b"\n", b"\nda"], b"data: 1\n\n"),
        ([b"data: 1\r\n\r\n"], b"data: 1\r\n\r\n"),
        ([b"data: 1\r\n\r\ndata: 2\r\n"], b"data: 1\r\n\r\n"),
        ([b"data: 1\r\n\r", b"\n"], b"data: 1\r\n\r\n"),
        ([b"data: 1\r", b"\n", b"\r", b"\n", b"d"], b"data: 1\r\n\r\n"),
        ([b"data: 1\r\n\n"], b"data: 1\r\n\n"),
        ([b"data: 1\n\ndata: 2\r\n\r\ndata: 3"], b"data: 1\n\ndata: 2\r\n\r\n"),
        ([b"\n\n: hello"], b"\n\n"),
        ([b"data: 1"], b""),
        ([b"data: 1\n"], b""),
        ([b"data: 1\r\n"], b""),
        ([b"data: 1\r\n\r"], b""),
        ([b"data: 1\n", b"data: 2\n"], b""),
        ([b"", b""], b""),
    ],
)
def test_only_whole_events_are_given_out(chunks, given_out) -> None:
    sender = Sender(EVENTS)
    for chunk in chunks:
        sender.data(chunk)
    answer = sender.answer
    assert answer.is_startable is (given_out != b"")
    assert answer.take() == given_out
    assert answer.take() == b""
    assert answer.is_between_events
    assert answer.buffered_bytes == len(b"".join(chunks)) - len(given_out)
    sender.end()  # the rest goes out when nothing more can come
    assert given_out + answer.take() == b"".join(chunks)
    assert answer.buffered_bytes == 0


def test_an_event_too_long_to_hold_is_given_out_in_pieces() -> None:
    sender = Sender(EVENTS)
    answer = sender.answer
    sender.data(b"data: 1\n\n" + b"x" * EVENT_BYTES_MAX)
    assert answer.take() == b"data: 1\n\n"
    sender.data(b"y")
    assert answer.take() == b"x" * EVENT_BYTES_MAX + b"y"
    assert not answer.is_between_events  # an error event must not be read as part of it
    sender.data(b"z\n\n")
    assert answer.take() == b"z\n\n"
    assert answer.is_between_events


PARTS = st.sampled_from(
    [b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"data: ", b": c", b"x", b"\n\r"]
)


@given(
    st.lists(st.lists(PARTS, max_size=6).map(b"".join), max_size=20),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
@example([b"data: 1\r\n\r", b"\n"], [True] * 20)
def test_any_cut_of_any_stream_gives_out_the_same_bytes(chunks, takes) -> None:
    sender = Sender(EVENTS)
    whole = b"".join(chunks)
    given_out = b""
    for chunk, take in zip(chunks, takes, strict=False):
        sender.data(chunk)
        if take:
            given_out += sender.answer.take()
            assert given_out == b"" or given_out.endswith((b"\n\n", b"\n\r\n"))
            assert whole.startswith(given_out)
            assert len(given_out) + sender.answer.buffered_bytes == len(
                b"".join(chunks[: sender.number - 1])
            )
    sender.end()
    assert given_out + sender.answer.take() == whole


# Plain answers.


def test_a_plain_answer_waits_until_it_is_complete() -> None:
    sender = Sender(JSON)
    sender.data(b'{"a":')
    assert not sender.answer.is_startable
    sender.data(b"1}")
    sender.end()
    assert sender.answer.is_startable
    assert sender.answer.take() == b'{"a":1}'


def test_a_plain_answer_too_large_to_wait_for_starts_before_its_end() -> None:
    sender = Sender(JSON)
    for _ in range(PLAIN_BYTES_MAX // BLOCK - 1):
        sender.data(b"x" * BLOCK)
    sender.data(b"x" * (BLOCK - 1))
    assert not sender.answer.is_startable
    sender.data(b"y")
    assert sender.answer.is_startable
    assert len(sender.answer.take()) == PLAIN_BYTES_MAX


def test_an_empty_answer_can_start_and_end() -> None:
    sender = Sender(JSON, status=204)
    sender.end()
    assert sender.answer.is_startable
    assert sender.answer.take() == b""


# Errors of engines.


@pytest.mark.parametrize("status", [429, 500, 503, 599])
@pytest.mark.parametrize("content_type", [JSON, EVENTS], ids=["json", "events"])
def test_an_engine_s_error_is_kept_and_never_starts(status, content_type) -> None:
    sender = Sender(content_type, status)
    sender.data(b'{"error":')
    sender.data(b'"busy"}')
    assert not sender.answer.is_startable
    assert not sender.answer.is_event_stream
    event = sender.end()
    assert event == failure(f"the engine answered {status}", status)
    kept = EngineError(status, content_type, b'{"error":"busy"}')
    assert sender.answer.engine_error == kept
    assert not sender.answer.is_startable


@pytest.mark.parametrize("status", [200, 400, 404, 422, 499])
def test_other_statuses_are_answers(status) -> None:
    sender = Sender(JSON, status)
    sender.data(b"{}")
    assert sender.end() == ev.AnswerEnded(KEY, ATTEMPT, SERVED)
    assert sender.answer.is_startable
    assert sender.answer.engine_error is None


@pytest.mark.parametrize("content_type", [JSON, EVENTS], ids=["json", "events"])
def test_of_a_long_error_the_beginning_is_kept_and_the_rest_flows_by(content_type) -> None:
    sender = Sender(content_type, 500)
    sent = credited = 0
    for _ in range(64):
        sender.data(b"e" * 100_000)
        sent += 100_000
        assert sender.answer.buffered_bytes <= ERROR_BYTES_MAX
        if (credit := sender.answer.credit_due()) is not None:
            credited = credit.consumed_bytes
        assert credited <= sent < credited + WINDOW_BYTES  # or the agent would wait for ever
    sender.end()
    error = sender.answer.engine_error
    assert error is not None and error.body == b"e" * ERROR_BYTES_MAX


@pytest.mark.parametrize(
    ("outcome", "detail", "told", "blameless"),
    [
        (Outcome.CANCELLED, "", "cancelled", True),
        (Outcome.BODY_LOST, "", "body_lost", True),
        (Outcome.DEADLINE, "", "deadline", True),
        (Outcome.ENGINE_LOST, "connection reset", "connection reset", False),
        (Outcome.ENGINE_BROKEN, "", "engine_broken", False),
        ("an outcome of a later version", "", "an outcome of a later version", True),
    ],
)
def test_an_answer_that_did_not_end_well_is_not_complete(outcome, detail, told, blameless) -> None:
    sender = Sender(EVENTS)
    sender.data(b"data: 1\n\ndata: ha")
    assert sender.end(outcome, detail) == failure(told, blameless=blameless)
    assert (sender.answer.end, sender.answer.failed_as) == (None, outcome)
    assert sender.answer.take() == b"data: 1\n\n"  # the half event is never given out


# Flow control.


def test_a_stream_is_credited_for_what_was_taken_by_half_windows() -> None:
    sender = Sender(EVENTS)
    answer, half = sender.answer, WINDOW_BYTES // 2
    event = b"data: " + b"x" * (half // 4 - 8) + b"\n\n"
    for _ in range(4):
        sender.data(event)
    assert answer.credit_due() is None  # nothing has left for the client
    answer.take()
    assert answer.credit_due() == exchange.Credit(INBOX, half)
    assert answer.credit_due() is None  # once
    for _ in range(3):
        sender.data(event)
    answer.take()
    assert answer.credit_due() is None
    sender.data(event)
    answer.take()
    assert answer.credit_due() == exchange.Credit(INBOX, 2 * half)


def test_a_short_answer_costs_no_credit() -> None:
    sender = Sender(EVENTS)
    sender.data(b"data: " + b"x" * 1000 + b"\n\n")
    sender.answer.take()
    assert sender.answer.credit_due() is None


def test_an_answer_that_is_complete_needs_no_credit() -> None:
    sender = Sender(EVENTS)
    sender.data(b"x" * WINDOW_BYTES + b"\n\n")
    sender.end()
    sender.answer.take()
    assert sender.answer.credit_due() is None


def test_a_plain_answer_is_credited_while_it_waits_but_not_without_limit() -> None:
    sender = Sender(JSON)
    answer = sender.answer
    credited = sent = 0
    while sent - credited + BLOCK <= WINDOW_BYTES:  # as an agent reckons
        sender.data(b"x" * BLOCK)
        sent += BLOCK
        if (credit := answer.credit_due()) is not None:
            credited = credit.consumed_bytes
    assert (sent, credited) == (PLAIN_BYTES_MAX + WINDOW_BYTES, PLAIN_BYTES_MAX)
    assert answer.is_startable
    assert not any(isinstance(event, ev.AttemptFailed) for event in sender.heard)
    assert len(answer.take()) == sent
    assert answer.credit_due() == exchange.Credit(INBOX, sent)


@pytest.mark.parametrize("content_type", [JSON, EVENTS], ids=["json", "events"])
def test_more_than_flow_control_allows_breaks_the_answer_off(content_type) -> None:
    sender = Sender(content_type)
    for _ in range(BUFFERED_BYTES_MAX // BLOCK):
        assert not isinstance(sender.data(b"x" * BLOCK), ev.AttemptFailed)
    assert sender.data(b"y") == failure("the replica sent more than flow control allows")


# Offline work.


def test_offline_work_that_was_given_back_is_no_failure_of_the_replica() -> None:
    sender = Sender("application/json")
    sender.data(b'{"id"')
    event = sender.end(Outcome.PREEMPTED, "online requests need the room")
    assert event == ev.AttemptFailed(KEY, ATTEMPT, "preempted", preempted=True)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_count_that_no_request_can_have_is_none(at: int) -> None:
    counts = [9, 4, 2]
    counts[at] = exchange.TOKENS_MAX
    for count, told in ((exchange.TOKENS_MAX, exchange.TOKENS_MAX), (2**60, -1)):
        counts[at] = count
        sender = Sender(EVENTS)
        sender.send(Frame.END, wire.encode(exchange.End(Outcome.DONE, "", *counts, 0.1)))
        end = sender.answer.end
        assert end is not None
        assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens)[at] == told
