"""The commands `mesh keys`: API keys of all regions, made and revoked on the bus.

Each region keeps the keys for its own routers. A command reads every region's, joins them, applies
its change and writes to each region what that lacks: so whatever a region missed while it could not
be reached is there after the next command.
"""

import infra.lean_nats  # noqa: F401 # before what imports nats-py

# isort: split
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from pathlib import Path

import click
from nats.aio.client import Client
from pydantic import ValidationError

from infra.tenant_table import key_hash
from mesh.adapters.region_records import Numbered, RegionRecords
from mesh.cli.audit import CREDENTIALS_HELP, echo_table, reason_option, user
from mesh.cli.mesh_options import KnownMesh, find_mesh, in_regions, mesh_options
from mesh.cli.unusable import Unusable
from mesh.core.model.model_targets import listed
from mesh.explain.terminal import clock, printable
from schemas import subjects
from schemas.control import TEXT_MAX
from schemas.ids import ModelId, NameInvalid, RegionId, checked_name
from schemas.keys import (
    HISTORY_MAX,
    KEYS_MAX,
    MODEL_CHARS_MAX,
    MODELS_MAX,
    KeyRecord,
    RegionKeys,
    Scope,
    decode_keys,
    encode_keys,
    joined,
    no_keys,
)
from schemas.limits import LimitsTable
from schemas.problems import problem_of
from schemas.settings import number_in

PREFIX = "mesh-"  # by which scanners for secrets recognise a key: mesh-[A-Za-z0-9_-]{43}
SECRET_BYTES = 32
ID_BYTES = 6
ID_BEGINS = 4  # characters of an id that may stand for it
DEAD_KEPT_S = 30 * 86_400.0  # that a key which is over is listed
DAY_S = 86_400.0
OVERLAP_S = 86_400.0
LISTEN_S = 1.0  # for what is served: each router says it twice a second at least
HEADER = ("id", "tenant", "scopes", "models", "limits", "region", "made", "until", "state")
AUDIT_HEADER = ("region", "number", "at", "by", "command", "keys", "reason")

REASON = reason_option("mesh keys history")
KEYS = RegionRecords(subjects.STREAM_KEYS, subjects.keys, encode_keys, decode_keys, no_keys)
Change = Callable[[tuple[KeyRecord, ...]], tuple[KeyRecord, ...]]


@click.group()
def command() -> None:
    """API keys that the routers of all regions take, within a second and without a restart.

    Those of mesh.toml ([tenants.NAME] key_sha256) are beside these. Where a region can't be reached
    the exit code is 1: there the keys stay as they were, until `mesh keys sync` reaches it.
    """


@dataclass(frozen=True, slots=True)
class _Found:
    """The keys of the regions that were reached, and why the others were not."""

    keys: dict[RegionId, tuple[KeyRecord, ...]]
    unreached: dict[RegionId, str]


@command.command()
@mesh_options(CREDENTIALS_HELP)
@REASON
@click.option("--tenant", required=True, help="Whose it is.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([each.value for each in Scope]),
    multiple=True,
    default=(Scope.INFERENCE.value,),
    help="What it is good for; may be given several times.",
)
@click.option("--model", "models", multiple=True, help="That it may name; without, all.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help="One of its limits, as in mesh.toml's key_limits, none of which holds for it then; may be "
    "given several times.",
)
@click.option("--origin", help="The region whose routers take it.  [default: all]")
@click.option(
    "--days",
    type=click.FloatRange(0.0, 3650.0, min_open=True),
    help="How long it is valid, in days.  [default: for ever]",
)
def create(
    config: Path | None,
    credentials: Path,
    reason: str,
    tenant: str,
    scopes: Sequence[str],
    models: Sequence[str],
    limits: Sequence[str],
    origin: str | None,
    days: float | None,
) -> None:
    """Make a key and print it, this once: no file and no stream has more than its SHA-256."""
    mesh, now = find_mesh(config, credentials), time.time()
    _check(mesh, tenant, scopes, models, origin)
    if models and (served := _served(mesh)):
        for model in models:
            if model not in served:
                names, meant = listed(model, served)
                warning = f"no replica serves the model {model!r} now (served: {names}{meant})"
                click.echo(printable(f"warning: {warning}; the key is made all the same"), err=True)
    record, key = _made(now)
    record = replace(
        record,
        tenant=tenant,
        scopes=tuple(sorted({Scope(each) for each in scopes})),
        models=tuple(sorted(set(models))),
        limits=_limits(limits),
        origin=None if origin is None else RegionId(origin),
        expires_at_unix_s=None if days is None else now + days * DAY_S,
    )
    what = f"create {record.id} for {tenant}"
    done = _change(mesh, lambda: what, reason, lambda known: (*known, record))
    _show(mesh, record, key, done)


@command.command(name="list")
@mesh_options(CREDENTIALS_HELP)
def list_(config: Path | None, credentials: Path) -> None:
    """List the keys, and which regions lack some of them."""
    mesh, now = find_mesh(config, credentials), time.time()
    found = _read(mesh)
    keys = joined(*found.keys.values())
    rows = [_cells(key, now) for key in keys]
    if rows:
        echo_table([HEADER, *rows])
    else:
        click.echo("no keys were made")
    for region, own in found.keys.items():
        if missing := len(set(keys) - set(own)):
            text = f"{region}: lacks {missing} of them, or has them as they were: `mesh keys sync`"
            click.echo(text, err=True)
    _end(found.unreached, "not listed")


@command.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@mesh_options(CREDENTIALS_HELP)
@REASON
def revoke(ids: tuple[str, ...], config: Path | None, credentials: Path, reason: str) -> None:
    """Take keys out of force at once. What is being answered goes on to its end."""
    mesh, now = find_mesh(config, credentials), time.time()
    over: list[KeyRecord] = []

    def revoked(known: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
        named = {key.id: key for key in (_named(known, one) for one in ids)}
        over[:] = [replace(key, revoked_at_unix_s=now) for key in named.values()]
        return joined(known, over)

    def what() -> str:
        return f"revoke {', '.join(key.id for key in over)}"

    unreached = _change(mesh, what, reason, revoked)
    for key in over:
        click.echo(f"{key.id}: revoked")
    _end(unreached, "still valid there")


@command.command()
@click.argument("name", metavar="ID")
@mesh_options(CREDENTIALS_HELP)
@REASON
@click.option(
    "--overlap-s",
    type=click.FloatRange(0.0, 90 * DAY_S),
    default=OVERLAP_S,
    help="How long the old one stays valid, in seconds.",
)
def rotate(
    name: str, config: Path | None, credentials: Path, reason: str, overlap_s: float
) -> None:
    """Make a key like that one, and let that one end soon."""
    mesh, now = find_mesh(config, credentials), time.time()
    made, key = _made(now)
    old = record = made

    def rotated(known: tuple[KeyRecord, ...]) -> tuple[KeyRecord, ...]:
        nonlocal old, record
        old = _named(known, name)
        if old.ends_at_unix_s <= now:
            raise Unusable(f"{old.id} is over: make a new key by `mesh keys create`")
        record = replace(old, id=made.id, sha256=made.sha256, created_at_unix_s=now)
        return joined(known, [replace(old, expires_at_unix_s=now + overlap_s)], [record])

    unreached = _change(mesh, lambda: f"rotate {old.id} to {made.id}", reason, rotated)
    click.echo(f"{old.id}: valid until {clock(now + overlap_s)} at the latest", err=True)
    _show(mesh, record, key, unreached)


@command.command()
@mesh_options(CREDENTIALS_HELP)
def sync(config: Path | None, credentials: Path) -> None:
    """Write to each region what it lacks of the keys that the others have."""
    mesh = find_mesh(config, credentials)
    unreached = _change(mesh, lambda: "sync", "", lambda known: known)
    if not unreached:
        click.echo("all regions have the same keys")
    _end(unreached, "as before")


@command.command()
@mesh_options(CREDENTIALS_HELP)
@click.option(
    "--last",
    type=click.IntRange(1, HISTORY_MAX),
    default=20,
    help="How many changes of each region to show.",
)
def history(config: Path | None, credentials: Path, last: int) -> None:
    """List who changed keys, when and why."""
    mesh = find_mesh(config, credentials)

    async def read(client: Client, region: RegionId) -> list[Numbered[RegionKeys]]:
        return await KEYS.history(client, region, last)

    found, unreached = in_regions(mesh, "admin", mesh.topology.regions, read)
    rows = [_audited(region, seq, one) for region, records in found.items() for seq, one in records]
    echo_table([AUDIT_HEADER, *rows])
    _end(unreached, "not listed")


def _audited(region: RegionId, seq: int, record: RegionKeys) -> tuple[str, ...]:
    cells = (
        *(region, str(seq), clock(record.at_unix_s), record.by, record.command),
        *(str(len(record.keys)), record.reason),
    )
    return tuple(map(printable, cells))


def _check(
    mesh: KnownMesh,
    tenant: str,
    scopes: Sequence[str],
    models: Sequence[str],
    origin: str | None,
) -> None:
    """Raise Unusable for what no router would take."""
    topology = mesh.topology
    try:
        checked_name("tenant", tenant)
    except NameInvalid as error:
        raise Unusable(f"--tenant: {error}") from error
    if topology.tenants and tenant not in topology.tenants:
        raise Unusable(
            f"--tenant: no [tenants.{tenant}] in {mesh.file}, which lists "
            f"{', '.join(topology.tenants)}: routers take keys of these alone"
        )
    if origin is not None and origin not in topology.regions:
        raise Unusable(f"--origin: no region {origin!r}; there are {', '.join(topology.regions)}")
    if models and Scope.BATCH in scopes:
        raise Unusable("--model: lines of batch jobs may name any model; leave one of both out")
    if len(models) > MODELS_MAX or any(not 0 < len(one) <= MODEL_CHARS_MAX for one in models):
        raise Unusable(f"--model: at most {MODELS_MAX}, of up to {MODEL_CHARS_MAX} characters")
    if not topology.auth.required:
        click.echo(
            f"[auth] of {mesh.file} does not say required = true: requests without a key are "
            "served too",
            err=True,
        )


def _limits(given: Sequence[str]) -> tuple[tuple[str, float | str], ...]:
    """Raises Unusable for what mesh.toml would not take."""
    found = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or name not in LimitsTable.model_fields:
            problem = f"no limit {name!r}" if equals else "give it as NAME=VALUE"
            known = ", ".join(LimitsTable.model_fields)
            raise Unusable(f"--limit {each}: {problem}; there are {known}")
        found[name] = number_in(text)
    try:
        LimitsTable.model_validate(found)
    except ValidationError as error:
        raise Unusable(f"--limit: {problem_of(error)}") from error
    return tuple(sorted(found.items()))


def _made(now: float) -> tuple[KeyRecord, str]:
    """A new key, and what is kept of it."""
    key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    record = KeyRecord(
        id=secrets.token_hex(ID_BYTES),
        sha256=key_hash(key),
        tenant="-",
        scopes=(),
        created_at_unix_s=now,
    )
    return record, key


def id_of(ids: Iterable[str], given: str) -> str | None:
    """The one of these ids that is given, whole or by how it begins. Raises Unusable where several
    begin so."""
    known = set(ids)
    begun = sorted(each for each in known if each.startswith(given))
    if given in known or len(given) < ID_BEGINS or not begun:
        return given if given in known else None
    if len(begun) > 1:
        raise Unusable(f"{given!r}: the ids of several keys begin so: {', '.join(begun)}")
    return begun[0]


def _named(keys: Iterable[KeyRecord], name: str) -> KeyRecord:
    known = {key.id: key for key in keys}
    if (found := id_of(known, name)) is None:
        few = f"; give {ID_BEGINS} characters of an id at least" if len(name) < ID_BEGINS else ""
        raise Unusable(f"no key {name!r}{few}; `mesh keys list` lists them")
    return known[found]


def _show(mesh: KnownMesh, record: KeyRecord, key: str, unreached: dict[RegionId, str]) -> None:
    where = "all regions" if record.origin is None else record.origin
    about = f"{record.id} of {record.tenant}, for {where}; it is shown this once:"
    click.echo(about, err=True)
    click.echo(key)
    _end(unreached, "not known there")


def _cells(key: KeyRecord, now: float) -> tuple[str, ...]:
    ends = key.ends_at_unix_s
    state = "valid" if ends > now else "expired" if key.revoked_at_unix_s is None else "revoked"
    cells = (
        *(key.id, key.tenant, " ".join(key.scopes), " ".join(key.models) or "all"),
        " ".join(f"{name}={_shown(most)}" for name, most in key.limits) or "-",
        *(key.origin or "all", clock(key.created_at_unix_s)),
        *("for ever" if ends == inf else clock(ends), state),
    )
    return tuple(map(printable, cells))


def _shown(most: float | str) -> str:
    return most if isinstance(most, str) else f"{most:g}"


def _end(unreached: dict[RegionId, str], meanwhile: str) -> None:
    """Say what could not be reached, and end so."""
    for region, why in unreached.items():
        click.echo(f"{region}: not reached, {meanwhile} until `mesh keys sync`: {why}", err=True)
    if unreached:
        sys.exit(1)


# On the bus.


def _served(mesh: KnownMesh) -> tuple[ModelId, ...]:
    """What clients may ask for now, as regions say; nothing where none is heard."""
    # To revoke a key is quick: these load most of a router.
    from mesh.core.model.model_targets import ModelTargets
    from mesh.core.model.served_names import model_of
    from mesh.doctor.observed_state import listen
    from mesh.runtime.config import model_rules
    from schemas.state import Digest

    async def heard(client: Client, region: RegionId) -> Iterable[Digest]:
        return (await listen(client, region, time.monotonic, LISTEN_S)).digests.values()

    found, _ = in_regions(mesh, "observer", mesh.topology.regions, heard)
    ready = {
        model_of(name)
        for digest in chain.from_iterable(found.values())
        for name, capacity in digest.models.items()
        if capacity.ready
    }
    return ModelTargets(model_rules(mesh.topology)).known(sorted(ready))


def _read(mesh: KnownMesh) -> _Found:
    """Raises Unusable where no region at all can be reached."""

    async def keys(client: Client, region: RegionId) -> tuple[KeyRecord, ...]:
        return (await KEYS.read(client, region)).record.keys

    found, unreached = in_regions(mesh, "admin", mesh.topology.regions, keys)
    if not found:
        raise Unusable("\n".join(f"{region}: {why}" for region, why in unreached.items()))
    return _Found(found, unreached)


def _change(
    mesh: KnownMesh, what: Callable[[], str], reason: str, change: Change
) -> dict[RegionId, str]:
    """Write what the change makes of the keys of all regions to each. Why some were not reached.
    `what`: what it was, asked once it is made."""
    found, now = _read(mesh), time.time()
    wanted = change(joined(*found.keys.values()))
    gone: frozenset[str] = frozenset()
    if not found.unreached:  # else a region that was not reached could bring them back
        gone = frozenset(key.id for key in wanted if key.ends_at_unix_s < now - DEAD_KEPT_S)
    if len(wanted) - len(gone) > KEYS_MAX:
        raise Unusable(f"more than {KEYS_MAX} keys: one that is over goes after 30 days")

    async def write(client: Client, region: RegionId) -> None:
        def changed(held: RegionKeys) -> RegionKeys:
            keys = tuple(key for key in joined(held.keys, wanted) if key.id not in gone)
            if keys == held.keys:
                return held
            return RegionKeys(
                region=region,
                keys=keys,
                command=what()[:TEXT_MAX],
                by=user()[:TEXT_MAX],
                reason=printable(reason)[:TEXT_MAX],
                at_unix_s=now,
            )

        await KEYS.change(client, region, changed)

    written, unwritten = in_regions(mesh, "admin", found.keys, write)
    unreached = found.unreached | unwritten
    if not written:
        raise Unusable("\n".join(f"{region}: {why}" for region, why in unreached.items()))
    return unreached
