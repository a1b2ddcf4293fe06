"""Records of API keys: read whatever they hold, and joined in any order."""

from contextlib import suppress
from dataclasses import replace
from itertools import permutations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.keys import (
    KEYS_MAX,
    KeyRecord,
    RegionKeys,
    Scope,
    decode_keys,
    encode_keys,
    joined,
    no_keys,
)
from schemas.wire import WireError


def key(name: str, **fields) -> KeyRecord:
    made = {"sha256": name * 64, "tenant": "acme", "scopes": (Scope.INFERENCE,)}
    return KeyRecord(id=name, **made | {"created_at_unix_s": 1.0} | fields)


MOMENTS = st.none() | st.floats(0.0, 9.0)
KEYS = st.builds(key, st.sampled_from("abc"), expires_at_unix_s=MOMENTS, revoked_at_unix_s=MOMENTS)
RECORDS = st.lists(KEYS, max_size=4)


@given(st.lists(RECORDS, max_size=3))
def test_records_join_to_the_same_in_any_order_and_however_often(records):
    one = joined(*records)
    assert all(joined(*other) == one for other in permutations(records))
    assert joined(one, *records, one) == one
    for record in records:
        for before in record:
            [now] = [each for each in one if each.id == before.id]
            assert now.ends_at_unix_s <= before.ends_at_unix_s, "no key gets better"


def test_a_record_is_read_as_it_was_written():
    limited = key("b", origin="us", models=("tiny",), scopes=(Scope.BATCH, Scope.ADMIN))
    record = RegionKeys(region="us", keys=(key("a"), limited), command="create a", by="a@b")
    assert decode_keys(encode_keys(record)) == record
    later = orjson.loads(encode_keys(record)) | {"new": 1}
    assert decode_keys(orjson.dumps(later)) == record, "fields of a later version are ignored"


def test_a_region_s_keys_all_fit_a_record():
    limits = tuple((name, 1000.0) for name in ("requests_per_minute", "tokens_per_day"))
    keys = tuple(key("a", limits=limits) for _ in range(KEYS_MAX))
    record = RegionKeys(region="us", keys=keys)
    assert decode_keys(encode_keys(record)) == record


GOOD = orjson.loads(encode_keys(replace(no_keys("us"), keys=(key("a"),))))


@pytest.mark.parametrize(
    "changed",
    [
        {"v": 2},
        {"region": "../x"},
        {"keys": GOOD["keys"] * (KEYS_MAX + 1)},
        *(
            {"keys": [GOOD["keys"][0] | one]}
            for one in (
                {"sha256": "short"},
                {"sha256": "A" * 64},
                {"scopes": ["root"]},
                {"scopes": []},
                {"tenant": "a:b"},
                {"id": "a\nb"},
                {"models": ["m"] * 17},
                {"expires_at_unix_s": -1},
                {"expires_at_unix_s": "soon"},
                {"origin": "not a region"},
            )
        ),
    ],
)
def test_what_is_no_record_is_refused(changed):
    with pytest.raises(WireError):
        decode_keys(orjson.dumps(GOOD | changed))


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*GOOD, *GOOD["keys"][0]]), inner, max_size=5),
).map(orjson.dumps))  # fmt: skip
def test_whatever_comes_is_a_record_or_a_wire_error(data):
    with suppress(WireError):
        assert decode_keys(data).region
