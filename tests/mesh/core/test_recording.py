"""What is written is what is read: every event, every effect, every setting, to the last bit."""

import math
import typing
from dataclasses import fields

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.core import recording
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.recording import RecordedStep, RecordingEnd, RecordingHeader, RecordingInvalid
from schemas.http import Fault
from schemas.ids import RegionId, RouterId
from schemas.residency import ground
from tests.mesh.core import build
from tests.mesh.core.any_value import FLOATS, values_of

EVENTS = typing.get_args(ev.Event)
EFFECTS = typing.get_args(fx.Effect)
EXAMPLES = 10  # of each of some eighty types


def named(kind: type) -> str:
    return kind.__name__


def header(**settings: object) -> RecordingHeader:
    return RecordingHeader(
        version="0.1.0",
        region=RegionId("us"),
        router=RouterId("r1"),
        epoch=3,
        seed=2**64 - 1,
        settings=RouterSettings(**settings),
    )


@pytest.fixture(autouse=True, scope="module")
def readers():
    """Made at their first use, which may take longer than an example may on a busy machine."""
    recording.decode_header(recording.encode_header(header()))


@pytest.mark.parametrize("kind", EVENTS, ids=named)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])  # made when drawn
@given(data=st.data(), now=FLOATS)
def test_every_event_reads_back_as_it_was(kind, data, now):
    event = data.draw(values_of(kind))
    line = recording.encode_step(now, event, [])
    assert recording.decode_line(line) == RecordedStep(now, event, [])
    assert line.endswith(b"\n") and line.count(b"\n") == 1


@pytest.mark.parametrize("kind", EFFECTS, ids=named)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_effect_is_written_whole(kind, data):
    effect = data.draw(values_of(kind))
    [tagged] = recording.plain_effects([effect])
    assert tagged[kind.__name__].keys() == {field.name for field in fields(kind)}
    step = recording.decode_line(recording.encode_step(1.0, ev.Tick(), [effect]))
    assert step == RecordedStep(1.0, ev.Tick(), [tagged])


def test_effects_that_differ_are_written_differently():
    lines = {recording.encode_step(1.0, ev.Tick(), [fx.Fail(1, fault, "")]) for fault in Fault}
    assert len(lines) == len(Fault)


@pytest.mark.parametrize("now", [0.1 + 0.2, 1e-9, 123456.789012345, math.nextafter(50.0, 51.0)])
def test_times_keep_every_bit(now):
    step = recording.decode_line(recording.encode_step(now, ev.Tick(), []))
    assert (step.now, repr(step.now)) == (now, repr(now))


@given(st.floats(0.01, 1.0))
def test_a_header_reads_back_as_it_was(late_s):
    written = header(policy="round-robin", heartbeat_late_s=late_s)
    assert recording.decode_header(recording.encode_header(written)) == written


def test_a_header_with_warming_is_read_where_it_was_off():
    line = recording.encode_header(header(policy="mesh"))
    off, on = (
        line.replace(b'"hold_max"', b'"warm_idle_share":%s,"warm_trend_s":900.0,"hold_max"' % share)
        for share in (b"0.0", b"0.1")
    )
    assert recording.decode_header(off) == header(policy="mesh")
    with pytest.raises(recording.RecordingInvalid, match="no warm_idle_share, warm_trend_s"):
        recording.decode_header(on)


def test_a_header_with_an_order_of_held_requests_is_read_where_it_was_the_one_that_is_left():
    line = recording.encode_header(header(policy="mesh"))
    left, gone = (
        line.replace(b'"hold_max"', b'"hold_order":"%s","hold_max"' % order)
        for order in (b"first-come", b"hit-ratio")
    )
    assert recording.decode_header(left) == header(policy="mesh")
    with pytest.raises(recording.RecordingInvalid, match="no hold_order"):
        recording.decode_header(gone)


def test_a_value_that_json_cannot_hold_is_a_type_error():
    with pytest.raises(TypeError):
        recording.encode_step(1.0, ev.RequestArrived(build.request(2**70)), [])


def test_an_error_of_the_core_is_recorded_in_place_of_effects():
    error = KeyError("us-0")
    step = recording.decode_line(recording.encode_raised(1.0, ev.Tick(), error))
    assert step == RecordedStep(1.0, ev.Tick(), recording.plain_error(error))
    assert "KeyError" in str(step.effects)


def test_the_end_has_its_reason():
    assert recording.decode_line(recording.encode_end("full")) == RecordingEnd("full")


def test_another_format_is_named_with_the_version_that_wrote_it():
    line = recording.encode_header(header()).replace(b'"format":1', b'"format":9')
    with pytest.raises(RecordingInvalid, match=r"format 9 .*0\.1\.0.* reads format 1"):
        recording.decode_header(line)


def test_a_setting_that_this_version_lacks_is_refused_by_name():
    line = recording.encode_header(header()).replace(b'"hold_max"', b'"hold_most"')
    with pytest.raises(RecordingInvalid, match="hold_most"):
        recording.decode_header(line)


def test_a_setting_out_of_range_is_refused_by_name():
    line = recording.encode_header(header(hold_max=77)).replace(b":77,", b":-1,")
    with pytest.raises(RecordingInvalid, match="hold_max"):
        recording.decode_header(line)


@pytest.mark.parametrize("line", [b"", b"{}\n", b"[]\n", b'{"recording":1}\n', b"\xff\n"])
def test_what_is_no_header_is_refused(line):
    with pytest.raises(RecordingInvalid):
        recording.decode_header(line)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"now": 1.0, "event": {"Tock": {}}, "effects": []}, "Tock"),
        ({"now": 1.0, "event": {}, "effects": []}, "no event"),
        ({"now": 1.0, "event": {"Tick": {}, "Drain": {}}, "effects": []}, r"Tick\+Drain"),
        ({"now": 1.0, "event": {"Tick": 1}, "effects": []}, "Tick"),
        ({"now": 1.0, "event": {"Tick": {"tock": 1}}, "effects": []}, "Tick has no tock"),
        ({"now": 1.0, "event": {"ClientGone": {}}, "effects": []}, "ClientGone.key"),
        ({"now": 1.0, "event": {"ClientGone": {"key": "x"}}, "effects": []}, "ClientGone.key"),
        ({"now": "1", "event": {"Tick": {}}, "effects": []}, "no step"),
        ({"now": 1.0, "event": {"Tick": {}}}, "no step"),
        ({}, "nothing"),
    ],
)
def test_what_is_no_step_is_refused_by_what_is_wrong(fields, says):
    with pytest.raises(RecordingInvalid, match=says):
        recording.decode_line(orjson.dumps(fields))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_line_or_invalid(data):
    for decode in (recording.decode_line, recording.decode_header):
        try:
            decode(data)
        except RecordingInvalid:
            continue


def test_the_ground_is_a_setting_like_any_other():
    there = ground({RegionId("us"): ("us",), RegionId("eu"): ()}, {RegionId("us"): ("us",)})
    before = header(ground=there)
    assert recording.decode_header(recording.encode_header(before)) == before
