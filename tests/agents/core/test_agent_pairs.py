"""AgentCore beside an engine with a part in pairs: what it reports, takes, refuses and learns."""

import pytest

from agents.core import effects, events
from agents.core.events import EngineReading, TokenUsage
from agents.core.replica_config import KvPart
from schemas import exchange
from schemas.exchange import Refusal
from schemas.kv_transfer import KvRole, TransferKind
from schemas.state import ReplicaState
from tests.agents.core.bench import MODEL, Bench, inbox

NIXL, P2P, SGLANG = TransferKind
PREFILL, DECODE = KvRole
LATE = {"Mesh-Deadline-Ms": "600000", "Mesh-Prefill-Tokens": "2000"}


def stage_of(role: KvRole) -> dict[str, str]:
    return LATE | {
        exchange.H_STAGE: role,
        exchange.H_KV_ROOM: "7",
        exchange.H_KV_PREFILL: "10.0.0.8:8998",
    }


def bench(kind: TransferKind | None, role: KvRole) -> Bench:
    part = None if kind is None else KvPart(kind, role, "10.0.0.8:1")
    found = Bench(outstanding_max=8, kv=part)
    look(found)
    return found


def look(found: Bench, steps: float = 0.0) -> list:
    reading = EngineReading(waiting=0, running=0, progress=(steps,))
    done = found.feed(events.EngineScraped(found.now, reading, (MODEL,)))
    return done + found.feed(events.AliveArrived("us", "r1", 1))


@pytest.mark.parametrize(
    ("kind", "role", "whole"),
    [
        (NIXL, PREFILL, False),
        (NIXL, DECODE, True),
        (P2P, DECODE, False),
        (SGLANG, PREFILL, False),
        (SGLANG, DECODE, False),
    ],
)
def test_models_of_which_only_a_stage_is_computed_are_no_models_of_the_heartbeat(kind, role, whole):
    """A router of before would give the replica whole requests for them."""
    beat = bench(kind, role).core.heartbeat(1.0)
    assert beat.models == ((MODEL,) if whole else ())
    assert (beat.kv.kind, beat.kv.role, beat.kv.models) == (kind, role, (MODEL,))
    assert (beat.kv.whole, beat.kv.address) == (whole, "10.0.0.8:1")


@pytest.mark.parametrize(
    ("kind", "role", "taken"),
    [
        (None, PREFILL, {None}),
        (NIXL, PREFILL, {PREFILL}),
        (NIXL, DECODE, {DECODE, None}),
        (SGLANG, PREFILL, {PREFILL}),
        (SGLANG, DECODE, {DECODE}),
    ],
)
def test_only_stages_of_its_part_are_taken(kind, role, taken):
    found = bench(kind, role)
    for number, stage in enumerate((PREFILL, DECODE, None), 1):
        done = found.work(number, **(LATE if stage is None else stage_of(stage)))
        [sent] = [one for one in done if isinstance(one, effects.StartRelay | effects.Refuse)]
        if stage in taken:
            assert sent.work.role is stage
        else:
            assert sent.message.reason is Refusal.WRONG_MODEL


def test_a_prefill_stage_teaches_the_prefill_speed_and_a_decode_stage_does_not():
    for role in KvRole:
        found = bench(NIXL, role)
        for number in range(1, 20):
            tokens = 500 * (1 + number % 5)
            found.work(number, **stage_of(role))
            found.tick(0.05 + tokens * 1e-4)
            found.feed(events.RelayBegan(inbox(number)))
            usage = TokenUsage(tokens, 0, 1)
            found.end(number, usage=usage, streamed=False)
        line = found.core.heartbeat(found.now).prefill_s_per_token
        assert (line == pytest.approx(1e-4, rel=0.05)) if role is PREFILL else line is None


@pytest.mark.parametrize("role", list(KvRole))
def test_an_engine_that_waits_for_its_partner_does_not_hang(role):
    for kind, is_down in ((SGLANG, False), (None, True)):
        found = bench(kind, role)
        found.work(1, **(stage_of(role) if kind else LATE))
        for _ in range(55 * 4):
            found.tick(0.25)
            look(found)
        state = found.core.replica_state
        assert (state is ReplicaState.DOWN) == is_down, (kind, state)
