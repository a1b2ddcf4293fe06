"""Bytes that once travelled must be understood for as long as their version is supported.

`golden/` only grows: a line there is never edited, because some process out there still sends it.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from schemas import wire
from schemas.decision import decode_decision, encode_decision
from schemas.exchange import Frame, pack_frame, unpack_frame
from schemas.explain import decode_answer, decode_question, encode_answer, encode_question
from schemas.state import (
    decode_digest,
    decode_heartbeat,
    decode_lease,
    decode_offline,
    encode_state,
)

GOLDEN = Path(__file__).parent / "golden"
STATE = {
    "heartbeat": (decode_heartbeat, encode_state),
    "digest": (decode_digest, encode_state),
    "lease": (decode_lease, encode_state),
    "offline": (decode_offline, encode_state),
    "decision": (decode_decision, encode_decision),
    "question": (decode_question, encode_question),
    "answer": (decode_answer, encode_answer),
}


def lines(name):
    return [line.split(" ") for line in (GOLDEN / name).read_text().splitlines()]


def listed(value):
    return list(value) if isinstance(value, tuple) else value


def holds(new, old):
    """Whether `new` has everything that `old` has; it may have more."""
    if isinstance(old, dict):
        return all(key in new and holds(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(holds, new, old))
    return new == old


@pytest.mark.parametrize(("name", "version", "raw", "values"), lines("wire.txt"))
def test_old_wire_bytes_still_decode(name, version, raw, values):
    message = wire.decode(bytes.fromhex(raw))
    expected = json.loads(values)
    read = [listed(getattr(message, field.name)) for field in fields(message)]
    assert (type(message).__name__, message.VERSION) == (name, int(version))
    assert read[: len(expected)] == expected


@pytest.mark.parametrize("cls", wire.registered().values(), ids=lambda cls: cls.__name__)
def test_every_wire_message_has_a_golden_line_of_all_its_fields(cls):
    found = [
        json.loads(values)
        for name, version, _, values in lines("wire.txt")
        if (name, int(version)) == (cls.__name__, cls.VERSION)
    ]
    assert any(len(values) == len(fields(cls)) for values in found), (
        f"append a line for {cls.__name__} version {cls.VERSION} to golden/wire.txt: "
        "its name, version, encoded bytes in hex, and field values as JSON without spaces"
    )


def frames():
    """Kind, number, bytes and payload; the last is missing where it is empty."""
    return [(*line, "")[:4] for line in lines("frame.txt")]


@pytest.mark.parametrize(("kind", "number", "raw", "payload"), frames())
def test_old_frames_still_come_apart(kind, number, raw, payload):
    view = unpack_frame(bytes.fromhex(raw))
    assert view == (Frame[kind], int(number), bytes.fromhex(payload))
    assert pack_frame(view.kind, view.number, bytes(view.payload)).hex() == raw


def test_every_frame_kind_has_a_golden_line():
    assert {Frame[kind] for kind, *_ in frames()} == set(Frame)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.name)
def test_old_state_still_decodes_and_loses_nothing(path):
    decode, encode = STATE[path.name.split(".")[0]]
    message = decode(path.read_bytes())
    kept = json.loads(path.read_bytes())
    assert f"v{message.v}" == path.name.split(".")[1]
    assert holds(json.loads(encode(message)), kept)


@pytest.mark.parametrize("kind", STATE)
def test_every_kind_of_state_has_a_golden_file(kind):
    assert list(GOLDEN.glob(f"{kind}.v*.json"))
