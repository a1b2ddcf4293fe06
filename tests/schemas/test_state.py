import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.json_messages import STATE_BYTES_MAX
from schemas.listed_replicas import LISTED_MAX
from schemas.state import (
    CARD_CHARS_MAX,
    CARDS_MAX,
    TERM_MAX,
    Digest,
    Heartbeat,
    Lease,
    ReplicaState,
    decode_digest,
    decode_heartbeat,
    decode_lease,
    encode_state,
    rounded,
)
from schemas.wire import WireError
from tests.schemas.strategies import DIGESTS, HEARTBEATS, JSON

US_1 = {"names": ["us-1"]}
COLUMNS = {
    "wait_s": [0.1],
    "running": [2],
    "kv_free_tokens": [None],
    "prefill_s_per_token": [1e-4],
    "prefill_base_s": [None],
}
HEARTBEAT = Heartbeat(
    region="us",
    replica="us-0",
    epoch=1,
    seq=2,
    state=ReplicaState.READY,
    engine="vllm",
    models=("m",),
    full=False,
    pending=None,
    running=0,
    outstanding=0,
)


def changed(**values):
    return orjson.dumps(orjson.loads(encode_state(HEARTBEAT)) | values)


@given(HEARTBEATS)
def test_a_heartbeat_comes_back_from_its_json(heartbeat):
    assert decode_heartbeat(encode_state(heartbeat)) == heartbeat


@given(DIGESTS)
def test_a_digest_comes_back_from_its_json(digest):
    assert decode_digest(encode_state(digest)) == digest


@given(st.binary(max_size=200))
@example(b"")
@example(b"[" * 100_000)
@example(b'{"v":1}')
@example(b"\xff\xfe")
@example(b"null")
def test_any_bytes_are_state_or_a_wire_error(data):
    for decode in (decode_heartbeat, decode_digest):
        with pytest.raises(WireError):
            decode(data)


@given(st.sampled_from([(Heartbeat, decode_heartbeat), (Digest, decode_digest)]), st.data())
def test_any_value_in_any_field_is_state_or_a_wire_error(kind, data):
    cls, decode = kind
    good = data.draw(HEARTBEATS if cls is Heartbeat else DIGESTS)
    fields = orjson.loads(encode_state(good))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    try:
        read = decode(orjson.dumps(fields))
    except WireError:
        return
    assert decode(encode_state(read)) == read  # what is read can be passed on


def test_a_signal_that_is_missing_stays_missing():
    fields = orjson.loads(encode_state(HEARTBEAT))
    assert fields["pending"] is None and fields["kv_used_ratio"] is None
    assert decode_heartbeat(encode_state(HEARTBEAT)).pending is None


def test_unknown_fields_are_ignored():
    assert decode_heartbeat(changed(extra=[1])) == HEARTBEAT


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"v": 2}, "v: Input should be 1"),
        ({"region": "US"}, "region: String should match"),
        ({"region": "us\n"}, "region: String should match"),
        ({"state": "fine"}, "state: Input should be 'starting'"),
        ({"pending": -1}, "pending: Input should be greater"),
        ({"batch_occupancy": 1.5}, "batch_occupancy: Input should be less"),
        ({"epoch": 2**64 - 1}, "epoch: Input should be less"),
        ({"models": [""]}, "models.0: String should have at least 1"),
        ({"models": ["x" * 257]}, "models.0: String should have at most 256"),
        ({"taken": {"R1": 1}}, "taken.R1"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(wrong, problem):
    with pytest.raises(WireError, match=problem):
        decode_heartbeat(changed(**wrong))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_errors(number):
    text = changed(prefill_s_per_token=0).replace(
        b'"prefill_s_per_token":0', f'"prefill_s_per_token":{number}'.encode()
    )
    with pytest.raises(WireError, match="prefill_s_per_token"):
        decode_heartbeat(text)


def test_state_over_the_limit_is_not_even_parsed():
    with pytest.raises(WireError, match="at most"):
        decode_heartbeat(b" " * (STATE_BYTES_MAX + 1))


def test_a_term_beyond_all_terms_is_no_term():
    assert decode_heartbeat(changed(term=TERM_MAX)).term == TERM_MAX
    lease = Lease(region="us", owner="us", router="r1", term=TERM_MAX + 1, lease_s=1.0)
    for decode, data in (
        (decode_heartbeat, changed(term=TERM_MAX + 1)),
        (decode_lease, encode_state(lease)),
    ):
        with pytest.raises(WireError, match=r"^term: "):
            decode(data)


CARDED = Digest(
    region="us",
    router="r1",
    epoch=1,
    seq=1,
    accepting=True,
    replicas_ready=0,
    replicas_free=0,
    queue=0,
    models={},
    requests_per_s=0.0,
)


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (1.55e-19, 0.0),
        (-1.55e-19, 0.0),
        (0.045054478000110976, 0.04505),
        (2.00049e-05, 2e-05),
        (123456.7, 123500.0),
        (0.0, 0.0),
        (1.0, 1.0),
        (None, None),
        (float("inf"), float("inf")),
    ],
)
def test_measured_values_are_rounded(measured, shown):
    assert rounded(measured) == shown


@given(st.floats(1e-9, 1e12))
def test_rounding_moves_a_value_by_less_than_a_tenth_of_a_percent(measured):
    assert rounded(measured) == pytest.approx(measured, rel=5.1e-4)
    assert rounded(rounded(measured)) == rounded(measured)


@pytest.mark.parametrize(
    ("good", "decode"), [(HEARTBEAT, decode_heartbeat), (CARDED, decode_digest)]
)
@pytest.mark.parametrize(
    "cards",
    [
        {f"m{number}": {} for number in range(CARDS_MAX + 1)},
        {"m": {"root": "x" * (CARD_CHARS_MAX + 1)}},
        {"m": {"max_model_len": -1}},
        {"m": {"created": 2**63}},
        {"": {}},
    ],
)
def test_what_is_claimed_of_models_has_bounds(good, decode, cards):
    plain = orjson.loads(encode_state(good))
    assert decode(orjson.dumps(plain | {"cards": {"m": {"root": "x", "new": 1}}})).cards
    with pytest.raises(WireError, match="cards"):
        decode(orjson.dumps(plain | {"cards": cards}))


@pytest.mark.parametrize(
    "replicas",
    [
        {"names": ["us-1"]},  # columns differ in length
        {"names": ["us 1"], **COLUMNS},
        {"names": ["a/b/c"], **COLUMNS},
        {"names": ["us-1"], **(COLUMNS | {"wait_s": [-1.0]})},
        {"names": ["us-1"], **(COLUMNS | {"wait_s": [None]})},
        {name: [*values] * (LISTED_MAX + 1) for name, values in (COLUMNS | US_1).items()},
    ],
)
def test_the_replicas_that_a_region_lists_have_bounds(replicas):
    plain = orjson.loads(encode_state(CARDED))
    listed = decode_digest(orjson.dumps(plain | {"replicas": COLUMNS | US_1 | {"new": 1}})).replicas
    assert listed.names == ("us-1",)
    with pytest.raises(WireError, match="replicas"):
        decode_digest(orjson.dumps(plain | {"replicas": replicas}))


@pytest.mark.parametrize("places", [[LISTED_MAX], [-1], [0] * (LISTED_MAX + 1)])
def test_a_place_in_the_list_has_bounds(places):
    plain = orjson.loads(encode_state(CARDED))
    models = {"m": {"ready": 1, "free": 1, "listed": places}}
    with pytest.raises(WireError, match="listed"):
        decode_digest(orjson.dumps(plain | {"models": models}))
