"""What an agent sent to a router's inboxes: frames alone, and frames in parcels."""

from collections.abc import Iterator

from nats.aio.msg import Msg

from schemas.exchange import FrameView, unpack_frame
from schemas.parcels import PARCEL, unpack_parcel


def frames_of(msg: Msg) -> Iterator[tuple[str, FrameView]]:
    """The inbox of each frame in a message, and the frame."""
    inboxes, _, last = msg.subject.rpartition(".")
    if last != PARCEL:
        yield msg.subject, unpack_frame(msg.data)
        return
    for stream, frame in unpack_parcel(msg.data):
        yield f"{inboxes}.{stream}", unpack_frame(frame)
