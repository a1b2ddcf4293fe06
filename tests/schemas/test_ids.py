import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import NameInvalid, checked_name, is_request_id
from tests.schemas.strategies import NAMES


@pytest.mark.parametrize("name", ["us", "us-0", "a", "0", "x" * 32])
def test_a_legal_name_is_returned(name):
    assert checked_name("region", name) == name


@pytest.mark.parametrize(
    "name", ["", "US", "a.b", "-a", "a-", "a b", "*", ">", "ü", "us\n", "x" * 33]
)
def test_any_other_name_is_an_error_with_what_is_allowed(name):
    with pytest.raises(NameInvalid, match=r"replica name .* lower-case letters"):
        checked_name("replica", name)


@given(NAMES)
def test_every_name_of_the_pattern_is_legal(name):
    assert checked_name("router", name) == name


@pytest.mark.parametrize(
    ("text", "kept"),
    [("req-1:a.b_C", True), ("", False), ("a b", False), ("a\n", False), ("x" * 129, False)],
)
def test_a_clients_request_id_is_kept_only_if_it_is_harmless(text, kept):
    assert is_request_id(text) is kept


@given(st.text())
def test_a_kept_request_id_fits_one_header_line(text):
    if is_request_id(text):
        assert text.isascii() and text.isprintable() and " " not in text
