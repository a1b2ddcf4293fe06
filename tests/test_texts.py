"""What documents say of the code is held to it: commands, paths, subjects, options, versions."""

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from agents.cli import main as mesh_agent
from docs.picture import draw
from infra import topology
from mesh.cli.main import main as mesh
from mesh.core.policies import POLICIES, Tunable
from schemas.catalog import CHANNELS, Channel, Role
from schemas.routes import ROUTES
from tests.support.pages import ROOT, pages

TEXTS = pages()
COMMANDS: dict[str, click.Group] = {"mesh": mesh, "mesh-agent": mesh_agent}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
CLIENTS = (ROOT / "docs/clients.md").read_text()
LIBRARIES = (ROOT / "docs/libraries.md").read_text()
POLICY_PAGE = (ROOT / "docs/policies.md").read_text()
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
TABLES = sorted((ROOT / "docs/benchmarks").glob("*.md"))
# Of the checkout: what is in code spans of documents and looks like a file or folder of it.
PATH = re.compile(r"`((?:mesh|agents|schemas|infra|tests|docs|dashboards)/[\w./@-]*)`")


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
    """The channel as docs/protocol.md shows it."""
    template = channel.template.replace("{", "<").replace("}", ">")
    queue = f", queue `{channel.queue}`" if channel.queue else ""
    roles = [", ".join(r.replace("_", " ") for r in Role if r in said)
             for said in (channel.publish, channel.subscribe)]  # fmt: skip
    return f"| `{template}` | {channel.carrier}{queue} | {roles[0]} → {roles[1]} |"


def test_the_protocol_shows_every_channel_as_the_catalog_has_it():
    missing = [row(channel) for channel in CHANNELS if row(channel) not in PROTOCOL]
    assert not missing, "put these rows into the table of subjects:\n" + "\n".join(missing)


def test_the_protocol_shows_no_channel_that_is_not_in_the_catalog():
    shown = re.findall(r"^\| `(?:mesh|_INBOX)\.", PROTOCOL, re.MULTILINE)
    assert len(shown) == len(CHANNELS)


def dependencies() -> list[str]:
    listed = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    return sorted({re.split(r"[<>=~!\[; ]", entry)[0] for entry in listed})


def test_a_page_says_why_each_library_is_there():
    assert [library for library in dependencies() if f"`{library}`" not in LIBRARIES] == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_has_each_policy_and_its_options(name):
    maker = POLICIES[name]
    options = fields(maker.options) if isinstance(maker, Tunable) else ()
    assert name in POLICY_PAGE
    assert " / ".join(option.name for option in options) in POLICY_PAGE


def test_the_changelog_opens_with_the_wire_policy_and_knows_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert headings[0] == "Wire compatibility"
    assert headings[1].split(" ")[0] == PROJECT["project"]["version"]


def test_the_pages_for_clients_show_every_path_of_the_http_face():
    pages = CLIENTS + (ROOT / "docs/api.md").read_text()
    assert [route.path for route in ROUTES if f"`{route.method} {route.path}`" not in pages] == []


def anchors(path: Path) -> set[str]:
    """The names by which headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken_links(path: Path) -> Iterator[str]:
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", path.read_text()):
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{path.relative_to(ROOT)}: {target}#{anchor}"


def test_links_between_files_lead_somewhere():
    assert [link for path in TEXTS for link in broken_links(path)] == []


def test_every_path_that_a_document_names_exists():
    named = {(page.name, path) for page in TEXTS for path in PATH.findall(page.read_text())}
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []
    assert len(named) > 50


def test_every_module_that_a_document_runs_exists():
    runs = {name for page in TEXTS for name in re.findall(r"python -m ([\w.]+)", page.read_text())}
    assert [name for name in sorted(runs) if importlib.util.find_spec(name) is None] == []


def test_make_targets_in_texts_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spans = re.compile(r"`make ([a-z-]+)\b")
    shown = {
        name
        for path in TEXTS
        for name in (*map(_make_target, code_lines(path.read_text())),
                     *spans.findall(path.read_text()))
        if name
    }  # fmt: skip
    assert shown <= targets


def _make_target(line: str) -> str | None:
    match = re.search(r"(?:^|\s)make ([a-z-]+)\b", line.split("#")[0])
    return match[1] if match else None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_table_says_what_it_was_measured_with(path):
    head = re.findall(r"^\| (\w+) \| (.+) \|$", path.read_text(), re.MULTILINE)[:4]
    assert [key for key, _ in head] == ["command", "commit", "date", "machine"]
    assert f"docs/benchmarks/{path.name})" in (ROOT / "BENCHMARKS.md").read_text()


def test_the_picture_of_the_mesh_is_what_the_code_draws():
    drawn = draw(topology.load(topology.DEFAULT_FILE))
    assert (ROOT / "docs/mesh.svg").read_text() == drawn, "docs/picture.py > docs/mesh.svg"


def test_the_terminal_shows_the_mesh_that_the_readme_starts():
    """What `docs/screenshot.py` kept: made anew when the regions or their addresses change."""
    shown = (ROOT / "docs/mesh-up.svg").read_text()
    regions = topology.load(topology.DEFAULT_FILE).regions.values()
    assert [region.http for region in regions if f"http://{region.http}/v1" not in shown] == []


@pytest.mark.parametrize("module", ["docs.documents", "docs.topology_schema", "docs.options"])
def test_modules_that_make_schemas_runs_exist(module):
    assert module in (ROOT / "Makefile").read_text()
    assert importlib.util.find_spec(module) is not None
