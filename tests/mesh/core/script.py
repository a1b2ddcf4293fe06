"""Stories of a router as text: what happens, a line each, and under it what the router does.

    heartbeat us-0 running=3
    request 1
    > dispatch 1 us-0

`play` returns the text with the effects that the core really gave, so a story is right when it
is its own transcript. Time stands still but for `wait S`, `tick S` and `pass S [hearing NAMES]`
(ticks every 0.1 s, with the last word of each of NAMES repeated before each one). Routers follow
`skywalker` unless `settings` say otherwise. Receipts are shown for `hold` and `shed`; placements
show themselves; digests and gossip are left out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.router import RouterCore
from schemas.decision import Placement
from schemas.exchange import Priority
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat, ModelCapacity, ReplicaState
from tests.mesh.core import build

TICK_S = 0.1
POLICY = "skywalker"  # by the paper's rules a reader can say what must happen


def play(text: str) -> str:
    """The transcript of a story."""
    stage = Stage()
    lines = []
    for line in text.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        lines += [f"> {effect}" for effect in stage.act(line)]
    return "\n".join(lines) + "\n"


class Stage:
    """One router, its clock, and what the fleet said last."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core: RouterCore = build.core(policy=POLICY)
        self.attempts: dict[int, int] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.digests: dict[str, Digest] = {}
        self.shown: list[str] = []

    def act(self, line: str) -> list[str]:
        words, fields = _parse(line)
        if words:
            getattr(self, f"do_{words[0].replace('-', '_')}")(*words[1:], **fields)
        shown, self.shown = self.shown, []
        return shown

    def feed(self, event: ev.Event) -> None:
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, fx.Dispatch | fx.Forward):
                self.attempts[effect.key] = effect.attempt
            shown = SHOW[type(effect)](effect)
            if shown is not None:
                self.shown.append(shown)

    # The router and its clock.

    def do_settings(self, **fields: str) -> None:
        numbers = {k: float(v) if "." in v else int(v) for k, v in fields.items() if k != "policy"}
        self.core = build.core(**numbers, policy=fields.get("policy", POLICY))

    def do_wait(self, seconds: str) -> None:
        self.now += float(seconds)

    def do_tick(self, seconds: str = "0") -> None:
        self.now += float(seconds)
        self.feed(ev.Tick())

    def do_pass(self, seconds: str, *names: str) -> None:
        for _ in range(round(float(seconds) / TICK_S)):
            self.now += TICK_S
            for name in names[1:]:
                self._repeat(name)
            self.feed(ev.Tick())

    def _repeat(self, name: str) -> None:
        if name in self.beats:
            self.beats[name] = replace(self.beats[name], seq=self.beats[name].seq + 1)
            self.feed(ev.HeartbeatSeen(self.beats[name]))
        else:
            self.digests[name] = replace(self.digests[name], seq=self.digests[name].seq + 1)
            self.feed(ev.DigestSeen(self.digests[name]))

    def do_drain(self) -> None:
        self.feed(ev.Drain())

    def do_bus_lost(self) -> None:
        self.feed(ev.BusLost())

    def do_bus_returned(self) -> None:
        self.feed(ev.BusReturned())

    # The fleet.

    def do_heartbeat(self, name: str, **fields: str) -> None:
        last = self.beats.get(name)
        known: dict[str, Any] = {
            key: _count(value) for key, value in fields.items() if key in COUNTS
        }
        known["seq"] = 1 if last is None else last.seq + 1
        known["state"] = ReplicaState(fields.get("state", "ready"))
        known["full"] = fields.get("full") == "yes"
        known["taken"] = {build.ROUTER: int(fields.get("taken", 0))}
        if "models" in fields:
            known["models"] = tuple(ModelId(model) for model in fields["models"].split(","))
        if "prefill_s_per_token" in fields:
            known["prefill_s_per_token"] = float(fields["prefill_s_per_token"])
            known["prefill_base_s"] = 0.01
        if "kv_used" in fields:
            known["kv_used_ratio"] = float(fields["kv_used"])
        self.beats[name] = build.beat(name, **known)
        self.feed(ev.HeartbeatSeen(self.beats[name]))

    def do_digest(self, region: str, **fields: str) -> None:
        last = self.digests.get(region)
        free, ready = int(fields.get("free", 1)), int(fields.get("ready", 4))
        model = ModelId(fields.get("model", build.MODEL))
        self.digests[region] = build.digest(
            region,
            seq=1 if last is None else last.seq + 1,
            free=free,
            ready=ready,
            queue=int(fields.get("queue", 0)),
            accepting=fields.get("accepting") != "no",
            router=RouterId(fields.get("router", build.ROUTER)),
            models={
                model: ModelCapacity(
                    ready=ready,
                    free=free,
                    wait_s=_known(fields, "wait_s"),
                    running=_known(fields, "running"),
                )
            },
        )
        self.feed(ev.DigestSeen(self.digests[region]))

    def do_rtt(self, region: str, seconds: str) -> None:
        self.feed(ev.RttMeasured(RegionId(region), float(seconds)))

    # Requests.

    def do_request(self, key: str, **fields: str) -> None:
        asked = build.request(
            int(key),
            arrived_at=self.now,
            prompt=_prompt(fields),
            deadline=self.now + float(fields.get("deadline", 600)),
            model=ModelId(fields.get("model", build.MODEL)),
            priority=Priority(fields.get("priority", "normal")),
            slo_ttft_s=float(fields["slo"]) if "slo" in fields else None,
        )
        self.feed(ev.RequestArrived(asked))

    def do_peer_asks(self, key: str, **fields: str) -> None:
        self.feed(ev.RequestArrived(build.foreign(int(key), arrived_at=self.now)))

    def do_gone(self, key: str) -> None:
        self.feed(ev.ClientGone(int(key)))

    # Attempts: the one under way, unless the story says which.

    def _which(self, key: str, fields: dict[str, str]) -> tuple[int, int]:
        return int(key), int(fields.get("attempt", self.attempts.get(int(key), 0)))

    def do_refuse(self, key: str, by: str, **fields: str) -> None:
        region, _, replica = by.partition("/")
        self.feed(
            ev.AttemptRefused(
                *self._which(key, fields),
                fields.get("reason", "full"),
                RegionId(region),
                ReplicaId(replica) if replica else None,
                -1,
                -1,
            )
        )

    def do_placed(self, key: str, replica: str, **fields: str) -> None:
        self.feed(ev.PlacedByPeer(*self._which(key, fields), ReplicaId(replica)))

    def do_progress(self, key: str, **fields: str) -> None:
        self.feed(ev.AttemptProgressed(*self._which(key, fields)))

    def do_start(self, key: str, **fields: str) -> None:
        self.feed(ev.AnswerStarted(*self._which(key, fields)))

    def do_fail(self, key: str, *answered: str, **fields: str) -> None:
        """`answered`: with which error of the engine's, if with any."""
        status = int(answered[0]) if answered else None
        self.feed(ev.AttemptFailed(*self._which(key, fields), "it broke", status))

    def do_lost(self, key: str, *replica: str, **fields: str) -> None:
        """Frames of it were, or its `replica`: its peer may have done no wrong."""
        attempt, why = self._which(key, fields), f"its {' '.join(replica) or 'frame'} was lost"
        lost = bool(replica)
        self.feed(ev.AttemptFailed(*attempt, why, blameless=True, replica_lost=lost))

    def do_end(self, key: str, **fields: str) -> None:
        self.feed(ev.AnswerEnded(*self._which(key, fields)))


COUNTS = {
    *("pending", "running", "outstanding", "batch_max", "epoch"),
    *("kv_capacity_tokens", "prefill_queued_tokens"),
}


def _parse(line: str) -> tuple[list[str], dict[str, str]]:
    words = line.partition("#")[0].split()
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    return [word for word in words if "=" not in word], fields


def _count(value: str) -> int | None:
    return None if value == "unknown" else int(value)


def _prompt(fields: dict[str, str]) -> Prompt:
    """A block a letter; `A*160` is so many of one."""
    text, _, times = fields.get("prompt", "A").partition("*")
    return build.prompt(text * int(times or 1), int(fields.get("tokens", 100)))


def _known(fields: dict[str, str], name: str) -> float | None:
    return float(fields[name]) if name in fields else None


def _dispatch(effect: fx.Dispatch) -> str:
    answer = f" answering {effect.answer_inbox}" if effect.answer_inbox else ""
    return f"dispatch {effect.key} {effect.replica}{answer}"


def _fail(effect: fx.Fail) -> str:
    retry = "" if effect.retry_after_s is None else f" retry-after={effect.retry_after_s:g}"
    return f"fail {effect.key} {effect.fault.name} {effect.fault.value.status}{retry}"


def _decided(effect: fx.Decided) -> str | None:
    placement = effect.decision.placement
    silent = placement in (Placement.LOCAL, Placement.PEER)
    return None if silent else f"{placement.value} {effect.key}: {effect.decision.reason}"


SHOW: dict[type, Callable[[Any], str | None]] = {
    fx.Dispatch: _dispatch,
    fx.Forward: lambda effect: f"forward {effect.key} {effect.peer}",
    fx.CancelAttempt: lambda effect: f"cancel {effect.key} {effect.region}/{effect.replica or '?'}",
    fx.RefusePeer: lambda effect: f"refuse-peer {effect.answer_inbox} {effect.reason}",
    fx.TellLost: lambda effect: f"tell-lost {effect.answer_inbox} {effect.replica}",
    fx.Fail: _fail,
    fx.PassEngineError: lambda effect: f"pass-engine-error {effect.key}",
    fx.Decided: _decided,
    fx.RequestAgain: lambda effect: f"request-again {effect.region}",
    fx.PublishDigest: lambda effect: None,
    fx.PublishTrie: lambda effect: None,
    fx.PublishToSiblings: lambda effect: None,
    fx.AskTrie: lambda effect: None,
    fx.AnswerTrie: lambda effect: None,
}
