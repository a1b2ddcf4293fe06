"""The control-cost benchmark on scenes that take seconds: each claim is checked small."""

import os
from pathlib import Path

import pytest

from schemas.listed_replicas import LISTED_MAX
from tests.programs.live.control.live import Cost, Scene, cpu_s, look
from tests.programs.live.control.twin import (
    CONTROL,
    DIGEST,
    LinkTraffic,
    control_bytes,
    control_messages,
    traffic_per_s,
)
from tests.programs.live.control_cost import Seen, tables

US, EU = "r00", "r01"


def twin(**scene: int) -> LinkTraffic:
    [traffic] = [
        traffic
        for (a, b), traffic in traffic_per_s(Scene(**scene), 3.0).items()  # type: ignore[arg-type]
        if (a, b) == (US, EU)
    ]
    return traffic


def test_in_the_twin_a_link_carries_the_same_however_many_replicas_are_not_listed() -> None:
    counts = (LISTED_MAX, 4 * LISTED_MAX)
    few, many = (twin(regions=2, replicas=count, elsewhere=2) for count in counts)
    assert set(few.messages) == set(many.messages) == set(CONTROL)
    assert control_messages(many) == pytest.approx(control_messages(few), rel=0.1)
    assert control_bytes(many) == pytest.approx(control_bytes(few), rel=0.1)


def test_in_the_twin_more_regions_make_digests_longer_and_nothing_more_frequent() -> None:
    two, six = (twin(regions=count, replicas=2, elsewhere=2) for count in (2, 6))
    assert control_messages(six) == pytest.approx(control_messages(two), rel=0.1)
    longer = six.payload_bytes[DIGEST] - two.payload_bytes[DIGEST]
    assert 0 < longer == pytest.approx(control_bytes(six) - control_bytes(two), rel=0.1)
    assert longer < 6 * 4 * 40 * 10, "40 bytes a region and digest"


@pytest.mark.timeout(90)
async def test_live_no_heartbeat_crosses_a_link(tmp_path: Path) -> None:
    [cost] = await look(Scene(regions=2, replicas=8, elsewhere=2), tmp_path, 1, 4.0)
    assert cost.heartbeats_per_s[US] > cost.heartbeats_per_s[EU] > 0
    assert set(cost.link_messages_per_s) == set(cost.link_bytes_per_s) == {(US, EU), (EU, US)}
    for messages_per_s in cost.link_messages_per_s.values():
        assert 2 < messages_per_s < 40, "heartbeats of eight replicas alone are 80"
    assert min(cost.link_bytes_per_s.values()) > 500
    assert cost.of("router-") and cost.of("nats-") and cost.of(f"beats-{US}")


def test_the_tables_say_what_was_measured() -> None:
    def cost(replicas: int) -> Cost:
        return Cost(
            cores={"router-r00-r1": 0.01 + 0.001 * replicas, "nats-r00": 0.002 * replicas}
            | {"agent-r00-0": 0.01, "nats-r01": 0.0, "router-r01-r1": 0.01},
            link_bytes_per_s={(US, EU): 2048.0, (EU, US): 1024.0},
            link_messages_per_s={(US, EU): 20.0, (EU, US): 20.0},
            heartbeats_per_s={US: 10.0 * replicas, EU: 20.0},
        )

    by_replicas = {n: Scene(regions=2, replicas=n, elsewhere=2) for n in (2, 6)}
    by_rate = {0.0: Scene(regions=2, replicas=1, elsewhere=1, real=True)}
    seen: Seen = {scene: [cost(n)] for n, scene in by_replicas.items()}
    seen[by_rate[0.0]] = [cost(1)]
    text = tables(by_replicas, {}, by_rate, seen, twin_regions=(2,), twin_s=1.0)
    assert "| 6 replicas | 100% | 0.016 (0.016–0.016) | 0.012 (0.012–0.012) | 2.0 " in text
    assert "| router | 0.100 | 0.010 |" in text, "cores of 100 replicas, and of none"
    assert "| nats-server | 0.200 | 0.000 |" in text
    assert "| together | 1.30 | 0.010 |" in text
    assert "1.00× | hit" in text


def test_the_kernel_counts_what_this_process_takes() -> None:
    before = cpu_s(os.getpid())
    while cpu_s(os.getpid()) == before:
        sum(range(10_000))
