"""docs/options.md is what the code says: every key of mesh.toml, every option of every command."""

import re
from collections.abc import Iterator

import click
import pytest

from agents.cli import main as mesh_agent
from docs import options
from infra.topology import Topology
from mesh.cli.main import main as mesh
from schemas.settings import RoutingTable

PAGE = options.FILE.read_text()


def test_the_committed_page_is_what_the_code_writes():
    assert options.page() == PAGE, "run make schemas"


def test_writing_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "FILE", tmp_path / "options.md")
    options.main()
    assert (tmp_path / "options.md").read_text() == PAGE


def leaves(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield words, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from leaves(f"{words} {name}", command.get_command(context, name))


COMMANDS = dict([*leaves("mesh", mesh), *leaves("mesh-agent", mesh_agent)])


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_of_a_command_is_in_its_table(words: str):
    section = PAGE.partition(f"### `{words}`\n")[2].partition("\n### ")[0]
    for option in COMMANDS[words].params:
        is_argument = isinstance(option, click.Argument)
        name = option.human_readable_name if is_argument else option.opts[0]
        [row] = [line for line in section.splitlines() if re.match(rf"\| `\[?{name}[`\]]", line)]
        assert (option.envvar or "") in row, row
        assert is_argument or row.split("|")[-2].strip(), "an option without a help text"


@pytest.mark.parametrize("words", COMMANDS)
def test_a_choice_is_taken_as_it_is_written(words: str):
    context = click.Context(COMMANDS[words])
    for option in COMMANDS[words].params:
        if isinstance(option.type, click.Choice):
            for choice in option.type.choices:  # of an enumeration click takes the names
                assert option.type.convert(str(choice), option, context) == choice


def test_every_table_and_key_of_mesh_toml_is_there_and_says_what_it_means():
    assert set(options.TABLES.values()) >= {
        kind for kind in tables_of(Topology) if kind is not Topology
    }
    shown = PAGE.partition("## mesh.toml")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(table.model_fields) for table in options.TABLES.values())
    assert [row for row in rows if len(row) != 5 or not row[1].strip() or row[4] == " |"] == []


def tables_of(model: type) -> set[type]:
    """The model and every table that its fields hold."""
    found = {model}
    for field in model.model_fields.values():
        text = repr(field.annotation)
        for table in options.TABLES.values():
            if table.__name__ in text and table not in found:
                found |= tables_of(table)
    return found


def test_the_defaults_of_routing_are_the_routers_own():
    """Each key that an operator may leave out has what holds then, or has none."""
    names = {*RoutingTable.model_fields} - {"policy_by_priority"}
    assert names <= set(options.routing_defaults())


@pytest.mark.parametrize(
    ("name", "unit"),
    [("rtt_ms", "ms"), ("drain_s", "s"), ("file_mib_max", "MiB"), ("workers", ""),
     ("gossip_kib_per_s", "KiB/s"), ("record_bytes_max", "bytes"), ("jobs_days", "days")],
)  # fmt: skip
def test_a_name_says_its_unit(name: str, unit: str):
    assert options.unit_of(name) == unit
