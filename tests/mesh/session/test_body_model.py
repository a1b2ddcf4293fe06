"""The model's name in a body is replaced, and nothing else is."""

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mesh.session.body_model import KEYS_MAX, model_in_json, with_model

KEYS = st.sampled_from(
    ["model", "mod\u0065l", 'a"model', "model\\", "\\", "x", "messages", 'model":']
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | KEYS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def bodies(draw):
    """A body with one model of its own: written with and without spaces and escapes."""
    fields = draw(st.dictionaries(KEYS, VALUES, max_size=5))
    fields.pop("model", None)
    before = draw(st.integers(0, len(fields)))
    items = [*fields.items()]
    items.insert(before, ("model", draw(st.text(min_size=1, max_size=8))))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")]))
    text = json.dumps(dict(items), separators=separators, ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        text = text.replace('"model"', '"\\u006dod\\u0065l"')
    return text.encode("utf-8", "surrogatepass")


@given(bodies(), st.text(min_size=1, max_size=30))
@example(b'{"model":"\\\\"}', "m")
def test_the_body_differs_in_its_models_name_alone(body, model):
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:  # a lone surrogate
        return
    try:
        model.encode()
    except UnicodeEncodeError:
        return
    place = model_in_json(body)
    assert place is not None
    assert orjson.loads(body[place.start : place.end]) == fields["model"]
    changed, now = with_model(body, place, model)
    assert orjson.loads(changed) == fields | {"model": model}
    assert (changed[: now.start], changed[now.end :]) == (body[: place.start], body[place.end :])
    again, _ = with_model(changed, now, fields["model"])
    assert orjson.loads(again) == fields


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","x":[1],"\\u006dodel":"b"}',
        b'{"x":1,"model":7}',
        b'{"x":{"model":"a"}, "y":{"model":"b"}}',
        b'{"model":"a","x":[' + b'{"model":1},' * KEYS_MAX + b"1]}",
    ],
)
def test_a_model_that_is_there_twice_or_is_no_text_is_not_found(body):
    assert model_in_json(body) is None


def test_models_within_and_in_texts_are_not_the_bodys_own():
    inner = (
        b'{"m":"\\"model\\":","a\\"model":1,"t":[{"model":"x"},{"y":{"model":"z"}}],"model": "a"}'
    )
    place = model_in_json(inner)
    assert place is not None and inner[place.start : place.end] == b'"a"'
