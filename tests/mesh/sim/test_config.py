"""A world that can't be is refused with what would fit."""

import pytest

from mesh.core.membership.region_digest import CHANGE_S_MIN
from mesh.sim.config import WorldConfig
from mesh.sim.rtt import RttInvalid
from tests.mesh.sim.build import EU, US, config


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"regions": {}}, "at least one replica"),
        ({"regions": {US: ()}}, "at least one replica"),
        ({"regions": {US: ("l5",)}}, "l4-llama3.1-8b"),
        ({"regions": {US: ("l4-llama3.1-8b",)}, "loss": 1.0}, "loss"),
        ({"regions": {US: ("l4-llama3.1-8b",)}, "heartbeat_s": 0.0}, "heartbeat_s"),
        ({"regions": {US: ("l4-llama3.1-8b",)}, "gossip_s": -1.0}, "gossip_s"),
        ({"regions": {US: ("l4-llama3.1-8b",)}, "jitter_s": float("nan")}, "jitter_s"),
        ({"regions": {US: ("l4-llama3.1-8b",)}, "topology": "central:eu"}, "eu is none of us"),
        ({"regions": {US: ("l4-llama3.1-8b",)}, "topology": "star"}, "region-local"),
    ],
)
def test_a_bad_world_is_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        WorldConfig(**fields)


def test_a_pair_without_a_round_trip_is_refused():
    with pytest.raises(RttInvalid, match="us and moon"):
        WorldConfig(regions={US: ("l4-llama3.1-8b",), "moon": ("l4-llama3.1-8b",)})


def test_what_counts_as_late_follows_the_cadence():
    live = config({US: 1, EU: 1}).router_settings()
    slow = config({US: 1, EU: 1}, heartbeat_s=1.0, gossip_s=5.0).router_settings()
    assert (live.heartbeat_late_s, live.heartbeat_lost_s, live.digest_lost_s) == (0.3, 2.0, 1.0)
    assert (slow.heartbeat_late_s, slow.heartbeat_lost_s, slow.digest_lost_s) == (3.0, 20.0, 50.0)
    assert (slow.digest_s, slow.trie_s) == (5.0, 50 * live.trie_s)
    assert slow.digest_rest_s == slow.digest_s and live.digest_rest_s == live.digest_s


def test_gossip_without_delay_is_published_at_the_next_tick():
    at_once = config({US: 1, EU: 1}, gossip_s=0.0).router_settings()
    assert max(at_once.digest_s, at_once.trie_s) < CHANGE_S_MIN
    assert at_once.digest_lost_s == 1.0
