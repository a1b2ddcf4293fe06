import json
import stat

import pytest

from infra.nats import secret_files
from infra.nats.secret_files import PasswordsUnreadable


def test_every_user_gets_a_long_password_of_his_own(tmp_path):
    kept = secret_files.keep(tmp_path / "p.json", ["a", "b", "c"])
    assert len(set(kept.values())) == 3
    assert all(len(password) >= 32 for password in kept.values())


def test_two_meshes_share_none(tmp_path):
    one = secret_files.keep(tmp_path / "one.json", ["a"])
    two = secret_files.keep(tmp_path / "two.json", ["a"])
    assert one["a"] != two["a"]


def test_a_new_user_changes_nobody_elses(tmp_path):
    before = secret_files.keep(tmp_path / "p.json", ["a", "b"])
    after = secret_files.keep(tmp_path / "p.json", ["a", "b", "c"])
    assert {user: after[user] for user in before} == before
    assert after["c"] not in before.values()


def test_who_left_and_comes_back_starts_anew(tmp_path):
    before = secret_files.keep(tmp_path / "p.json", ["a", "b"])
    secret_files.keep(tmp_path / "p.json", ["a"])
    assert secret_files.keep(tmp_path / "p.json", ["a", "b"])["b"] != before["b"]


def test_rotate_makes_all_of_them_new(tmp_path):
    before = secret_files.keep(tmp_path / "p.json", ["a", "b"])
    after = secret_files.keep(tmp_path / "p.json", ["a", "b"], rotate=True)
    assert all(after[user] != before[user] for user in before)
    assert secret_files.keep(tmp_path / "p.json", ["a", "b"]) == after


def test_only_the_owner_can_read_the_file(tmp_path):
    secret_files.keep(tmp_path / "p.json", ["a"])
    assert stat.S_IMODE((tmp_path / "p.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps({"v": 2, "passwords": {}}), json.dumps({"v": 1}), "\xff"],
)
def test_a_file_that_is_none_of_ours_is_an_error_and_stays(tmp_path, text: str):
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(PasswordsUnreadable, match="restore it, or remove it"):
        secret_files.keep(path, ["a"])
    assert path.read_text(encoding="latin-1") == text
