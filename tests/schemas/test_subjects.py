import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas import subjects
from schemas.catalog import CHANNELS
from schemas.headers import MODEL_TOKEN_PATTERN
from tests.schemas.strategies import MODELS, NAMES

LEGAL_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
STREAMS = st.integers(0, 2**32).map(str)


@given(MODELS)
def test_a_model_name_comes_back_from_its_token(model):
    token = subjects.encode_model(model)
    assert subjects.decode_model(token) == model
    assert LEGAL_TOKEN.fullmatch(token) and re.fullmatch(MODEL_TOKEN_PATTERN, token)


@given(MODELS, MODELS)
def test_two_models_never_share_a_token(one, other):
    assume(one != other)
    assert subjects.encode_model(one) != subjects.encode_model(other)


@pytest.mark.parametrize(
    ("model", "token"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama=2FLlama-3=2E1-8B"),
        ("a=b", "a=3Db"),
        ("名", "=E5=90=8D"),
    ],
)
def test_tokens_stay_what_they_are(model, token):
    assert subjects.encode_model(model) == token


def test_an_empty_model_name_has_no_token():
    with pytest.raises(ValueError, match="must not be empty"):
        subjects.encode_model("")


@pytest.mark.parametrize("token", ["", "a.b", "=2f", "=41", "=FF", "a=", "ü", "名"])
def test_a_token_that_no_model_has_is_an_error(token):
    with pytest.raises(ValueError):
        subjects.decode_model(token)


@given(st.text())
def test_any_text_is_a_token_or_a_value_error(text):
    try:
        model = subjects.decode_model(text)
    except ValueError:
        return
    assert subjects.encode_model(model) == text


@given(NAMES, NAMES)
def test_a_label_comes_back_from_its_subject(region, label):
    assert subjects.ingress_label(subjects.ingress_within(region, label)) == label
    assert subjects.ingress_label(subjects.ingress(region)) is None


@given(NAMES, NAMES, STREAMS)
def test_an_inbox_comes_apart_again(region, router, stream):
    subject = subjects.inbox(region, router, stream)
    assert subjects.parse_inbox(subject) == (region, router, stream)
    assert subject.startswith(subjects.inbox_prefix(region, router) + ".")


@given(st.text())
def test_only_an_inbox_comes_apart(text):
    address = subjects.parse_inbox(text)
    assert address is None or subjects.inbox(*address) == text


@given(NAMES, NAMES, NAMES, STREAMS)
def test_the_second_token_of_every_subject_is_its_owner(region, replica, router, stream):
    for row in CHANNELS:
        names = {"replica": replica, "router": router, "stream": stream}
        names |= {"label": router, "asker": replica, "day": stream, "page": stream}
        subject = row.subject(region=region, **names)
        assert subjects.owner(subject) == region, row.name
        assert all(LEGAL_TOKEN.fullmatch(token) for token in subject.split(".")), row.name


@given(NAMES, NAMES)
def test_two_channels_never_share_a_subject(region, name):
    made = [
        row.subject(region=region, replica=name, router=name, stream="1", label=name, asker=name)
        for row in CHANNELS
    ]
    assert len(set(made)) == len(CHANNELS)


@pytest.mark.parametrize("subject", ["$JS.API.INFO", "$SRV.PING", "mesh", "", "other.us.x"])
def test_what_is_not_the_meshs_has_no_owner(subject):
    assert subjects.owner(subject) is None
