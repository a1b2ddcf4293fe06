"""Lists and pairs as people write them."""

import pytest

from mesh.sim.study.scenario import listed, paired


def test_a_list_is_split_at_commas() -> None:
    assert listed("round-robin, least-load") == ["round-robin", "least-load"]


def test_pairs_become_a_dict_in_their_order() -> None:
    assert list(paired("us=4,eu=2").items()) == [("us", "4"), ("eu", "2")]  # type: ignore[union-attr]


def test_what_is_no_text_is_left_to_the_field() -> None:
    assert listed(["a"]) == ["a"]
    assert paired({"us": 1}) == {"us": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a,,b", "empty part"), ("", "empty part"), ("a,b,a", "a is named twice")],
)
def test_a_bad_list_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        listed(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("us", "write REGION=NUMBER"), ("us=", "write REGION=NUMBER"), ("us=1,us=2", "us is named")],
)
def test_bad_pairs_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        paired(text)
