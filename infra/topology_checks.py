"""What is wrong between the tables of a mesh.toml, and what is right in one that has mistakes.

pydantic checks a table's own values and then stops at the first level that is wrong. So that all
mistakes are named at once, checks across tables run on what is right of a wrong file: a value that
is wrong has its default there, or None, and a check that would draw a conclusion from it is left
out.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from infra.address import Address
from infra.batch_table import BatchTable, batch_problems
from infra.workers import crowd_problems, page_problems
from schemas.ids import RegionId
from schemas.problems import KeyPath, did_you_mean
from schemas.settings import LinkTable, Table

if TYPE_CHECKING:
    from infra.tenant_table import TenantTable
    from infra.topology import RegionTable, Topology

T = TypeVar("T", bound=Table)
_TOML_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_TOML_END = " (at end of document)"
_TOML_ADVICE = {
    "Invalid value": 'a text needs "quotes", a number none',
    "Cannot overwrite a value": "the key is there twice; remove one",
    "Cannot declare": "the table is there twice; join them",
    "Expected '=' after a key": "write key = value; comments begin with #",
    "Expected newline or end of document": "write one key = value on a line",
    "Unescaped": "close the text with a quote",
    "Illegal character": "close the text with a quote",
}


def not_toml(error: Exception, text: str) -> str:
    """What follows a file's name when its text is no TOML: the place and the problem."""
    message = "brackets too deep" if isinstance(error, RecursionError) else str(error)
    advice = next(
        (advice for begin, advice in _TOML_ADVICE.items() if message.startswith(begin)),
        "correct the file there",
    )
    if place := _TOML_PLACE.search(message):
        return f":{place[1]}:{place[2]}: not TOML: {_TOML_PLACE.sub('', message)}; {advice}"
    if message.endswith(_TOML_END):
        problem = message.removesuffix(_TOML_END)
        return f":{text.count(chr(10)) + 1}: not TOML: {problem}; the text ends too early"
    return f": not TOML: {message}; {advice}"


def right_part(table: type[T], raw: object) -> T:
    """The table with the values that are right; of others the defaults, None where it has none."""
    given = raw if isinstance(raw, Mapping) else {}
    values = {}
    for name, field in table.model_fields.items():
        values[name] = None if field.is_required() else field.get_default(call_default_factory=True)
        if name in given:
            try:
                values[name] = _adapter(table, name).validate_python(given[name])
            except ValidationError:
                values[name] = () if isinstance(values[name], tuple) else values[name]
    return table.model_construct(**values)


def right_items(raw: object, name: Any, table: type[T], most: int) -> dict[Any, T]:
    """The tables of right names: those of `[regions]`. None at all where there are too many."""
    if not isinstance(raw, Mapping) or len(raw) > most:
        return {}
    found, names = {}, TypeAdapter[Any](name)
    for key, value in raw.items():
        try:
            checked = names.validate_python(key)
        except ValidationError:
            continue
        if isinstance(value, Mapping):
            found[checked] = right_part(table, value)
    return found


@cache
def _adapter(table: type[Table], name: str) -> TypeAdapter[Any]:
    field = table.model_fields[name]
    kind: Any = field.annotation
    if field.metadata:
        kind = Annotated[kind, *field.metadata]
    return TypeAdapter(kind)


def across_tables(mesh: "Topology", wrong: Iterable[KeyPath]) -> Iterator[str]:
    """Each mistake between tables as `key: what to do`. `wrong`: keys with one of their own."""
    wrong = tuple(wrong)
    regions = mesh.regions
    # A region or link that is no table, or has a wrong name, is missing from `mesh`.
    is_partial = any(
        names[0] in ("regions", "links") and (len(names) <= 2 or names[2:] == ("[key]",))
        for names in wrong
    )
    yield from _shared_addresses(regions)
    yield from _wrong_servers(regions)
    yield from _repeated_names(regions)
    yield from _wrong_workers(regions)
    is_sized = not any(names[0] in ("batch", "nats") for names in wrong)
    yield from _wrong_batch(regions, mesh.nats.jetstream_disk_mib if is_sized else None, mesh.batch)
    if not is_partial and not any("between" in names for names in wrong):
        yield from _wrong_links(regions, mesh.links)
    if not is_partial and not any({"residency", "confined_to"} & set(names) for names in wrong):
        yield from _wrong_residency(regions, mesh.tenants)


def _shared_addresses(regions: Mapping[RegionId, "RegionTable"]) -> Iterator[str]:
    taken: dict[Address, str] = {}
    for name, region in regions.items():
        for key, address in region.addresses():
            here = f"regions.{name}.{key}"
            if address in taken:
                yield f"{here}: {address} is also {taken[address]}; give each its own port"
            taken.setdefault(address, here)


def _wrong_servers(regions: Mapping[RegionId, "RegionTable"]) -> Iterator[str]:
    """Each nats-server has an address of each kind. Where `nats` is wrong, that is reported."""
    for name, region in regions.items():
        servers = len(region.nats or ())
        wanted = {"leaf": servers, "cluster": servers if servers > 1 else 0}
        for key, count in (wanted | ({"monitor": servers} if region.monitor else {})).items():
            found = getattr(region, key)
            if servers and found is not None and len(found) != count:
                what = f"write {count}, one for each address of nats" if count else "remove it"
                problem = f"{len(found)} addresses, of {servers} nats-servers; {what}"
                yield f"regions.{name}.{key}: {problem}"


def _repeated_names(regions: Mapping[RegionId, "RegionTable"]) -> Iterator[str]:
    for name, region in regions.items():
        for key in ("replicas", "routers", "batch_runners"):
            names = getattr(region, key) or ()
            for repeated in sorted({each for each in names if names.count(each) > 1}):
                yield f'regions.{name}.{key}: "{repeated}" is there twice; remove one'


def _wrong_workers(regions: Mapping[RegionId, "RegionTable"]) -> Iterator[str]:
    for name, region in regions.items():
        found = (
            crowd_problems(dict.fromkeys(region.routers, region.workers), region.batch_runners),
            page_problems(region.workers, region.metrics),
        )
        for key, problem in itertools.chain(*found):
            yield f"regions.{name}.{key}: {problem}"


def _wrong_batch(
    regions: Mapping[RegionId, "RegionTable"], disk_mib: int | None, batch: BatchTable
) -> Iterator[str]:
    names = {name: (region.batch_runners, region.routers) for name, region in regions.items()}
    return batch_problems(names, disk_mib, batch)


def _wrong_links(
    regions: Mapping[RegionId, "RegionTable"], links: tuple[LinkTable, ...]
) -> Iterator[str]:
    seen: dict[frozenset[RegionId], int] = {}
    for number, link in enumerate(links):
        here, pair = f"links.{number}", frozenset(link.between)
        for name in sorted(pair - set(regions)):
            yield f'{here}.between: no region "{name}"{did_you_mean(name, regions)}'
        if len(pair) == 1:
            yield f'{here}.between: links "{link.acceptor}" with itself; name two regions'
        if pair in seen:
            yield f"{here}: the same pair as links.{seen[pair]}; remove one"
        seen.setdefault(pair, number)
    for a, b in itertools.combinations(sorted(regions), 2):
        if frozenset((a, b)) not in seen:
            yield (
                f'links: "{a}" and "{b}" are not linked; add [[links]] with '
                f'between = ["{a}", "{b}"] and its rtt_ms (every pair needs one)'
            )


def _wrong_residency(
    regions: Mapping[RegionId, "RegionTable"], tenants: Mapping[str, "TenantTable"]
) -> Iterator[str]:
    known = sorted({label for region in regions.values() for label in region.residency})
    for name, region in regions.items():
        for label in sorted(set(region.confined_to) - set(region.residency)):
            yield (
                f'regions.{name}.confined_to: the region itself does not carry "{label}"; '
                "add it to its residency"
            )
        if region.label_required and not known:
            yield f"regions.{name}.label_required: no region carries a label (`residency`)"
    seen: dict[str, str] = {}
    for tenant, table in tenants.items():
        for label in sorted(set(table.residency) - set(known)):
            hint = did_you_mean(label, known)
            yield f'tenants.{tenant}.residency: no region carries "{label}"{hint}'
        for digest in table.key_sha256 or ():
            if digest in seen:
                yield f"tenants.{tenant}.key_sha256: a key of tenants.{seen[digest]}; remove one"
            seen.setdefault(digest, tenant)
