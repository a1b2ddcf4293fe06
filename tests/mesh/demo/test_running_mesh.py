"""What a running demo says of itself is read, and what says nothing changes nothing."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from infra.topology import DEFAULT_FILE, SERVER_KEYS, load
from mesh.cli.main import main
from mesh.demo.state_directory import RunningMesh, read_running_mesh

KEYS = ("nats", "leaf", "cluster")


@pytest.fixture
def state(tmp_path):
    (tmp_path / "config").mkdir()
    return tmp_path


def test_what_runs_of_a_region_overrides_the_file(state):
    us = {"replicas": ["us-0", "us-1"], "workers": 3, "endpoint": "http://127.0.0.1:1"}
    three = {key: [f"127.0.0.1:{port}{n}" for n in range(3)] for port, key in enumerate(KEYS, 81)}
    us["servers"] = three | {"monitor": []}
    said = {"config": str(DEFAULT_FILE), "regions": {"us": us, "mars": us}}
    said |= {"pid": 1, "processes": {"nats-us": 2}}
    (state / "mesh.json").write_text(json.dumps(said))
    running = read_running_mesh(state / "config")
    assert running.config == DEFAULT_FILE
    known, found = load(DEFAULT_FILE), running.fitted(load(DEFAULT_FILE))
    assert running.processes == {"nats-us": 2}
    assert (found.regions["us"].replicas, found.regions["us"].workers) == (("us-0", "us-1"), 3)
    assert found.regions["us"].http == known.regions["us"].http
    assert [str(one.cluster) for one in found.regions["us"].servers] == three["cluster"]
    assert dict(found.regions["us"]) == dict(known.regions["us"]) | {
        key: getattr(found.regions["us"], key) for key in ("replicas", "workers", *SERVER_KEYS)
    }
    assert found.regions["eu"] == known.regions["eu"]
    assert found.regions.keys() == known.regions.keys()


def test_a_reused_process_id_is_not_listed():
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as ours:
        ids = {"nats-eu": ours.pid, "nats-us": os.getpid(), "nats-ap": 2**30}
        running = RunningMesh(pid=os.getpid(), config=DEFAULT_FILE, regions={}, processes=ids)
        assert running.children() == {"nats-eu": ours.pid}
        assert running.model_copy(update={"pid": 2**30}).children() == {}
        ours.communicate()
    assert running.children() == {}


def test_programs_that_the_preloaded_process_forked_run_too():
    """So what hangs is not said to be down."""
    forks = "import os, sys; os.write(1, b'%d\\n' % os.fork()); sys.stdin.read()"
    command = [sys.executable, "-c", forks]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as preloaded:
        first, second = (int(preloaded.stdout.readline()) for _ in range(2))
        ids = {"router-us-r1": first or second}
        running = RunningMesh(pid=os.getpid(), config=DEFAULT_FILE, regions={}, processes=ids)
        assert running.children() == ids
        preloaded.stdin.close()


@pytest.mark.parametrize("text", [None, "", "[]", '{"regions": 3}', '{"config": "x"}'])
def test_without_a_valid_record_no_demo_runs(state, text):
    if text is not None:
        (state / "mesh.json").write_text(text)
    assert read_running_mesh(state / "config") is None


def test_other_credentials_belong_to_no_demo(state):
    said = {"pid": 1, "config": str(DEFAULT_FILE), "regions": {}}
    (state / "mesh.json").write_text(json.dumps(said))
    assert read_running_mesh(state / "config") is not None
    assert read_running_mesh(state / "rendered") is None


@pytest.mark.parametrize("words", [("keys", "create", "--tenant", "acme"), ("doctor",)])
def test_beside_a_demo_that_is_not_up_no_other_mesh_is_meant(state, words):
    (state / "lock").touch()
    words = (*words, "--credentials", str(state / "config"))
    told = CliRunner().invoke(main, words)
    assert (told.exit_code, told.stdout) == (2, "")
    assert f"the `mesh up` of {state} is not up" in told.stderr and "[auth]" not in told.stderr
    told = CliRunner().invoke(main, (*words, "--config", str(DEFAULT_FILE)))
    assert told.exit_code == 2 and "no credentials of us" in told.stderr
