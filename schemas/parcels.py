"""Frames of several answers in one bus message.

Engines answer in step: at one moment there is a token for every stream of a batch. As messages of
their own these cost the bus and the router more to carry than the bytes in them are worth, so what
an agent has for one router at one moment goes out as one message, to that router's inbox named
`PARCEL`. A frame that is alone then goes to its answer's own inbox, as it does from anyone else.
Routers that read parcels mark the streams that answers come on: `parcelled`.

A parcel is frames one after the other, each behind its answer's place:

    byte 0       length of the stream, the last token of the answer's inbox
    bytes 1..4   length of the frame, big-endian
    then         the stream in ASCII, and the frame
"""

import struct
from collections.abc import Iterable, Iterator

from schemas.exchange import FRAME_HEADER
from schemas.wire import WireError

PARCEL = "parcel"
PARCEL_BYTES_MAX = 256 * 1024  # far below any max_payload; frames are at most half of it
PARCEL_FRAMES_MAX = 2048  # twice what an agent usually has under way
STREAM_CHARS_MAX = 255
_MARK = "p-"  # other streams begin with a number
_NO_STREAM = (PARCEL, "*", ">")
_PLACE = struct.Struct(">BI")
_PLACE_BYTES, _HEADER_BYTES = _PLACE.size, FRAME_HEADER.size

Post = tuple[str, bytes]  # a stream and a frame for it


def parcelled(stream: str) -> str:
    """That stream's name for a router that reads parcels."""
    return _MARK + stream


def is_parcelled(stream: str) -> bool:
    """Whether the stream's router reads parcels."""
    return stream.startswith(_MARK)


def is_stream(token: str) -> bool:
    """Whether an answer's inbox may end so."""
    return token.isascii() and 0 < len(token) <= STREAM_CHARS_MAX and token not in _NO_STREAM


def pack_parcels(posts: Iterable[Post]) -> Iterator[bytes]:
    """The frames in their order, in as few messages as the limits allow.

    Streams are as `is_stream` wants them.
    """
    parts: list[bytes] = []
    size, pack = 0, _PLACE.pack
    for stream, frame in posts:
        more = _PLACE_BYTES + len(stream) + len(frame)
        if (size + more > PARCEL_BYTES_MAX or len(parts) >= 3 * PARCEL_FRAMES_MAX) and parts:
            yield b"".join(parts)
            parts, size = [], 0
        parts += (pack(len(stream), len(frame)), stream.encode("ascii"), frame)
        size += more
    if parts:
        yield b"".join(parts)


def unpack_parcel(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Stream and frame, one after the other. Raises WireError where it is none, at that place.

    Frames are copies: a view would keep all of the parcel in memory while its client is slow.
    """
    if len(data) > PARCEL_BYTES_MAX:
        raise WireError(f"a parcel of {len(data)} bytes; at most {PARCEL_BYTES_MAX} are read")
    at = frames = 0
    size, unpack_from = len(data), _PLACE.unpack_from
    while at < size:
        stream_at = at + _PLACE_BYTES
        if stream_at > size:
            raise WireError("a parcel ends inside a place")
        stream_chars, frame_bytes = unpack_from(data, at)
        frame_at = stream_at + stream_chars
        at = frame_at + frame_bytes
        if at > size:
            raise WireError(f"a parcel of {size} bytes has a frame up to {at}")
        frames += 1
        if not stream_chars or frame_bytes < _HEADER_BYTES or frames > PARCEL_FRAMES_MAX:
            raise WireError("a parcel has a frame without a stream or a head, or too many of them")
        yield data[stream_at:frame_at].decode("ascii", "replace"), data[frame_at:at]
