"""Test runs on the simulated engine: what they count, and what becomes of requests that fail."""

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from agents.config import EngineConfig
from agents.core.latency_predictor import LatencyPredictor
from agents.core.offline_admission import OfflineAdmission
from agents.core.offline_profile import OfflineProfile
from agents.core.slo_profile import Measure
from agents.profiler.engine import ProfiledEngine
from agents.profiler.load import Lengths, OnlineRequest
from agents.profiler.measurement import Measurement
from agents.profiler.trial import Trial, _measures
from agents.sim.profiles import L4_LLAMA
from agents.sim.profiling_run import profiling_run
from agents.simserver.server import SimConfig
from tests.agents.simserver.support import config, running
from tests.support.profiled import coefficients_of

SCALE = 10.0
SIM = config(profile=L4_LLAMA, time_scale=SCALE)
ONLINE = [OnlineRequest(0.05 * at, 100, 10) for at in range(20)]
OFFLINE = Lengths(prompt_tokens=100, output_tokens=10)
TRAINED = LatencyPredictor(
    [each._replace(seconds=each.seconds / SCALE) for each in profiling_run(L4_LLAMA)]
)
PROFILE = OfflineProfile(
    engine="vllm",
    model="sim/tiny",
    measured_at=0,
    **coefficients_of(TRAINED),
    latency_budget_s=1.0,
    limits_s={Measure.TBT_P99: 1.0},
    chunk_tokens=512,
    prefill_tokens_max=512,
)


@contextlib.asynccontextmanager
async def connected(settings: SimConfig) -> AsyncIterator[ProfiledEngine]:
    async with running(settings) as server:
        fields = EngineConfig(engine_kind="vllm", engine_url=server.url)
        engine = ProfiledEngine(fields, random.Random(1))
        try:
            await engine.connect()
            yield engine
        finally:
            await engine.close()


def trial(engine: ProfiledEngine, budget_s: float | None) -> Trial:
    admission = None
    if budget_s is not None:
        profile = replace(PROFILE, latency_budget_s=budget_s)
        admission = OfflineAdmission(profile, refreshes=False)
    return Trial(engine, ONLINE, OFFLINE, admission, random.Random(2))


async def test_online_requests_alone_and_with_offline_work():
    async with connected(SIM) as engine:
        alone = await trial(engine, None).run()
        beside = await trial(engine, 1.0).run()
        assert not engine.reading.running and not engine.reading.waiting
    for result in (alone, beside):
        assert (result.online, result.failed, result.unanswered) == (len(ONLINE), 0, 0)
        assert set(result.latency_s) == set(Measure)
        # No iteration is shorter than the weights take to read.
        assert result.latency_s[Measure.TTFT_MEAN] > 0.045 / SCALE
    assert alone.offline_tokens_per_s == alone.aborted == 0
    assert beside.offline_tokens_per_s > 100


async def test_requests_that_fail_are_counted_with_their_reason():
    async with connected(SIM) as engine, aiohttp.ClientSession() as http:
        await http.post(f"{engine.url}/sim/faults", json={"error_rate": 1.0})
        result = await trial(engine, None).run()
    assert (result.online, result.failed) == (len(ONLINE), len(ONLINE))
    assert result.problem.startswith("HTTP 5")
    assert not result.latency_s


async def test_answers_that_don_t_end_in_time_are_counted(monkeypatch):
    monkeypatch.setattr("agents.profiler.trial.LATE_S_MIN", 0.2)
    async with connected(SIM) as engine, aiohttp.ClientSession() as http:
        await http.post(f"{engine.url}/sim/faults", json={"slow": 1000})
        result = await trial(engine, None).run()
    assert result.unanswered == len(ONLINE) and not result.failed
    assert result.latency_s[Measure.TTFT_P99] > 0.2


@pytest.mark.parametrize(
    ("values", "mean", "p99"),
    [([0.5], 0.5, 0.5), ([0.0], 1e-6, 1e-6), ([float(at) for at in range(1, 201)], 100.5, 198.0)],
)
def test_measures(values, mean, p99):
    assert _measures(values, []) == {Measure.TTFT_MEAN: mean, Measure.TTFT_P99: p99}
    assert _measures([], values) == {Measure.TBT_MEAN: mean, Measure.TBT_P99: p99}


async def test_a_measurement_stays_within_the_engine_s_batch_and_memory():
    small = config(profile=L4_LLAMA, time_scale=SCALE, max_seqs=3, kv_tokens=4096)
    async with connected(small) as engine:
        measurement = Measurement(engine, 2.0, random.Random(1), chunk_tokens=512)
        measured = await measurement.run()
        assert measured.chunk_tokens == 512
        assert 1 <= measured.decodes_max <= 3
        assert not engine.reading.running
