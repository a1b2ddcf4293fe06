"""What a lease's stream answers, as nats-server 2.15 writes it, and what it never writes."""

import contextlib

import orjson
import pytest
from hypothesis import given

from mesh.core.model import events as ev
from mesh.runtime.control_plane import _answered
from tests.schemas.strategies import JSON


def test_a_taken_write_has_its_number():
    said = b'{"stream":"LEASES","domain":"us","seq":17}'
    assert _answered(3, said) == ev.LeaseAnswered(3, granted=True, seq=17)


def test_a_refused_one_names_the_last():
    said = (
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 42"},'
        b'"stream":"LEASES","seq":0}'
    )
    assert _answered(3, said) == ev.LeaseAnswered(3, granted=False, seq=42)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b"{}",
        b'{"seq":"1"}',
        b'{"seq":true}',
        b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"},"seq":0}',
        b'{"error":{"err_code":10071,"description":"wrong last sequence"}}',
    ],
)
def test_anything_else_is_no_answer(said):
    with pytest.raises(ValueError, match=r"not taken|no last sequence|empty document"):
        _answered(3, said)


@given(JSON)
def test_whatever_comes_is_an_answer_or_a_value_error(value):
    try:
        said = orjson.dumps(value)
    except TypeError:  # numbers that JSON doesn't have
        return
    with contextlib.suppress(ValueError):
        assert isinstance(_answered(3, said), ev.LeaseAnswered)
