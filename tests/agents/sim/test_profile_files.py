"""Profiles by name and from files."""

import json

import pytest

from agents.sim.profile_files import ProfileInvalid, find_profile
from agents.sim.profiles import PROFILES
from tests.agents.core.test_engine_curves import FILE


def test_a_profile_is_found_by_name_or_in_a_measured_or_written_file(tmp_path):
    assert find_profile("l4-llama3.1-8b") is PROFILES["l4-llama3.1-8b"]
    measured = tmp_path / "us-0.json"
    measured.write_text(json.dumps(FILE))
    found = find_profile(str(measured))
    assert (found.name, found.model, found.max_seqs) == ("us-0", "m", 8)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none", None, "no profile .none.: use l4-.*or a .json or .toml file"),
        ("none.json", None, "none.json can't be read: No such file"),
        ("bad.json", "{}", "bad.json: engine: .*mesh-agent profile --calibrate"),
        ("bad.toml", "nam = 1", "bad.toml: unknown nam"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_remedy(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    place = name if "." not in name else str(tmp_path / name)
    with pytest.raises(ProfileInvalid, match=says):
        find_profile(place)
