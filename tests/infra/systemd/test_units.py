"""The systemd units: systemd itself accepts them, they confine, and they call what there is."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from agents.cli import main as mesh_agent
from infra.nats import bundle
from infra.topology import DEFAULT_FILE, load
from mesh.cli.main import main as mesh
from mesh.cli.unusable import EXIT_BAD_INPUT

UNITS = Path(__file__).parents[3] / "infra" / "systemd"
INSTANCES = {
    "mesh-nats@": "us",
    "mesh-router@": "r1",
    "mesh-batch-runner@": "batch-0",
    "mesh-agent@": "us-0",
}
OURS = [("mesh-router@", mesh), ("mesh-batch-runner@", mesh), ("mesh-agent@", mesh_agent)]
EXPOSURE_MAX = 20  # tenths of systemd's scale from 0 to 10: "OK" ends at 4.0, a plain unit has 9.6
DRAIN_S = 30  # default of `mesh router --drain-s` and `mesh-agent run --drain-timeout`


def systemd_analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


def unit(template: str) -> str:
    return (UNITS / f"{template}.service").read_text().replace("\\\n", " ")


def setting(template: str, key: str) -> str:
    return re.findall(rf"^{key}=(.*)$", unit(template), re.MULTILINE)[0]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, Path]:
    """Each unit under an instance name, with programs that exist here."""
    copies = {}
    for template, instance in INSTANCES.items():
        text = re.sub(r"/opt/mesh/bin/[a-z-]+", "/bin/true", unit(template))
        copies[template] = tmp_path / f"{template}{instance}.service"
        copies[template].write_text(text)
    return copies


def test_every_unit_is_tried_here():
    assert {path.stem for path in UNITS.glob("*.service")} == set(INSTANCES)


@pytest.mark.systemd
def test_systemd_finds_nothing_wrong(installed: dict[str, Path]):
    result = systemd_analyze("verify", "--man=no", *installed.values())
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.systemd
def test_systemd_would_have_found_a_mistake(installed: dict[str, Path]):
    """The check above can fail: an unknown setting is reported."""
    broken = installed["mesh-nats@"]
    broken.write_text(broken.read_text().replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    assert "NoNewPrivilege" in systemd_analyze("verify", "--man=no", broken).stderr


@pytest.mark.systemd
@pytest.mark.parametrize("template", INSTANCES)
def test_a_unit_is_confined(installed: dict[str, Path], template: str):
    result = systemd_analyze(
        "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", installed[template]
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("template", [template for template, _ in OURS])
def test_a_unit_outlasts_its_drain(template: str):
    assert int(setting(template, "TimeoutStopSec")) >= 2 * DRAIN_S


def test_units_that_can_reload_do_it_by_a_signal():
    """A router and a nats-server read their files again; agents and batch runners have nothing to
    take over. `Type=notify-reload` needs systemd 253."""
    able = {name for name in INSTANCES if re.search(r"^ExecReload=", unit(name), re.MULTILINE)}
    assert able == {"mesh-router@", "mesh-nats@"}
    assert {setting(name, "ExecReload") for name in able} == {"/bin/kill -HUP $MAINPID"}
    assert setting("mesh-router@", "Type") == "notify"


@pytest.mark.parametrize(("template", "group"), OURS)
def test_a_unit_calls_a_command_with_options_it_has(template: str, group: click.Group):
    _, name, *arguments = shlex.split(setting(template, "ExecStart"))
    command = group.get_command(click.Context(group), name)
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    used = {argument for argument in arguments if argument.startswith("--")}
    assert used <= known
    required = {p.opts[0] for p in command.params if p.required and not getattr(p, "envvar", None)}
    assert required <= used


ENGINE = "ENGINE_KIND=vllm\nENGINE_URL=http://127.0.0.1:8000\nMESH_ENGINE_KEY=sk-1\n"


@pytest.mark.parametrize(("template", "group"), OURS)
def test_a_unit_gives_its_command_all_that_it_needs(
    tmp_path: Path, template: str, group: click.Group
):
    """The credentials are where they are rendered, and the command reads each of their lines."""
    files = bundle.write(load(DEFAULT_FILE), tmp_path)["us"].credentials
    rendered = {path.name: path for path in files.values()}
    engine = tmp_path / "engine.env"
    engine.write_text(ENGINE)
    _, name, *arguments = shlex.split(setting(template, "ExecStart"))
    loaded = re.findall(r"^LoadCredential=(\w+):(.*)$", unit(template), re.MULTILINE)
    for credential, path in loaded:
        path = Path(path.replace("%i", INSTANCES[template]))
        if path.parent == Path("/etc/mesh/credentials"):
            source = rendered[path.name]
        else:
            assert path == Path("/etc/mesh/agents/us-0.env")
            source = engine
        variable = f"${{CREDENTIALS_DIRECTORY}}/{credential}"
        assert variable in arguments
        arguments = [str(source) if word == variable else word for word in arguments]
    command = group.get_command(click.Context(group), name)
    assert command is not None
    arguments = [word.replace("%i", INSTANCES[template]) for word in arguments]
    given = command.make_context(name, arguments).params
    assert given["region"] == "us"
    assert given["nats_url"].startswith("nats://")


@pytest.mark.parametrize("template", [template for template, _ in OURS])
def test_a_unit_stays_down_after_a_mistake_or_for_a_second_process_of_its_name(template: str):
    assert setting(template, "Restart") == "on-failure"
    assert int(setting(template, "RestartPreventExitStatus")) == EXIT_BAD_INPUT


def test_a_server_that_left_by_itself_is_started_again():
    """In lame duck mode it ends with status 0."""
    assert setting("mesh-nats@", "Restart") == "always"


@pytest.mark.parametrize("template", [template for template, _ in OURS])
def test_a_unit_is_restarted_when_it_hangs_and_keeps_no_core(template: str):
    assert setting(template, "Type") == "notify"
    assert setting(template, "NotifyAccess") == "main"
    assert 0 < int(setting(template, "WatchdogSec")) <= 10
    assert setting(template, "LimitCORE") == "0"


def test_the_server_keeps_its_streams_where_the_unit_lets_it_write(tmp_path: Path):
    written = bundle.write(load(DEFAULT_FILE), tmp_path, state_directory=Path("/var/lib/mesh"))
    config = written["us"].config.read_text()
    writable = "/var/lib/" + setting("mesh-nats@", "StateDirectory").replace("%i", "us")
    assert f'"store_dir": {json.dumps(writable)}' in config


def test_the_user_of_the_units_is_the_one_that_is_made():
    users = (UNITS / "mesh.sysusers.conf").read_text()
    for template in INSTANCES:
        assert f"\nu {setting(template, 'User')} " in users
