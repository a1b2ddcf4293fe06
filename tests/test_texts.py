"""What the texts say of the code is held to the code: commands, subjects, libraries, versions."""

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from agents.cli import main as mesh_agent
from mesh.cli.main import main as mesh
from schemas.catalog import CHANNELS, Channel, Role
from schemas.http import ROUTES

ROOT = Path(__file__).parents[1]
NOT_OURS = {".venv", "build", "data"}
TEXTS = sorted(path for path in ROOT.rglob("*.md") if not NOT_OURS & set(path.parts))
COMMANDS: dict[str, click.Group] = {"mesh": mesh, "mesh-agent": mesh_agent}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
README = (ROOT / "README.md").read_text()


def code_lines(text: str) -> Iterator[str]:
    """The lines of every code block, with continued lines joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def invocations(text: str) -> Iterator[list[str]]:
    """Every `mesh …` or `mesh-agent …` in code blocks and in code inside sentences."""
    spans = re.findall(
        r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    for line in [*code_lines(text), *spans]:
        words = line.split(" #")[0].split()
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and Path(words[0]).name in COMMANDS:
            yield [Path(words[0]).name, *words[1:]]


FOUND = [(path, words) for path in TEXTS for words in invocations(path.read_text())]


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The click command that the words call, and the words that are left for it."""
    command: click.Command = COMMANDS[words[0]]
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"no command {rest[0]!r} in {' '.join(words)}"
        command, rest = found, rest[1:]
    return command, rest


@pytest.mark.parametrize(
    ("path", "words"), FOUND, ids=[f"{path.name}:{' '.join(words)[:60]}" for path, words in FOUND]
)
def test_every_command_that_a_text_shows_exists(path, words):
    command, rest = resolve(words)
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    shown = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert shown <= known | {"--help", "--version"}, path


def test_the_texts_show_commands_at_all():
    assert {words[0] for _, words in FOUND} == set(COMMANDS)


@pytest.mark.parametrize("group", COMMANDS.values(), ids=COMMANDS)
def test_every_subcommand_can_be_loaded_and_is_in_the_readme(group):
    for name in group.list_commands(click.Context(group)):
        assert group.get_command(click.Context(group), name) is not None
        assert (
            f"{group.name or next(k for k, v in COMMANDS.items() if v is group)} {name}" in README
        )


def row(channel: Channel) -> str:
    """The channel as ARCHITECTURE shows it."""
    template = channel.template.replace("{", "<").replace("}", ">")
    queue = f", queue `{channel.queue}`" if channel.queue else ""
    roles = [", ".join(r.replace("_", " ") for r in Role if r in said)
             for said in (channel.publish, channel.subscribe)]  # fmt: skip
    return f"| `{template}` | {channel.carrier}{queue} | {roles[0]} → {roles[1]} |"


def test_architecture_shows_every_channel_as_the_catalog_has_it():
    missing = [row(channel) for channel in CHANNELS if row(channel) not in ARCHITECTURE]
    assert not missing, "put these rows into the table of subjects:\n" + "\n".join(missing)


def test_architecture_shows_no_channel_that_is_not_in_the_catalog():
    shown = re.findall(r"^\| `(?:mesh|_INBOX)\.", ARCHITECTURE, re.MULTILINE)
    assert len(shown) == len(CHANNELS)


def dependencies() -> list[str]:
    listed = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    return sorted({re.split(r"[<>=~!\[; ]", entry)[0] for entry in listed})


@pytest.mark.parametrize("library", dependencies())
def test_architecture_says_why_each_library_is_there(library):
    libraries = ARCHITECTURE.split("## Libraries")[1].split("\n## ")[0]
    assert f"`{library}`" in libraries


def test_the_changelog_opens_with_the_wire_policy_and_knows_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert headings[0] == "Wire compatibility"
    assert headings[1].split(" ")[0] == PROJECT["project"]["version"]


def test_the_readme_shows_every_path_of_the_http_face():
    assert [route.path for route in ROUTES if f"`{route.method} {route.path}`" not in README] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_in_texts_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {name for line in code_lines(path.read_text()) if (name := _make_target(line))}
    assert shown <= targets


def _make_target(line: str) -> str | None:
    match = re.search(r"(?:^|\s)make ([a-z-]+)\b", line.split("#")[0])
    return match[1] if match else None


@pytest.mark.parametrize("module", ["schemas.build", "infra.topology_schema"])
def test_modules_that_make_schemas_runs_exist(module):
    assert module in (ROOT / "Makefile").read_text()
    assert importlib.util.find_spec(module) is not None
