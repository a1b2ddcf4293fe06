"""A deliberately wrong router, and then a wrong server, against the rendered permissions.

Regions: eu is confined to `eu`; ap carries `eu` as well; us carries `us` alone.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from infra.nats import permissions
from infra.nats.region_config import ACCOUNT
from infra.topology import parse
from schemas import subjects
from tests.support.flushed import flushed
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions
from tests.support.taps import Taps, add_tap
from tests.support.until import PATIENCE_S, until

PROMPT = b'{"messages": [{"role": "user", "content": "for eyes in the EU only"}]}'
TABLES = {
    "eu": 'residency = ["eu"]\nconfined_to = ["eu"]',
    "ap": 'residency = ["ap", "eu"]',
    "us": 'residency = ["us"]',
}
# Wherever a process of us would take a prompt from, and where nobody of eu has a label to go under.
LEAKS = (
    subjects.ingress("us"),
    subjects.ingress_within("us", "us"),
    subjects.ingress_within("us", "eu"),
    subjects.offline("us"),
    subjects.offline_within("us", "eu"),
    subjects.body("us", "us-0"),
    subjects.work("us", "us-0"),
    subjects.ingress("ap"),
    subjects.ingress_within("ap", "ap"),
    subjects.offline("ap"),
    subjects.offline_within("ap", "ap"),
)
PREFIXES = subjects.trie("eu"), subjects.siblings("eu")


def labelled_toml() -> str:
    return mesh_toml(more=TABLES)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[NatsRegions]:
    """As rendered, but for the tap."""
    directory = tmp_path_factory.mktemp("mesh")
    with running_regions(
        directory, toml=labelled_toml(), edit=lambda _, tree: add_tap(tree)
    ) as regions:
        yield regions


@pytest.fixture(scope="module")
def bought(tmp_path_factory) -> Iterator[NatsRegions]:
    """Region eu's own server exports everything to us, too; us guards itself as rendered."""

    def edit(name: str, tree: dict[str, Any]) -> None:
        add_tap(tree)
        if name == "eu":
            accounts = tree["accounts"]
            for subject in (*LEAKS[:7], *PREFIXES):
                accounts[ACCOUNT]["exports"].append({"stream": subject, "accounts": ["LINK-us"]})
                stream = {"account": ACCOUNT, "subject": subject}
                accounts["LINK-us"]["imports"].append({"stream": stream})

    directory = tmp_path_factory.mktemp("bought")
    with running_regions(directory, toml=labelled_toml(), edit=edit) as regions:
        yield regions


async def test_the_bus_refuses_a_wrong_router_and_logs_it(mesh: NatsRegions):
    complaints: list[str] = []
    router = await mesh.connect(
        "eu", "router", on_error=lambda problem: complaints.append(str(problem).lower())
    )
    async with Taps(mesh) as taps:
        for region in ("us", "ap"):
            await taps.listen(region, ">")
            await taps.fence("eu", region)
        inbox = subjects.inbox("eu", "r1", "7")
        for subject in LEAKS:
            await router.publish(subject, PROMPT, reply=inbox, headers={"Mesh-Residency": "eu"})
        await router.publish(subjects.ingress_within("ap", "eu"), PROMPT, reply=inbox)
        await flushed(router)
        await taps.fence("eu", "us")
        await taps.fence("eu", "ap")
        assert taps.heard_of("us", LEAKS) == set()
        assert taps.heard_of("ap", LEAKS) == set()
        assert taps.heard_of("ap", [subjects.ingress_within("ap", "eu")]) != set()
    await until(lambda: len(complaints) == len(LEAKS))
    for subject in LEAKS:
        await until(lambda leak=subject: mesh.forbade("eu", "router", leak))
        assert any(f'publish to "{subject}"'.lower() in one for one in complaints)
    await router.close()


async def test_even_whom_nothing_is_forbidden_gets_no_prompt_out(mesh: NatsRegions):
    """The tap is a router without a rule: then the link itself does not carry it."""
    async with Taps(mesh) as taps:
        for region in ("us", "ap"):
            await taps.listen(region, ">")
            await taps.fence("eu", region)
        await taps.say("eu", [*LEAKS, subjects.trie("eu"), subjects.siblings("eu")])
        for region in ("us", "ap"):
            await taps.fence("eu", region)
            assert taps.heard_of(region, [*LEAKS, subjects.siblings("eu")]) == set()
        assert taps.heard_of("ap", [subjects.trie("eu")]) == {subjects.trie("eu")}
        assert taps.heard_of("us", [subjects.trie("eu")]) == set()


async def test_a_server_that_would_let_it_out_finds_no_way_in(bought: NatsRegions):
    async with Taps(bought) as taps:
        await taps.listen("us", ">")
        await taps.fence("eu", "us")
        await taps.say("eu", [*LEAKS[:7], *PREFIXES])
        await taps.fence("eu", "us")
        assert taps.heard_of("us", [*LEAKS, *PREFIXES]) == set()


async def test_prefixes_of_a_confined_region_cannot_be_requested(mesh: NatsRegions):
    """Neither by who may not know them, nor in a name whose owner may: a sibling's least of all."""
    forbidden = [("us", asker) for asker in ("us", "ap", "eu")] + [("ap", "eu"), ("ap", "us")]
    async with Taps(mesh) as taps:
        await taps.listen("eu", subjects.snapshot("eu", "*"))
        await taps.listen("eu", subjects.alive("*", "*"))
        for region in ("us", "ap"):
            await taps.fence(region, "eu")
        for region, asker in forbidden:
            await taps.say(region, [subjects.snapshot("eu", asker)])
        for region in ("us", "ap"):
            await taps.fence(region, "eu")
        questions = [subjects.snapshot("eu", asker) for _, asker in forbidden]
        assert taps.heard_of("eu", questions) == set()
        await taps.until_heard(
            "eu", subjects.snapshot("eu", "ap"), lambda subject: taps.say("ap", [subject])
        )


async def test_an_honest_mistake_with_a_label_is_refused_too(mesh: NatsRegions):
    """us is confined to nothing; still, under the label `eu` nothing can be sent to who lacks it,
    and what it may send goes through."""
    refused = asyncio.Event()
    router = await mesh.connect("ap", "router", on_error=lambda _: refused.set())
    await router.publish(subjects.ingress_within("us", "eu"), PROMPT)
    async with asyncio.timeout(PATIENCE_S):
        await refused.wait()
    await until(lambda: mesh.forbade("ap", "router", subjects.ingress_within("us", "eu")))
    async with Taps(mesh) as taps:
        await taps.listen("us", ">")
        await taps.listen("eu", ">")
        await taps.fence("ap", "us")
        good = subjects.ingress_within("us", "us"), subjects.ingress("us")
        for subject in good:
            await router.publish(subject, b"hello")
        await flushed(router)
        await taps.fence("ap", "us")
        assert taps.heard_of("us", good) == set(good)
    await router.close()


def test_without_labels_everything_is_rendered_as_before():
    ground = parse(mesh_toml(), "mesh.toml").ground
    assert permissions.router("us", ground) == permissions.router("us")
    assert permissions.allowed_across("us", "eu", ground) == permissions.allowed_across("us", "eu")


def test_all_that_a_confined_region_may_publish():
    ground = parse(labelled_toml(), "mesh.toml").ground
    assert permissions.allowed_across("eu", "us", ground) == (
        "_INBOX.us.>",
        "mesh.eu.gossip.digest",
        "mesh.eu.gossip.lease",
        "mesh.eu.gossip.limits",
        "mesh.eu.gossip.offline",
        "mesh.eu.heartbeat.*",
        "mesh.eu.router.*.alive",
        "mesh.us.gossip.snapshot.eu",
        "mesh.us.lease.owner",
        "mesh.us.ping",
        "mesh.us.replica.*.cancel",
        "mesh.us.replica.*.credit",
    )
    assert not any(
        "mesh.eu.gossip" in one for one in permissions.allowed_across("us", "eu", ground)
    )
    assert "mesh.eu.gossip.snapshot.ap" in permissions.allowed_across("ap", "eu", ground)
    assert "mesh.ap.ingress.eu" in permissions.allowed_across("eu", "ap", ground)


def test_an_adopter_sends_prompts_only_to_regions_that_carry_its_labels():
    ground = parse(labelled_toml(), "mesh.toml").ground
    anyone = subjects.work("{}", "*")
    assert anyone.format("ap") in permissions.allowed_across("eu", "ap", ground)
    assert anyone.format("us") not in permissions.allowed_across("eu", "us", ground)
    assert anyone.format("eu") in permissions.allowed_across("us", "eu", ground)
    said = [one for one in permissions.router("eu", ground).publish if one.endswith(".work")]
    assert sorted(said) == [anyone.format("ap"), anyone.format("eu")]
    # To be adopted, a confined region's lease crosses to all: it says nothing of prompts.
    assert subjects.lease("eu") in permissions.allowed_across("us", "eu", ground)
    assert subjects.leased("eu") in permissions.allowed_across("eu", "us", ground)
