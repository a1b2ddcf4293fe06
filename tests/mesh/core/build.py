"""Small ways to make what the core is fed with. Every value that matters is said by the test."""

from random import Random
from typing import Any

from mesh.core.model.prompt import Prompt, block_hashes
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Destination
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from schemas.decision import CandidateKind
from schemas.ids import ModelId, RegionId, ReplicaId, RequestId, RouterId
from schemas.state import Digest, Heartbeat, ModelCapacity, ReplicaState

MODEL = ModelId("m")
US, EU, AP = RegionId("us"), RegionId("eu"), RegionId("ap")
ROUTER = RouterId("r1")


def beat(replica: str, seq: int = 1, **fields: Any) -> Heartbeat:
    """A ready, empty replica with a batch of 8, unless said otherwise."""
    known: dict[str, Any] = {
        "region": US,
        "replica": ReplicaId(replica),
        "epoch": 1,
        "seq": seq,
        "state": ReplicaState.READY,
        "engine": "vllm",
        "models": (MODEL,),
        "full": False,
        "pending": 0,
        "running": 0,
        "outstanding": 0,
        "outstanding_max": 256,
        "batch_max": 8,
    }
    return Heartbeat(**(known | fields))


def digest(region: str, seq: int = 1, *, free: int = 1, ready: int = 4, **fields: Any) -> Digest:
    """A region whose only model is MODEL, unless said otherwise."""
    known: dict[str, Any] = {
        "region": RegionId(region),
        "router": ROUTER,
        "epoch": 1,
        "seq": seq,
        "accepting": True,
        "replicas_ready": ready,
        "replicas_free": free,
        "queue": 0,
        "models": {MODEL: ModelCapacity(ready=ready, free=free)},
        "requests_per_s": 0.0,
    }
    return Digest(**(known | fields))


def prompt(text: str, tokens: int = 100) -> Prompt:
    """Each letter is one block: "ABC" and "ABD" share two."""
    data = b"".join(letter.encode() * 256 for letter in text)
    return Prompt(tokens, block_hashes(data, key="test", model=MODEL))


def spot(name: str, kind: CandidateKind = CandidateKind.REPLICA) -> Destination:
    """A replica, unless said otherwise."""
    return Destination(kind, name)


def request(key: int, text: str = "A", arrived_at: float = 0.0, **fields: Any) -> Request:
    """A client's request of this region with 600 s to live."""
    known: dict[str, Any] = {
        "key": key,
        "request_id": RequestId(f"request-{key}"),
        "model": MODEL,
        "prompt": prompt(text),
        "arrived_at": arrived_at,
        "deadline": arrived_at + 600.0,
        "hops": 0,
        "origin": US,
    }
    return Request(**(known | fields))


def foreign(key: int, text: str = "A", arrived_at: float = 0.0, **fields: Any) -> Request:
    """A request that region eu forwarded to us; its answer goes to `inbox-<key>`."""
    theirs = {"hops": 1, "origin": EU, "answer_inbox": f"inbox-{key}"}
    return request(key, text, arrived_at, **(theirs | fields))


def state(**settings: Any) -> RouterState:
    """What region us's router knows at its start."""
    return RouterState(
        region=US, router=ROUTER, epoch=1, settings=RouterSettings(**settings), dice=Random(1)
    )


def core(seed: int = 1, peers: tuple[RegionId, ...] = (), **settings: Any) -> RouterCore:
    """Region us's router; it has leases if it has `peers`."""
    return RouterCore(
        RouterState(
            region=US,
            router=ROUTER,
            epoch=1,
            settings=RouterSettings(**settings),
            dice=Random(seed),
            peers=peers,
        )
    )
