"""`[models."NAME"]` in a mesh.toml: what it means, each mistake with its place, reading again."""

import tomllib
from dataclasses import replace

import jsonschema
import pytest

from docs.topology_schema import document
from infra.address import Address
from infra.bus import BusAddress
from infra.toml_positions import key_path, key_text
from infra.topology import DEFAULT_FILE, TopologyError, parse
from mesh.core.model.model_targets import ModelRule
from mesh.core.model.settings import RouterSettings
from mesh.runtime.config import RouterConfig, router_settings
from mesh.runtime.mesh_file import routing_problems
from mesh.runtime.reload import reloaded
from mesh.runtime.routing_in_force import ordered_settings

DEFAULT = DEFAULT_FILE.read_text()
FIRST = DEFAULT.count("\n") + 2  # the line of the first table that is added
NAME = "mistralai/Mistral-7B-Instruct-v0.3"
RIGHT = f"""
[models."chat"]
to = {{ "{NAME}" = 0.95, "next: 2" = 0.05 }}
shadow = {{ "third" = 0.01 }}
slo_ttft_ms = 800

[models.fast]
to = "{NAME}"

[models."{NAME}"]
policy = "least-load"
queue_delay_s_max = 3.5
hold_max = 100
"""


def read(tables):
    return parse(DEFAULT + "\n" + tables, "mesh.toml", [routing_problems])


def test_the_tables_become_rules_of_every_region():
    rules = router_settings(read(RIGHT), "us").models
    assert rules == router_settings(read(RIGHT), "eu").models
    assert rules == (
        ModelRule(
            name="chat",
            to=((NAME, 0.95), ("next: 2", 0.05)),
            shadow=(("third", 0.01),),
            slo_ttft_s=0.8,
        ),
        ModelRule(name="fast", to=((NAME, 1.0),)),
        ModelRule(name=NAME, policy="least-load", queue_delay_s_max=3.5, hold_max=100),
    )
    jsonschema.validate(tomllib.loads(DEFAULT + RIGHT), document())


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ('to = "chat"', 1, "names itself; name another model"),
        ('shadow = { "chat" = 1 }', 1, "names itself"),
        ('to = { "a.b" = 0.5, "c" = 0.4 }', 1, "the shares make 0.9; they must make 1"),
        ('to = { "a" = 1.5 }', 1, "must be at most 1"),
        ("to = {}", 1, "write a model's name, or shares of up to 8 that make 1"),
        ("to = 3", 1, "write a model's name, or shares of up to 8 that make 1"),
        ('to = { "a" = true }', 1, "must be a number"),
        ('to = "fast"', 1, '"fast" is an alias; name a model that engines serve'),
        ('to = "a"\nshadow = { "fast" = 0.1 }', 2, '"fast" is an alias'),
        ('to = "a"\npolicy = "mesh"', 2, "belongs to the table of the model that serves"),
        ('to = "a"\nhold_max = 3', 2, "belongs to the table of the model that serves"),
        ('policy = "fastest"', 1, "unknown policy 'fastest'"),
        ("hold_max = 0", 1, "must be at least 1"),
        ("slo_ttft_ms = 0.5", 1, "must be a whole number"),
        ("queue_delay_s_max = -1", 1, "must be at least 0"),
        ('too = "a"', 1, 'unknown key; did you mean "to"?'),
        ("shadow = { " + ", ".join(f"m{n} = 0.1" for n in range(5)) + " }", 1, "up to 4 models"),
    ],
)
def test_a_mistake_is_told_with_its_line(table, line, said):
    text = f'[models."x.chat"]\n{table}\n[models.fast]\nto = "real"\n'.replace('"chat"', '"x.chat"')
    with pytest.raises(TopologyError) as caught:
        read(text)
    [told] = str(caught.value).splitlines()
    assert told.startswith(f"mesh.toml:{FIRST + line}:"), told
    assert said in told and "models." in told


def test_mistakes_of_single_models_are_told_with_all_others():
    with pytest.raises(TopologyError) as caught:
        read('[models.a]\nto = "b"\n[models.b]\nto = "a"\n[models.c]\npolicy = "x"\n[nats]\nz = 1')
    assert len(str(caught.value).splitlines()) == 4


def test_keys_are_written_and_read_as_toml_has_them():
    for names in (("a", "b-c", "0"), ("models", 'x."y": z\\', "to"), ("models", NAME, "to")):
        assert key_path(f"{key_text(*names)}: what to: do") == names
    assert key_path("links: nothing") == ("links",)


def config(settings):
    return RouterConfig(
        region="us",
        router="r1",
        peers=(),
        http_host="127.0.0.1",
        http_port=0,
        bus=BusAddress("nats://127.0.0.1:1"),
        settings=settings,
        hash_key="k",
        epoch=1,
        seed=1,
        metrics=Address("127.0.0.1", 1),
    )


def test_a_file_that_is_read_again_changes_them_and_orders_over_routing_do_not():
    old, new = config(RouterSettings()), config(router_settings(read(RIGHT), "us"))
    found = reloaded(old, new)
    assert found.changed == ("models",) and not found.waiting
    assert found.config.settings.models == new.settings.models
    ordered = ordered_settings(found.config.settings, {"policy": "round-robin"})
    assert ordered.models == new.settings.models
    back = reloaded(found.config, replace(new, settings=RouterSettings()))
    assert back.config.settings.models == ()
