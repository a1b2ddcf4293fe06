"""The heartbeat says what is known, and null where nothing is."""

from dataclasses import replace

import pytest

from agents.core import effects
from agents.core.engine_load import EngineLoad
from agents.core.events import EngineReading, EngineScraped, TokenUsage
from agents.core.heartbeat import HeartbeatFields, ReplicaConfig, compose
from agents.core.requests import RequestTable
from schemas.exchange import Refusal
from schemas.state import Heartbeat, ReplicaState, decode_heartbeat, encode_state
from tests.agents.core.bench import Bench

REPLICA = ReplicaConfig(
    region="us", replica="g0", epoch=3, engine="vllm", outstanding_max=8, heartbeat_s=0.1
)
TOLD = HeartbeatFields(4, ReplicaState.READY, None, 5, 6, {"r1": 7})


def beat(view: EngineLoad) -> Heartbeat:
    answers = RequestTable()
    made = compose(
        REPLICA, view, answers, view.counts(answers.counters, 0, answers.at_engine), TOLD, 12.0
    )
    assert decode_heartbeat(encode_state(made)) == made
    return made


def test_of_an_engine_never_seen() -> None:
    made = beat(EngineLoad(outstanding_max=8, batch_max=None, counts_own=False))
    assert (made.epoch, made.seq, made.served_total, made.refused_total) == (3, 4, 5, 6)
    assert made.taken == {"r1": 7}
    unknown = (made.pending, made.running, made.batch_occupancy, made.kv_used_ratio)
    assert unknown == (None, None, None, None)
    unlearned = (made.prefill_s_per_token, made.decode_tokens_per_s, made.engine_age_s)
    assert unlearned == (None, None, None)


def test_of_an_engine_well_known() -> None:
    view = EngineLoad(outstanding_max=8, batch_max=8, counts_own=False)
    reading = EngineReading(waiting=1, running=6, kv_used_ratio=0.5, kv_capacity_tokens=1000)
    view.scraped(EngineScraped(11.5, reading, ("m",)))
    view.answers.add(TokenUsage(10, 5, 11), 2.0)
    made = beat(view)
    assert (made.models, made.pending, made.running) == (("m",), 1, 6)
    assert (made.batch_max, made.batch_occupancy) == (8, 0.75)
    assert (made.kv_used_ratio, made.kv_capacity_tokens, made.engine_age_s) == (0.5, 1000, 0.5)
    assert (made.decode_tokens_per_s, made.prefix_hit_ratio) == (5.0, 0.5)


def test_the_heartbeat_has_the_labels_that_hold_here() -> None:
    view, answers = EngineLoad(outstanding_max=8, batch_max=None, counts_own=False), RequestTable()
    labelled = replace(REPLICA, residency=("eu",))
    said = compose(
        labelled, view, answers, view.counts(answers.counters, 0, answers.at_engine), TOLD, 12.0
    )
    assert said.residency == ("eu",)
    assert beat(view).residency is None


@pytest.mark.parametrize(
    ("carried", "wanted", "taken"),
    [
        (("eu",), "eu", True),
        (("eu",), "ch,eu", True),
        (("eu",), "ch", False),
        ((), "eu", False),
        (("eu",), None, True),
        (None, "eu", True),  # all that its region carries: which these are, the map knows
    ],
)
def test_an_agent_takes_work_for_its_ground_alone(carried, wanted, taken) -> None:
    bench = Bench(residency=carried)
    bench.read()
    [done] = bench.work(1, **({} if wanted is None else {"Mesh-Residency": wanted}))
    if taken:
        assert isinstance(done, effects.StartRelay)
    else:
        assert done.message.reason == Refusal.RESIDENCY
