import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.adapters.refused import RequestRefused
from mesh.http import request_body as upload
from mesh.http.read_request import BodyBudget
from mesh.http.request_body import (
    MEMBERS_MAX,
    SIZE_BYTES_MAX,
    STEP_BYTES,
    UPLOAD_S_MAX,
    WINDOW_BYTES,
    WINDOW_S,
    ChunkedBody,
    Upload,
    UploadRate,
)
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import Fault


def bare(data: bytes) -> bytes:
    codec = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return codec.compress(data) + codec.flush()


def received(made: Upload, *chunks: bytes) -> bytes:
    for chunk in chunks:
        more = made.arrived(chunk)
        while more:
            more = made.decode()
    return b"".join(made.chunks())


CODECS = [
    (None, bytes),
    ("identity", bytes),
    ("gzip", gzip.compress),
    ("GZip", lambda data: gzip.compress(data[:3], mtime=0) + gzip.compress(data[3:], mtime=0)),
    ("deflate", zlib.compress),
    ("deflate", bare),
]


@pytest.mark.parametrize(("encoding", "codec"), CODECS)
@given(data=st.binary(max_size=2000), size=st.integers(1, 50))
def test_what_arrives_in_any_pieces_is_what_was_sent(encoding, codec, data, size):
    budget, sent = BodyBudget(), codec(data)
    made = Upload(budget, encoding, len(sent))
    chunks = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert received(made, *chunks) == data
    assert made.size == made.taken == budget.taken_bytes == len(data)
    made.release()
    assert budget.taken_bytes == 0


def fault_of(call) -> Fault:
    with pytest.raises(RequestRefused) as found:
        call()
    return found.value.fault


def test_what_is_announced_is_not_charged_and_what_arrives_is():
    budget = BodyBudget()
    made = Upload(budget, None, BODY_BYTES_MAX)
    assert budget.taken_bytes == 0
    made.arrived(b"x" * 1000)
    assert budget.taken_bytes == 1000


def test_a_body_that_is_too_large_is_refused_before_it_comes_or_when_it_has():
    assert fault_of(lambda: Upload(BodyBudget(), None, BODY_BYTES_MAX + 1)) is Fault.BODY_TOO_LARGE
    made = Upload(BodyBudget(), None, None)
    made.arrived(b"x" * BODY_BYTES_MAX)
    assert fault_of(lambda: made.arrived(b"x")) is Fault.BODY_TOO_LARGE


@pytest.mark.parametrize("codec", [gzip.compress, zlib.compress])
def test_a_bomb_is_decoded_in_small_steps_and_refused_at_the_limit(codec):
    bomb = codec(b"\0" * (BODY_BYTES_MAX + 1))
    budget = BodyBudget()
    made = Upload(budget, "gzip" if codec is gzip.compress else "deflate", len(bomb))
    steps = [0]

    def all_of_it() -> None:
        assert made.arrived(bomb)
        more = True
        while more:
            before = made.size
            more = made.decode()
            steps.append(made.size - before)

    assert fault_of(all_of_it) is Fault.BODY_TOO_LARGE
    assert max(steps) <= STEP_BYTES
    assert made.size <= BODY_BYTES_MAX
    made.release()
    assert budget.taken_bytes == 0


def test_a_bomb_is_refused_when_the_room_of_all_is_taken():
    budget = BodyBudget(limit_bytes=1_000_000, for_small_bytes=0)
    made = Upload(budget, "gzip", None)
    bomb = gzip.compress(b"\0" * 10_000_000, mtime=0)
    assert fault_of(lambda: received(made, bomb)) is Fault.SATURATED
    assert budget.taken_bytes <= 1_000_000


def test_bytes_that_come_to_nothing_are_limited_too(monkeypatch):
    """A gzip header with a file name that does not end."""
    monkeypatch.setattr(upload, "BODY_BYTES_MAX", 100_000)
    made = Upload(BodyBudget(), "gzip", None)
    begin = b"\x1f\x8b\x08\x08" + b"\0" * 6
    chunks = [begin, *[b"n" * 10_000] * 10]
    assert fault_of(lambda: received(made, *chunks)) is Fault.BODY_TOO_LARGE


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", b"abcd"),
        ("gzip", gzip.compress(b"text", mtime=0)[:-1]),
        ("gzip", gzip.compress(b"text", mtime=0) + b"more"),
        ("deflate", zlib.compress(b"text") + b"more"),
        ("deflate", zlib.compress(b"text")[:-1]),
        ("gzip", gzip.compress(b"", mtime=0) * (MEMBERS_MAX + 1)),
    ],
)
def test_a_stream_that_is_none_is_refused(encoding, data):
    budget = BodyBudget()
    made = Upload(budget, encoding, len(data))
    assert fault_of(lambda: received(made, data)) is Fault.INVALID
    made.release()
    assert budget.taken_bytes == 0


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip,br", ""])
def test_other_encodings_are_not_taken(encoding):
    assert fault_of(lambda: Upload(BodyBudget(), encoding, 5)) is Fault.ENCODING


def test_x_gzip_is_gzip():
    data = gzip.compress(b"hello", mtime=0)
    assert received(Upload(BodyBudget(), "X-Gzip", len(data)), data) == b"hello"


def test_a_client_that_sends_enough_has_until_the_end():
    rate, now = UploadRate(100.0), 100.0
    while now < 100.0 + UPLOAD_S_MAX - WINDOW_S:
        now = rate.due_at - 0.1
        rate.arrived(WINDOW_BYTES, now)
    assert rate.due_at == 100.0 + UPLOAD_S_MAX


def test_a_client_that_sends_too_little_is_late_whatever_it_sent_before():
    rate = UploadRate(0.0)
    rate.arrived(30 * 1024 * 1024, 1.0)
    for now in range(2, 10):
        rate.arrived(WINDOW_BYTES // 10, float(now))
    assert rate.due_at == 1.0 + WINDOW_S


def test_time_in_which_nobody_read_is_not_the_client_s():
    rate = UploadRate(0.0)
    rate.forgive(5.0)
    assert rate.due_at == WINDOW_S + 5.0


def test_time_in_which_the_router_stood_still_is_forgiven_once():
    rate = UploadRate(0.0)
    assert not rate.is_over(WINDOW_S + 30.0)
    assert WINDOW_S + 30.0 < rate.due_at < WINDOW_S + 31.0
    assert rate.is_over(rate.due_at + 30.0)
    assert UploadRate(0.0).is_over(WINDOW_S + 0.5), "a busy router's look"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_a_chunked_body_is_decoded_up_to_its_end_wherever_it_is_cut(step):
    whole = b"5\r\nhel\n0\r\n1a;x=1\r\n" + b"\r\n" * 13 + b"\r\n0\r\nx-a: b\r\n\r\n"
    body, data, decoded = ChunkedBody(), whole + b"GET / HTTP/1.1\r\n\r\n", b""
    for at in range(0, len(data), step):
        more, end = body.decoded(data[at : at + step])
        decoded += more
        if end is not None:
            break
    assert end is not None and at + end == len(whole)
    assert decoded == b"hel\n0" + b"\r\n" * 13


NO_CHUNKS = [
    *(b"x\r\n", b"\r\n", b"-3\r\n", b"1_0\r\n", b"0x5\r\n", b" 5\r\n", b"5 \r\n", b"5\n"),
    *(b"5;a\rb\r\n", b"5;a\0\r\n", b"3\r\nhello\r\n", b"3\r\nhel\n", b"3\r\nhel\rx"),
    *(
        b"0\r\nx-a\r\n",
        b"0\r\nx-a : b\r\n",
        b"0\r\nx-a: b\n",
        b"0\r\nContent-Length: 5\r\n",
        b"f" * 17 + b"\r\n",
        b"1" * 20_000,
    ),
    b"0\r\n" + b"x-a: b\r\n" * 3_000,
    b"1\r\na\r\n" * (SIZE_BYTES_MAX // 2 + 2),
]


@pytest.mark.parametrize("step", [1, 100_000])
@pytest.mark.parametrize("data", NO_CHUNKS, ids=range(len(NO_CHUNKS)))
def test_what_is_no_chunk_is_refused_wherever_it_is_cut(data, step):
    body = ChunkedBody()
    with pytest.raises(ValueError):
        for at in range(0, len(data), step):
            body.decoded(data[at : at + step])
