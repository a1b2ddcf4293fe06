"""Writes docs/options.md: every key of mesh.toml and every option of every command.

All of it is read from the code: the model of mesh.toml, its JSON Schema and the commands.
`make schemas` runs it; tests/test_options_page.py holds the page to what it writes.
"""

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import click
from pydantic_core import PydanticUndefined

from agents.cli import main as mesh_agent
from docs.topology_schema import document
from infra import auth_table, batch_table, tenant_table, topology
from mesh.cli.main import main as mesh
from mesh.cli.modelled import fields_of
from mesh.core.model.settings import RouterSettings
from schemas import keys, limits, model_table, settings
from schemas.ids import NAME_PATTERN

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "options.md"
HEAD = """\
# Every option

Written by `make schemas` from the code; change it there. `mesh config check FILE` names every
mistake in a mesh.toml, with its line.
"""
# Of a key's name: what it counts, from its end. The longest that fits holds.
UNITS = {
    "_kib_per_s": "KiB/s",
    "_mbit_per_s": "Mbit/s",
    "_bytes_max": "bytes",
    "_bytes": "bytes",
    "_mib_max": "MiB",
    "_mib": "MiB",
    "_ms": "ms",
    "_s_max": "s",
    "_s": "s",
    "_minutes": "minutes",
    "_days": "days",
    "_ratio": "0–1",
    "_share": "0–1",
}
TABLES: dict[str, type[settings.Table]] = {
    "[mesh]": topology.MeshTable,
    "[regions.NAME]": topology.RegionTable,
    "[regions.NAME] tls": topology.TlsTable,
    "[[links]]": settings.LinkTable,
    "[routing], [regions.NAME.routing]": settings.RoutingTable,
    '[models."NAME"]': model_table.ModelTable,
    "[tenants.NAME]": tenant_table.TenantTable,
    "[tenants.NAME.limits], [tenants.NAME.key_limits]": limits.LimitsTable,
    "[auth]": auth_table.AuthTable,
    "[auth.jwt]": auth_table.JwtTable,
    "[nats]": topology.NatsLimits,
    "[batch]": batch_table.BatchTable,
}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, "## mesh.toml", "", *_tables(), *_commands()])


def unit_of(name: str) -> str:
    """What a key or option with that name counts; empty where the name does not say."""
    fitting = [end for end in UNITS if f"_{name}".endswith(end)]
    return UNITS[max(fitting, key=len)] if fitting else ""


def _tables() -> Iterator[str]:
    definitions = document()["$defs"]
    for title, table in TABLES.items():
        schema = definitions[table.__name__]
        yield f"### `{title}`\n"
        about = " ".join(schema["description"].partition(": ")[2].split())
        yield f"{about[:1].upper()}{about[1:]}\n"
        yield _row("key", "values", "unit", "default", "meaning")
        yield _row(*["---"] * 5)
        for name, part in schema["properties"].items():
            yield _row(
                f"`{name}`",
                _values(part, definitions),
                unit_of(name),
                _default(table, name),
                part["description"],
            )
        yield ""


_KINDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
}
_PATTERNS = {
    NAME_PATTERN: "name",
    topology.HOST_PORT_PATTERN: "host:port",
    topology.BASE_URL_PATTERN: "URL that ends in /v1",
    topology.ORIGIN_PATTERN: "origin",
    keys.SHA256_PATTERN: "64 hex digits",
    settings.PUSHING_PATTERN: "`blind`, `pending` or `outstanding:N`",
}


def _values(part: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Which values a JSON Schema takes, in words."""
    if reference := part.get("$ref"):
        part = definitions[reference.rpartition("/")[2]]
        if part["type"] == "object":
            return "a table"
    if kinds := part.get("anyOf"):
        return " or ".join(_values(each, definitions) for each in kinds if each != {"type": "null"})
    if choices := part.get("enum"):
        return " or ".join(f'`"{choice}"`' for choice in choices)
    if part["type"] == "array":
        items = part.get("items") or part["prefixItems"][0]
        size = _bounds(part, "minItems", "maxItems")
        return f"list of {size} × {_values(items, definitions)}"
    if part["type"] == "object":
        values = part.get("additionalProperties", {})
        if values.get("type") == "number":
            return f"table: model → {_values(values, definitions)}"
        return "table: class of requests → text"
    kind = _PATTERNS.get(part.get("pattern", "")) or _KINDS[part["type"]]
    size = _bounds(part, "minLength", "maxLength")
    limits = [size and f"{size} characters", _range(part)]
    return ", ".join([kind, *filter(None, limits)])


def _range(part: dict[str, Any]) -> str:
    if "exclusiveMinimum" in part:
        low = f"more than {_plain(part['exclusiveMinimum'])}"
        return f"{low}, at most {_plain(part['maximum'])}" if "maximum" in part else low
    return _bounds(part, "minimum", "maximum")


def _bounds(part: dict[str, Any], low: str, high: str) -> str:
    if low in part and high in part:
        least, most = part[low], part[high]
        return f"{_plain(least)}" if least == most else f"{_plain(least)} to {_plain(most)}"
    if low in part:
        return f"{_plain(part[low])} or more"
    return f"at most {_plain(part[high])}" if high in part else ""


def _plain(number: float) -> str:
    return f"{number:.0f}" if float(number).is_integer() else f"{number:g}"


def routing_defaults() -> dict[str, Any]:
    """What routers do where no table says: keys of `[routing]` are the operator's choices only."""
    own = RouterSettings()
    goal_s = own.own_ttft_goal_s
    return {
        "policy": own.policy,
        "pushing": str(own.pushing),
        "topology": settings.RoutingScope.MESH.value,
        "hops_max": own.hops_max,
        "queue_delay_s_max": own.queue_delay_s_max,
        "own_ttft_goal_ms": None if goal_s is None else goal_s * 1000,
        "gossip_kib_per_s": own.trie_bytes_per_s / 1024,
    }


def _default(table: type[settings.Table], name: str) -> str:
    field = fields_of(table)[name]
    if field.is_required():
        return "required"
    [about] = [part for part in field.metadata if isinstance(part, settings.Option)]
    value = field.get_default(call_default_factory=True)
    if isinstance(value, settings.Table) or value in (None, (), {}):
        is_routing = table is settings.RoutingTable
        return _shown(routing_defaults().get(name)) if is_routing else about.default
    return _shown(value)


def _shown(value: object) -> str:
    """A default as mesh.toml or a command line would have it."""
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int):
        return _plain(value)
    if isinstance(value, tuple | list):
        return ", ".join(f"`{each}`" for each in value)
    if isinstance(value, Path):
        value = value.relative_to(ROOT) if value.is_relative_to(ROOT) else value
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _commands() -> Iterator[str]:
    for name, group in (("mesh", mesh), ("mesh-agent", mesh_agent)):
        yield f"## {name}\n"
        yield from _command([name], group)


def _command(words: list[str], command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _command([*words, name], found)
        return
    yield f"### `{' '.join(words)}`\n"
    options = [each for each in command.params if not getattr(each, "hidden", False)]
    if not options:
        return
    yield _row("option", "environment", "values", "unit", "default", "meaning")
    yield _row(*["---"] * 6)
    yield from (_option(each, click.Context(command)) for each in options)
    yield ""


def _option(option: click.Parameter, context: click.Context) -> str:
    about = option.to_info_dict()
    text = about.get("help") or ""
    written = re.findall(r"\s*\[default: (.+?)\]", text)
    for note in (r"\s*\[default: .+?\]", r"\s*\[env \w+\]"):
        text = re.sub(note, "", text)
    shown = getattr(option, "show_default", None)
    given = about["default"]
    if about["required"]:
        default = "required"
    elif isinstance(shown, str):
        default = shown.strip("()")
    else:
        default = written[0] if written else "" if about.get("is_flag") else _given(given)
    names = "`, `".join([*option.opts, *option.secondary_opts])
    if isinstance(option, click.Argument):
        names = option.make_metavar(context)
    variables = [about["envvar"]] if isinstance(about.get("envvar"), str) else about.get("envvar")
    return _row(
        f"`{names}`",
        ", ".join(f"`{variable}`" for variable in variables or ()),
        _taken(about, option, context),
        unit_of(option.name or ""),
        default,
        text,
    )


def _given(value: object) -> str:
    return (
        _shown(value) if isinstance(value, str | int | float | tuple | list | Path | Enum) else ""
    )


def _taken(about: dict[str, Any], option: click.Parameter, context: click.Context) -> str:
    """Which values an option takes."""
    if about.get("is_flag"):
        return "flag"
    kind = about["type"]
    if choices := kind.get("choices"):
        found = " or ".join(f"`{getattr(each, 'value', each)}`" for each in choices)
    elif "min" in kind:
        low = "exclusiveMinimum" if kind.get("min_open") else "minimum"
        part = {low: kind["min"], "maximum": kind["max"]}
        limits = _range({key: value for key, value in part.items() if value is not None})
        found = ", ".join(filter(None, [kind["name"].removesuffix(" range"), limits]))
    else:
        found = f"`{option.make_metavar(context)}`"
    return f"{found}; repeatable" if about.get("multiple") else found


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    FILE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
