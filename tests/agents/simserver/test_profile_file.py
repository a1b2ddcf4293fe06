"""Profiles of one's own."""

from pathlib import Path

import pytest

from agents.sim.profiles import L4_LLAMA
from agents.simserver import command as profile_file
from agents.simserver.command import ProfileInvalid, find_profile


def example() -> str:
    """The example in the module's docstring."""
    return (profile_file.__doc__ or "").split("\n\n", 2)[2]


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return str(path)


def test_a_named_profile():
    assert find_profile("l4-llama3.1-8b") is L4_LLAMA


def test_the_documented_example_is_a_profile(tmp_path):
    profile = find_profile(written(tmp_path, example()))
    assert (profile.name, profile.model) == ("my-gpu", "my/model")
    assert profile.iteration_s(((1000, 1000),), 0, 0) == pytest.approx(0.112)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name", "nmae"), "unknown nmae; known: name, knots"),
        (("kv_tokens = 120000", ""), "kv_tokens: missing"),
        (("kv_tokens = 120000", 'kv_tokens = "many"'), "kv_tokens: "),
        (("token_s = 0.0001", "token_s = 0.0"), "above zero"),
        (("knots = [[0, 0.012]]", "knots = [[0, 0.012]"), "own.toml"),
    ],
)
def test_the_error_of_a_bad_file_names_the_correction(tmp_path, change, message):
    with pytest.raises(ProfileInvalid, match=message):
        find_profile(written(tmp_path, example().replace(*change, 1)))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ProfileInvalid, match=r"l4-llama3\.1-8b, a100-mistral-7b"):
        find_profile("h100")
    with pytest.raises(ProfileInvalid, match="No such file"):
        find_profile("missing.toml")
