import stat

import pytest

from infra.nats.secret_files import write_private


def test_a_readable_file_becomes_private(tmp_path):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folders_are_made_on_the_way(tmp_path):
    write_private(tmp_path / "a" / "b" / "secret", "text")
    assert (tmp_path / "a" / "b" / "secret").read_text() == "text"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "secret"
    write_private(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half of it \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
