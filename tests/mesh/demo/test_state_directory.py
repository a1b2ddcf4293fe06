import os
import stat

import pytest

from mesh.demo.state_directory import StateDirectory, StateInUse, write_atomically


def test_two_demos_can_not_hold_one_directory(tmp_path):
    state = StateDirectory(tmp_path / ".mesh")
    in_use = pytest.raises(StateInUse, match=rf"process {os.getpid()}\).*--state")
    with state.held(), in_use, StateDirectory(state.path).held():
        pass
    with StateDirectory(state.path).held():
        pass


def test_checking_that_it_is_free_does_not_create_it(tmp_path):
    state = StateDirectory(tmp_path / ".mesh")
    state.require_free()
    assert not state.path.exists()
    with state.held(), pytest.raises(StateInUse):
        state.require_free()
    state.require_free()


def test_what_an_earlier_demo_left_is_stale_but_no_obstacle(tmp_path):
    state = StateDirectory(tmp_path)
    (tmp_path / "lock").write_text("999999999\n")
    state.running.write_text("{}")
    for left in (state.logs / "agent-us-9.log", state.run / "agent-us-9.json"):
        left.parent.mkdir()
        left.write_text("of a replica that there was")
    with state.held():
        assert list(state.logs.iterdir()) == list(state.run.iterdir()) == []
        assert not state.running.exists()
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE(state.config.stat().st_mode) == 0o700


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def _open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_open_umask")
def test_only_its_owner_can_read_it_whatever_the_umask(tmp_path):
    state = StateDirectory(tmp_path / "new" / ".mesh")
    with state.held():
        write_atomically(state.running, b"{}")
        assert mode(state.running) == mode(state.path / "lock") == 0o600
        for directory in (state.path, state.config, state.logs, state.run, state.jetstream):
            assert mode(directory) == 0o700


@pytest.mark.usefixtures("_open_umask")
def test_modes_that_an_earlier_version_left_open_are_tightened(tmp_path):
    state = StateDirectory(tmp_path / ".mesh")
    for directory in (state.path, state.config, state.logs, state.run, state.jetstream):
        directory.mkdir(mode=0o755)
    (state.path / "lock").touch(mode=0o644)
    with state.held():
        assert mode(state.path / "lock") == 0o600
        for directory in (state.path, state.config, state.logs, state.run, state.jetstream):
            assert mode(directory) == 0o700


@pytest.mark.usefixtures("_open_umask")
def test_a_directory_that_was_there_for_others_keeps_its_mode(tmp_path):
    """`--state /tmp` must not lock everybody else out of it."""
    tmp_path.chmod(0o755)
    (tmp_path / "of somebody").touch()
    state = StateDirectory(tmp_path)
    with state.held():
        assert mode(tmp_path) == 0o755
        assert mode(state.config) == 0o700


def test_a_file_is_replaced_whole(tmp_path):
    target = tmp_path / "mesh.json"
    write_atomically(target, b"first, longer")
    write_atomically(target, b"second")
    assert target.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [target]
