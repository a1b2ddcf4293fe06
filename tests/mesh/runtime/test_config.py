"""A router's settings: the command line over the region's table over the mesh's over defaults."""

import re
from dataclasses import replace

import pytest

from infra.address import Address
from infra.bus import BusAddress
from infra.topology import DEFAULT_FILE, TopologyError, parse
from mesh.core.model.geo import GeoLocation
from mesh.core.model.settings import RouterSettings
from mesh.runtime.config import RegionEntry, RouterConfig, region_entries, router_settings
from mesh.runtime.mesh_file import routing_problems
from mesh.runtime.reload import reloaded
from schemas.exchange import Priority
from schemas.ids import RegionId, RouterId
from schemas.settings import BLIND, Pushing, PushingKind, RoutingTable

US, EU = RegionId("us"), RegionId("eu")
DEFAULT = DEFAULT_FILE.read_text()


def topology(whole="", us=""):
    text = f"[routing]\n{whole}\n{DEFAULT}\n[regions.us.routing]\n{us}\n"
    return parse(text, "mesh.toml")


CHOSEN = topology(
    whole='policy = "least-load"\npushing = "outstanding:8"',
    us='policy = "cache-aware:0.3/64/1.5"\npolicy_by_priority = {low = "round-robin"}',
)


# What each link carries by default, 10 Mbit/s, in bytes a second.
LINKS = (("ap", 1.25e6), ("eu", 1.25e6))


def test_where_nothing_is_chosen_the_defaults_hold():
    assert router_settings(parse(DEFAULT, "mesh.toml"), US) == RouterSettings(links=LINKS)


@pytest.mark.parametrize(("kib", "inside"), [(16, 4_194_304), (0, 0)])
def test_gossip_is_given_by_link_and_none_is_none_for_siblings_too(kib, inside):
    settings = router_settings(topology(whole=f"gossip_kib_per_s = {kib}"), EU)
    assert (settings.trie_bytes_per_s, settings.siblings_bytes_per_s) == (1024 * kib, inside)


def test_a_router_that_may_tell_nothing_tells_nothing_whatever_the_file_says():
    known = topology(whole="gossip_kib_per_s = 16")
    assert router_settings(known, EU, trie_bytes_per_s=0).trie_bytes_per_s == 0


def test_the_region_s_table_goes_before_the_mesh_s():
    us, eu = router_settings(CHOSEN, US, hold_max=7), router_settings(CHOSEN, EU)
    assert us == RouterSettings(
        policy="cache-aware:0.3/64/1.5",
        policy_by_priority=((Priority.LOW, "round-robin"),),
        pushing=Pushing(PushingKind.OUTSTANDING, 8),
        hold_max=7,
        links=LINKS,
    )
    assert (eu.policy, eu.policy_by_priority) == ("least-load", ())


def test_the_command_line_goes_before_both():
    given = RoutingTable(policy="round-robin", pushing="blind")
    wanted = RouterSettings(policy="round-robin", pushing=BLIND, links=LINKS)
    assert router_settings(CHOSEN, US, given) == wanted


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"whole": 'policy = "fast"'}, "routing.policy: unknown policy 'fast'; there are "),
        (
            {"us": 'policy = "leastload"'},
            "regions.us.routing.policy: unknown policy 'leastload'; did you mean \"least-load\"?",
        ),
        ({"us": 'policy = "round-robin:1"'}, "regions.us.routing.policy: policy 'round-robin' has"),
        ({"us": 'policy_by_priority = {low = "x"}'}, "regions.us.routing.policy_by_priority: un"),
    ],
)
def test_what_only_a_router_knows_is_checked_before_one_starts(tables, said):
    for line in routing_problems(topology(**tables)):
        assert line.startswith(said)
    with pytest.raises(TopologyError, match=rf"^mesh\.toml:\d+:\d+: {re.escape(said)}"):
        router_settings(topology(**tables), US)


def test_hops_and_the_own_goal_are_the_operators():
    chosen = topology(whole="hops_max = 0\nown_ttft_goal_ms = 800", us="own_ttft_goal_ms = 250")
    us, eu = router_settings(chosen, US), router_settings(chosen, EU)
    assert (us.hops_max, us.own_ttft_goal_s) == (0, 0.25)
    assert (eu.hops_max, eu.own_ttft_goal_s) == (0, 0.8)


def test_how_clients_come_to_a_region_is_told_as_the_file_says():
    text = DEFAULT.replace('endpoint = "http://127.0.0.1:8102/v1"\nlocation = [50.1, 8.7]\n', "")
    told = region_entries(parse(text, "mesh.toml"))
    assert told[US] == RegionEntry("http://127.0.0.1:8101/v1", GeoLocation(38.9, -77.5))
    assert told[EU] == RegionEntry()


def test_routers_know_the_ground_if_the_file_says_any():
    labelled = DEFAULT.replace("[regions.eu]\n", '[regions.eu]\nresidency = ["eu"]\n')
    ground = router_settings(parse(labelled, "mesh.toml"), US).ground
    assert ground.carried_by(RegionId("eu")) == {"eu"}
    assert ground.carried_by(US) == set()


def test_how_long_a_line_may_be_is_the_operators():
    chosen = topology(whole="queue_delay_s_max = 30", us="queue_delay_s_max = 0")
    us, eu = router_settings(chosen, US), router_settings(chosen, EU)
    assert (us.queue_delay_s_max, eu.queue_delay_s_max) == (0.0, 30.0)


def test_tenants_have_the_weights_of_the_file_and_others_one():
    tenants = "[tenants.acme]\nweight = 3\n[tenants.beta]\n"
    assert router_settings(parse(DEFAULT + tenants, "mesh.toml"), US).tenant_weights == (
        ("acme", 3.0),
    )


@pytest.mark.parametrize("weight", ["0", "-1.0", "100.1", "inf", "nan", "true", '"3"'])
def test_a_weight_that_is_none_is_refused_with_its_place(weight):
    text = DEFAULT + f"[tenants.acme]\nweight = {weight}\n"
    with pytest.raises(TopologyError, match=r"mesh.toml:\d+:\d+: tenants.acme.weight: "):
        parse(text, "mesh.toml")


def test_a_reload_names_what_needs_a_restart_also_where_one_router_has_no_peer():
    old = RouterConfig(
        region=US, router=RouterId("r1"), peers=(), http_host="", http_port=0,
        bus=BusAddress("nats://127.0.0.1:4222"), hash_key="key", epoch=1, seed=1,
        settings=RouterSettings(trie_bytes_per_s=0),
    )  # fmt: skip
    silent = replace(old.settings, siblings_bytes_per_s=0)
    found = reloaded(old, replace(old, settings=silent, console=Address("127.0.0.1", 8200)))
    assert (found.changed, found.waiting) == ((), ("routing.gossip_kib_per_s", "console"))
    assert found.config == old
    assert reloaded(old, old).waiting == ()
