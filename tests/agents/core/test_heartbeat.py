"""What is in a heartbeat: null where a number is unknown; and when the next one is due."""

import orjson
import pytest

from agents.core import effects, events
from agents.core.events import EngineReading, TokenUsage
from agents.core.heartbeat import GAP_MIN_S
from schemas.exchange import Refusal
from schemas.state import decode_heartbeat, encode_state
from tests.agents.core.bench import MODEL, Bench, inbox


def test_of_an_engine_never_seen() -> None:
    bench = Bench()
    bench.work(1, **{"Mesh-From": "r1", "Mesh-Handoff": "7"})
    made = bench.beat
    assert decode_heartbeat(encode_state(made)) == made
    assert (made.epoch, made.seq, made.served_total, made.refused_total) == (7, 1, 0, 1)
    assert made.taken == {"r1": 7}
    unknown = (made.pending, made.running, made.batch_occupancy, made.kv_used_ratio)
    assert unknown == (None, None, None, None)
    unlearned = (made.prefill_s_per_token, made.decode_tokens_per_s, made.engine_age_s)
    assert unlearned == (None, None, None)


def test_of_an_engine_well_known() -> None:
    bench = Bench(batch_max=8)
    bench.read()
    bench.work(1)
    bench.feed(events.RelayBegan(inbox(1)))
    bench.now += 2.0
    bench.end(1, usage=TokenUsage(10, 5, 11), streamed=True)
    bench.read(EngineReading(waiting=1, running=6, kv_used_ratio=0.5, kv_capacity_tokens=1000))
    bench.now += 0.5
    made = bench.beat
    assert decode_heartbeat(encode_state(made)) == made
    assert (made.models, made.pending, made.running) == ((MODEL,), 1, 6)
    assert (made.batch_max, made.batch_occupancy) == (8, 0.75)
    assert (made.kv_used_ratio, made.kv_capacity_tokens, made.engine_age_s) == (0.5, 1000, 0.5)
    assert (made.decode_tokens_per_s, made.prefix_hit_ratio) == (5.0, 0.5)


def test_its_numbers_are_short() -> None:
    """People read them at a terminal."""
    bench = Bench(batch_max=7)
    bench.read()
    for number in range(1, 40):
        bench.now += 1 / 3
        bench.work(number, **{"Mesh-Prefill-Tokens": str(number * 97)})
        bench.now += number / 700
        bench.feed(events.RelayBegan(inbox(number)))
        bench.now += 1 / 7
        bench.end(number, usage=TokenUsage(number * 97, 3, 11), streamed=True)
        reading = EngineReading(waiting=0, running=number % 7, kv_used_ratio=number / 41)
        bench.read(reading)
    bench.now += 1 / 9
    floats = [
        value for value in orjson.loads(encode_state(bench.beat)).values() if type(value) is float
    ]
    assert len(floats) >= 6
    assert all(value == float(f"{value:.4g}") for value in floats), floats


def test_the_heartbeat_has_the_labels_that_hold_here() -> None:
    assert Bench(residency=("eu",)).beat.residency == ("eu",)
    assert Bench().beat.residency is None


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


def test_on_the_beat_and_sooner_when_in_a_hurry() -> None:
    bench = Bench(outstanding_max=1)
    assert bench.core.wake_at == float("-inf")
    bench.read()
    sent_at = bench.now
    assert bench.core.wake_at == sent_at + 0.1
    bench.now += GAP_MIN_S / 2
    bench.work(1)  # it is full
    assert bench.core.wake_at == sent_at + GAP_MIN_S
