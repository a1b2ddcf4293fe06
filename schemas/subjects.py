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
INBOX_BATCH_SETUP = "_INBOX_batch-setup"  # as 0.1.0 renders it, in an account of routers
INBOX_CHECK = "_INBOX_check"  # observers may write there too: `nats server check connection` does
SERVICE_REPLY_ROOT = "_R_"  # of a server's own reply subjects, for requests from another account
ANY = "*"

REPLICAS_CACHED = 4096  # whose subjects are not put together anew for each request

QUEUE_AGENT = "agent"
QUEUE_ROUTERS = "routers"
QUEUE_BATCH = "batch"  # of a region's batch runners

STREAM_HEARTBEATS = "HEARTBEATS"
STREAM_LEASES = "LEASES"
STREAM_CONTROL = "CONTROL"  # what operators ordered for the region
STREAM_KEYS = "KEYS"  # the API keys that its routers take
STREAM_USAGE = "USAGE"  # accounts of tokens

# Names under which processes register as NATS micro services (`nats micro ls`).
SERVICE_AGENT = "mesh-agent"
SERVICE_ROUTER = "mesh-router"


# One builder for each channel of `schemas.catalog`, which describes what it carries.


def heartbeat(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.heartbeat.{replica}"


@lru_cache(REPLICAS_CACHED)
def work(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.work"


def cancel(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.cancel"


def credit(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.credit"


def body(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.body"


def name(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.name"


def named(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.named"


def prompt_blocks(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.blocks"


def held(region: RegionId | str, replica: ReplicaId | str) -> str:
    return f"{ROOT}.{region}.replica.{replica}.held"


def ingress(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.ingress"


def ingress_within(region: RegionId | str, label: Label | str) -> str:
    return f"{ingress(region)}.{label}"


def ingress_label(subject: str) -> Label | None:
    """The residency label in a subject of `ingress` or `offline`; None where there is none."""
    tokens = subject.split(".")
    return Label(tokens[3]) if len(tokens) == 4 else None


def offline(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.offline"


def offline_within(region: RegionId | str, label: Label | str) -> str:
    return f"{offline(region)}.{label}"


def offline_state(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.offline"


def digest(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.digest"


def limits(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.limits"


def trie(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.trie"


def siblings(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.siblings"


def snapshot(region: RegionId | str, asker: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.snapshot.{asker}"


def lease(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.lease.owner"


def leased(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.gossip.lease"


def control(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.control.write"


def controlled(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.control.written"


def keys(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.keys.write"


def keyed(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.keys.written"


def usage(region: RegionId | str, router: RouterId | str, day: str, page: str) -> str:
    return f"{ROOT}.{region}.usage.{router}.{day}.{page}"


def ping(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.ping"


def requests(region: RegionId | str) -> str:
    return f"{ROOT}.{region}.requests"


def alive(region: RegionId | str, router: RouterId | str) -> str:
    return f"{ROOT}.{region}.router.{router}.alive"


def inbox(region: RegionId | str, router: RouterId | str, stream: int | str) -> str:
    return f"{INBOX_ROOT}.{region}.{router}.{stream}"


def inbox_prefix(region: RegionId | str, router: RouterId | str) -> str:
    """The beginning of all subjects that only this router receives."""
    return f"{INBOX_ROOT}.{region}.{router}"


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

    Raises ValueError for an empty name, which no token can encode.
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
