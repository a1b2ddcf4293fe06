"""The model's name in a form is replaced, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.http.form_parts import FormInvalid, form_model, model_place
from mesh.session.body_model import with_model

BOUNDARY = "----b"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"
NAMES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1)


def form(*parts):
    written = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        % (BOUNDARY.encode(), name, value)
        for name, value in parts
    )
    return written + f"--{BOUNDARY}--\r\n".encode()


@given(NAMES, st.binary(max_size=60), NAMES, st.booleans())
def test_the_form_differs_in_its_models_name_alone(model, file, other, first):
    if b"--" in file:
        return
    parts = [(b"file", file), (b"model", model.encode())]
    body = form(*(reversed(parts) if first else parts))
    place = model_place(body, TYPE)
    assert place is not None
    changed, now = with_model(body, place, other)
    assert form_model(TYPE, changed) == other
    assert (changed[: now.start], changed[now.end :]) == (body[: place.start], body[place.end :])


def test_a_broken_form_has_no_model():
    with pytest.raises(FormInvalid):
        form_model(TYPE, form((b"model", b"a"))[:-9])
