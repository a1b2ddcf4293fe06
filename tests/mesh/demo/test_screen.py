import io
import json
import shlex
import subprocess
from collections import Counter
from pathlib import Path

from rich.console import Console

from infra.topology import DEFAULT_FILE, load
from mesh.demo.local_mesh import EngineMissing
from mesh.demo.options import DemoOptions, GivenEngine, fitted
from mesh.demo.screen import Screen, first_request
from mesh.supervisor.program import FileWritten, Program, ProgramKind
from mesh.supervisor.supervisor import ProgramDied, ProgramReady

LOGS = Path("/state/logs")
PROGRAM = Program(
    name="engine-us-0",
    kind=ProgramKind.ENGINE,
    region="us",
    command=("true",),
    ready=FileWritten(Path("/dev/null")),
)


def shown(act, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    act(Screen(console, Counter({ProgramKind.ENGINE: 1}), LOGS))
    return console.file.getvalue()


def test_the_first_request_survives_a_shell_and_names_a_served_model():
    command = first_request(load(DEFAULT_FILE), "o'brien/model-7b")
    words = shlex.split(command)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8101/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "o'brien/model-7b"
    assert body["stream"] is True


def test_the_first_request_goes_to_a_region_with_replicas():
    engines = (GivenEngine("eu", "http://127.0.0.1:1"),)
    options = DemoOptions(config=DEFAULT_FILE, state=Path(), engines=engines)
    only_eu = fitted(load(DEFAULT_FILE), options)
    assert "http://127.0.0.1:8102/" in first_request(only_eu, "m")


def test_every_region_and_its_round_trips_are_shown_and_the_request_is_one_line():
    text = shown(lambda screen: screen.up(load(DEFAULT_FILE), ["m"], took_s=4.2))
    assert "http://127.0.0.1:8103/v1" in text
    assert "round trips: us–eu 80 ms, us–ap 150 ms, eu–ap 220 ms" in text
    assert "ready after 4.2 s" in text
    assert any(line.startswith("curl") and line.endswith("'") for line in text.splitlines())


def test_where_keys_are_required_the_command_that_makes_one_is_shown(tmp_path):
    def text(*more):
        file = tmp_path / "mesh.toml"
        file.write_text("\n".join((DEFAULT_FILE.read_text(), *more)))
        state = tmp_path / "a state"
        return shown(lambda screen: screen.up(load(file), [], 4.2, credentials=state))

    assert "mesh keys" not in text()
    required = ("[auth]", "required = true")
    [line] = [line for line in text(*required).splitlines() if line.startswith("KEY=")]
    made = "mesh keys create --tenant acme --credentials"
    assert line == f"""KEY="$({made} '{tmp_path}/a state')\""""
    listed = text(*required, "[tenants.initech]", f'key_sha256 = ["{"a" * 64}"]')
    assert "--tenant initech " in listed


def test_of_an_encrypted_bus_is_shown_what_the_nats_command_needs(tmp_path):
    state, ca = tmp_path / "a state", tmp_path / "a state" / "ca.pem"
    login = state / "us" / "credentials" / "observer.env"
    login.parent.mkdir(parents=True)
    login.write_text("NATS_USER=observer\n")
    mesh = load(DEFAULT_FILE)
    plain = shown(lambda screen: screen.up(mesh, [], 4.2))
    assert "nats://127.0.0.1:4101" in plain and "NATS_CA" not in plain
    text = shown(lambda screen: screen.up(mesh, [], 4.2, ca=ca, credentials=state))
    assert "tls://127.0.0.1:4101" in text and "nats://" not in text
    [line] = [line for line in text.splitlines() if "NATS_CA" in line]
    told = subprocess.check_output(["sh", "-ec", f"{line}; env"], text=True).splitlines()
    assert {"NATS_USER=observer", f"NATS_CA={ca}"} <= set(told)


def test_a_death_is_shown_with_its_log_and_what_follows():
    log = LOGS / "engine-us-0.log"
    death = ProgramDied(PROGRAM, "was ended by SIGKILL", log, "[bold]last words", restart_in_s=0.5)
    text = shown(lambda screen: screen.report(death))
    assert "engine-us-0 was ended by SIGKILL" in text
    assert "[bold]last words" in text
    assert f"restarting it in 0.5 s; its log: {log}" in text
    assert "engine-us-0 is back" in shown(
        lambda screen: screen.report(ProgramReady(PROGRAM, again=True))
    )


def test_a_nats_server_that_stays_down_is_shown_with_the_command_that_starts_it():
    command = ("/bin/nats-server", "-c", "/a state/config/eu/nats.conf")
    ready = FileWritten(Path("/dev/null"))
    nats = Program(name="nats-eu", kind=ProgramKind.NATS, region="eu", command=command, ready=ready)

    def died(program, restart_in_s):
        def act(screen):
            screen.up(load(DEFAULT_FILE), ["m"], took_s=4.2)
            screen.report(
                ProgramDied(program, "ended with status 1", LOGS / "x.log", "", restart_in_s)
            )

        return shown(act).splitlines()

    *_, what, whose, how = died(nats, None)
    assert what == "  eu is cut off; after mending it, start it by hand"
    assert whose == "  (`mesh up` will not end it):"
    assert tuple(shlex.split(how)) == command
    assert died(nats, 0.5)[-1].endswith("x.log")
    assert died(PROGRAM, None)[-1] == "  after mending it, restart the mesh"


SILENT = EngineMissing(PROGRAM, GivenEngine("us", "http://127.0.0.1:8000"), "no answer, use less")


def test_a_missing_engine_is_shown_with_the_reason_and_its_agent():
    text = shown(lambda screen: screen.report(SILENT))
    assert "engine-us-0: http://127.0.0.1:8000 does not serve yet: no answer, use less" in text
    assert "its agent keeps trying" in text


def test_missing_engines_are_counted_and_named_when_the_rest_is_up():
    text = shown(lambda screen: screen.up(load(DEFAULT_FILE), ["m"], 15.0, [SILENT]))
    assert "3 of 4" in text
    assert "missing: engine-us-0: http://127.0.0.1:8000 does not serve yet: no answer" in text


def test_a_mesh_is_ready_only_if_its_routers_are():
    def up(screen):
        screen.up(load(DEFAULT_FILE), [], 15.0, [SILENT], ["router-us-r1", "router-eu-r1"])

    text = shown(up)
    assert "not ready, for want of an engine: router-us-r1, router-eu-r1" in text
    assert "running after 15.0 s" in text and "ready after" not in text
