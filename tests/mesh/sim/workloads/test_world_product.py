"""One product, its regions' days, and documents that come and go."""

from collections import Counter

import pytest

from mesh.sim.workloads.daily_load import world_product
from schemas.ids import RegionId


def test_it_is_the_same_each_time_and_has_the_documented_requests():
    asked = world_product(duration_s=300.0, rate_per_s=4.0, seed=3)
    again = world_product(duration_s=300.0, rate_per_s=4.0, seed=3)
    assert asked.arrivals == again.arrivals
    assert len(asked.arrivals) == pytest.approx(1200, rel=0.15)
    assert {len(arrival.node.prompt) for arrival in asked.arrivals} == {3}
    assert len({arrival.node.prompt[0] for arrival in asked.arrivals}) == 1


def test_regions_share_most_documents_and_not_all_day():
    asked = world_product(duration_s=600.0, rate_per_s=6.0)
    regions_of, days = {}, Counter()
    for arrival in asked.arrivals:
        document = arrival.node.prompt[1]
        regions_of.setdefault(document, set()).add(arrival.region)
        days[document, int(arrival.at_s / 150)] += 1
    shared = [document for document, regions in regions_of.items() if len(regions) == 3]
    assert shared and any(len(regions) == 1 for regions in regions_of.values())
    hottest = max(shared, key=lambda document: sum(days[document, part] for part in range(4)))
    assert any(days[hottest, part] == 0 for part in range(4)), "it comes, or goes"


def test_regions_peak_at_different_hours():
    asked = world_product(duration_s=600.0, rate_per_s=6.0)
    busiest = {}
    for region in ("us", "eu", "ap"):
        hours = Counter(int(a.at_s / 50) for a in asked.arrivals if a.region == RegionId(region))
        busiest[region] = max(hours, key=lambda hour: hours[hour])
    assert len(set(busiest.values())) == 3
