"""256 groups of 32, each request once."""

from collections import Counter

import pytest

from mesh.sim.workloads.capacity import demand
from mesh.sim.workloads.prefix_groups import short
from tests.mesh.sim.workloads.forest import shared_ratio


def test_every_group_has_its_32_requests_and_its_own_256_tokens():
    workload = short(rate_per_s=100.0)
    groups = Counter(arrival.node.prompt[0] for arrival in workload.arrivals)
    assert len(groups) == 256
    assert set(groups.values()) == {32}
    assert {prefix.tokens for prefix in groups} == {256}
    assert {len(arrival.node.prompt) for arrival in workload.arrivals} == {2}


def test_groups_come_mixed():
    firsts = [arrival.node.prompt[0] for arrival in short().arrivals[:256]]
    assert len(set(firsts)) > 100


@pytest.mark.parametrize(("tokens", "ratio"), [(256, 0.646), (4096, 0.94)])
def test_the_prefix_decides_what_can_be_hit(tokens, ratio):
    # 31 of a group's 32 requests find the prefix: 31/32 of its share of the prompt.
    wanted = demand(short(prefix_tokens=tokens, rate_per_s=100.0))
    assert shared_ratio(wanted) == pytest.approx(31 / 32 * tokens / (tokens + 128), abs=1e-6)
    assert shared_ratio(wanted) == pytest.approx(ratio, abs=0.01)
