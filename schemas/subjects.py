"""Every subject, stream and queue-group name of the bus; nowhere else is one spelled.

The ownership rule: the second token of every subject is the region that owns it
(`mesh.<region>.…`, `_INBOX.<region>.…`). Permissions, leaf-link allow-lists and residency are
all written with that token, so a builder here always takes the region first.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.residency import Label

ROOT = "mesh"
INBOX_ROOT = "_INBOX"
SERVICE_REPLY_ROOT = "_R_"  # of a server's own reply subjects, for requests from another account
ANY = "*"

REPLICAS_CACHED = 4096  # whose subjects are not put together anew for each request

QUEUE_AGENT = "agent"
QUEUE_ROUTERS = "routers"

STREAM_HEARTBEATS = "HEARTBEATS"
STREAM_LEASES = "LEASES"

# Names under which processes register as NATS micro services (`nats micro ls`).
SERVICE_AGENT = "mesh-agent"
SERVICE_ROUTER = "mesh-router"


def heartbeat(region: RegionId | str, replica: ReplicaId | str) -> str:
    """A replica's state, published by its agent."""
    return f"{ROOT}.{region}.heartbeat.{replica}"


@lru_cache(REPLICAS_CACHED)
def work(region: RegionId | str, replica: ReplicaId | str) -> str:
    """Requests for one replica; its agent listens in the queue group `agent`."""
    return f"{ROOT}.{region}.replica.{replica}.work"


def cancel(region: RegionId | str, replica: ReplicaId | str) -> str:
    """Stop one answer."""
    return f"{ROOT}.{region}.replica.{replica}.cancel"


def credit(region: RegionId | str, replica: ReplicaId | str) -> str:
    """How far the asking router has got with one answer: flow control."""
    return f"{ROOT}.{region}.replica.{replica}.credit"


def body(region: RegionId | str, replica: ReplicaId | str) -> str:
    """Parts of request bodies that do not fit one bus message."""
    return f"{ROOT}.{region}.replica.{replica}.body"


def name(region: RegionId | str, replica: ReplicaId | str) -> str:
    """An agent asks whether another one has its name; whoever has it listens."""
    return f"{ROOT}.{region}.replica.{replica}.name"


def named(region: RegionId | str, replica: ReplicaId | str) -> str:
    """The answer of whoever has it."""
    return f"{ROOT}.{region}.replica.{replica}.named"


def ingress(region: RegionId | str) -> str:
    """Requests that a peer region asks this region to place; queue group `routers`."""
    return f"{ROOT}.{region}.ingress"


def ingress_within(region: RegionId | str, label: Label | str) -> str:
    """The same for requests that want a residency label, which stands in the subject: so a server
    that can't read a request knows where it may go."""
    return f"{ingress(region)}.{label}"


def ingress_label(subject: str) -> Label | None:
    """The residency label in an ingress subject; None where there is none."""
    tokens = subject.split(".")
    return Label(tokens[3]) if len(tokens) == 4 else None


def digest(region: RegionId | str) -> str:
    """A region's state in one message."""
    return f"{ROOT}.{region}.gossip.digest"


def trie(region: RegionId | str) -> str:
    """Which prefixes a region's replicas gained and lost, as each of its routers knows."""
    return f"{ROOT}.{region}.gossip.trie"


def siblings(region: RegionId | str) -> str:
    """Which prefixes each of a region's routers placed on which replica, for its other routers."""
    return f"{ROOT}.{region}.gossip.siblings"


def snapshot(region: RegionId | str, asker: RegionId | str) -> str:
    """Questions of region `asker` to a region's routers for what it missed of what they told."""
    return f"{ROOT}.{region}.gossip.snapshot.{asker}"


def lease(region: RegionId | str) -> str:
    """Who owns the region's replicas: written by compare-and-set, by whoever would own them."""
    return f"{ROOT}.{region}.lease.owner"


def leased(region: RegionId | str) -> str:
    """What was written there and taken, with its number: the stream itself says it again."""
    return f"{ROOT}.{region}.gossip.lease"


def ping(region: RegionId | str) -> str:
    """Round-trip probe, answered by any router of the region."""
    return f"{ROOT}.{region}.ping"


def alive(region: RegionId | str, router: RouterId | str) -> str:
    """A router's sign of life: agents abort the work of a router that stops sending it."""
    return f"{ROOT}.{region}.router.{router}.alive"


def inbox_prefix(region: RegionId | str, router: RouterId | str) -> str:
    """Everything under this prefix is for that router alone."""
    return f"{INBOX_ROOT}.{region}.{router}"


def inbox(region: RegionId | str, router: RouterId | str, stream: int | str) -> str:
    """Where one answer is streamed to."""
    return f"{INBOX_ROOT}.{region}.{router}.{stream}"


def inboxes(region: RegionId | str) -> str:
    """Every inbox of a region: answers, and the replies to its routers' own requests."""
    return f"{INBOX_ROOT}.{region}.>"


class InboxAddress(NamedTuple):
    """An answer inbox taken apart."""

    region: RegionId
    router: RouterId
    stream: str


def parse_inbox(subject: str) -> InboxAddress | None:
    """The parts of an answer inbox, or None if the subject is not one."""
    tokens = subject.split(".")
    if len(tokens) != 4 or tokens[0] != INBOX_ROOT or not all(tokens):
        return None
    return InboxAddress(RegionId(tokens[1]), RouterId(tokens[2]), tokens[3])


def owner(subject: str) -> RegionId | None:
    """The region that owns a subject, or None for subjects outside the mesh (`$JS`, `$SRV`, …)."""
    tokens = subject.split(".", 2)
    if len(tokens) < 2 or tokens[0] not in (ROOT, INBOX_ROOT):
        return None
    return RegionId(tokens[1])


_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
MODELS_CACHED = 256  # names that are not worked out anew for each request


@lru_cache(MODELS_CACHED)
def encode_model(model: ModelId | str) -> str:
    """A model name as one subject token: bytes outside [A-Za-z0-9_-] become `=XX`.

    Raises ValueError for an empty name, which no token can stand for.
    """
    if not model:
        raise ValueError("a model name must not be empty")
    return "".join(
        chr(b) if _PLAIN.match(bytes((b,))) else f"={b:02X}" for b in model.encode("utf-8")
    )


_ESCAPE = re.compile(r"=([0-9A-F]{2})")


@lru_cache(MODELS_CACHED)
def decode_model(token: str) -> ModelId:
    """The model name that `encode_model` made the token of. Raises ValueError if none is."""
    raw = _ESCAPE.sub(lambda m: chr(int(m[1], 16)), token).encode("latin-1")
    model = ModelId(raw.decode("utf-8"))
    if encode_model(model) != token:
        raise ValueError(f"{token!r} is not an encoded model name")
    return model
