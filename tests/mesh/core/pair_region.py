"""One router and replicas with a part in pairs, as it believes them to be."""

from collections import Counter

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from schemas.ids import ReplicaId
from schemas.kv_transfer import KvTransfer
from tests.mesh.core import build

ENDS = fx.Fail | fx.PassEngineError


def part(role: str, kind: str = "nixl", **fields: object) -> KvTransfer:
    whole = role == "decode" and kind == "nixl"
    address = None if kind == "nixl" else f"host-{role}:7"
    known = {"kind": kind, "role": role, "models": (build.MODEL,), "whole": whole}
    return KvTransfer(**(known | {"address": address} | fields))


class Region:
    """One router, and what it believes of its replicas."""

    def __init__(self, policy: str = "mesh", seed: int = 1, **settings: object) -> None:
        self.core = build.core(seed, policy=policy, **settings)
        self.now = 50.0
        self.seqs: Counter[str] = Counter()
        self.parts: dict[str, KvTransfer | None] = {}

    def says(self, name: str, kv: KvTransfer | None = None, **fields: object) -> list[fx.Effect]:
        """A heartbeat of an engine with that part; its first one's part lasts."""
        self.parts.setdefault(name, kv)
        kv = self.parts[name]
        self.seqs[name] += 1
        known: dict[str, object] = {"kv_capacity_tokens": 100_000, "kv_used_ratio": 0.0}
        known |= {"prefill_queued_tokens": 0, "prefill_s_per_token": 1e-4, "prefill_base_s": 0.02}
        if kv is not None and not kv.whole:
            known["models"] = ()
        beat = build.beat(name, self.seqs[name], kv=kv, **(known | fields))
        return self.feed(ev.HeartbeatSeen(beat))

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        return self.core.handle(event, self.now)

    def asks(self, key: int, **fields: object) -> list[fx.Effect]:
        tokens = fields.pop("tokens", 4000)
        prompt = build.prompt("ABCD", tokens)
        make = build.foreign if fields.pop("foreign", False) else build.request
        return self.feed(ev.RequestArrived(make(key, "", self.now, prompt=prompt, **fields)))

    def sent_to(self, name: str) -> int:
        replica = self.core.replicas.get(ReplicaId(name))
        return 0 if replica is None else len(replica.on_the_way)


def only(effects: list[fx.Effect], kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]
