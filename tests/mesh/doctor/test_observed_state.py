"""What the doctor believes of what it receives: what routers and agents sent themselves."""

import asyncio
from pathlib import Path

import nats.errors
import pytest

from infra.bus import BusAddress, close, connect
from infra.topology import DEFAULT_FILE, load
from mesh.doctor.findings import (
    ENGINE_PAGE,
    ENGINE_RESULTS,
    PEER_RESULTS,
    CheckResult,
    RegionFindings,
)
from mesh.doctor.manual_commands import DemoCommands, SystemdCommands, with_causes
from mesh.doctor.observed_state import (
    ObservedMessages,
    _stored_in,
    check_writes,
    compare,
    late_or_gone,
    listen,
    prefixes_of,
)
from schemas import subjects
from schemas.control import RegionControl
from schemas.state import EngineResults, Lease, ReplicaState, encode_state
from tests.mesh.core.build import beat, digest
from tests.support.flushed import flushed
from tests.support.until import PATIENCE_S

READ_OUT = {"Nats-Stream": "HEARTBEATS", "Nats-Sequence": "7"}
FAILS = EngineResults(failed=9, of=10, in_a_row=2, what="HTTP 500")
LEASE = encode_state(Lease(region="us", owner="ap", router="r9", term=99, lease_s=1.0))


async def heard_of_both(client) -> tuple[ObservedMessages, set[str]]:
    """Of eu what was read out of a stream, and then of us what its router sent."""
    now = asyncio.get_running_loop().time
    listening = asyncio.gather(listen(client, "us", now, 0.3), prefixes_of(client, 0.3))
    await asyncio.sleep(0)
    await flushed(client)  # behind what it subscribes to
    await client.publish(subjects.leased("us"), LEASE, headers=READ_OUT)
    for region, headers in (("eu", READ_OUT), ("us", None)):
        await client.publish(subjects.digest(region), encode_state(digest(region)), headers=headers)
        await client.publish(subjects.trie(region), b"", headers=headers)
    return await listening


async def test_what_a_stream_replays_is_ignored(nats_server):
    client = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")
    async with asyncio.timeout(PATIENCE_S):
        heard, prefixes = await heard_of_both(client)
        while not (prefixes and heard.digests):  # somebody stood still: again
            heard, prefixes = await heard_of_both(client)
    await close(client)
    assert {region for region, _ in heard.digests} == prefixes == {"us"}
    assert heard.lease is None


async def test_streams_that_do_not_answer_are_asked_once():
    """Twice would take longer than the doctor gives one login, and heartbeats would be missed."""
    asked = []

    class Silent:
        def jsm(self, timeout):
            return self

        async def stream_info(self, name):
            asked.append(name)
            raise nats.errors.TimeoutError

    assert await _stored_in(Silent(), 0.0) is None
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("stored", "about"),
    [
        (None, "all"),
        ({"HEARTBEATS": 0, "LEASES": 3}, "HEARTBEATS"),
        ({"HEARTBEATS": 3, "LEASES": 0}, "LEASES"),
        ({"HEARTBEATS": 3, "LEASES": 3}, None),
        ({"HEARTBEATS": 3}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("is_heard", [True, False])
def test_streams_that_take_nothing_of_what_is_heard_are_named(stored, about, is_heard):
    observed = ObservedMessages(stored=stored)
    if is_heard:
        observed.beats, observed.digests = 2, {("us", "r1"): digest("us")}
    found = RegionFindings("us")
    check_writes(found, observed, is_expired=True)
    told = [(one.check, one.about, one.verdict) for one in found.findings]
    is_told = about is not None and (is_heard or stored is None)
    assert told == [("stream writes", about, CheckResult.BAD)] * is_told


def test_an_engine_that_is_down_beside_a_ready_one_has_a_finding_of_its_own():
    topology = load(DEFAULT_FILE)
    names = topology.region("us").replicas
    states = dict.fromkeys(names, ReplicaState.READY) | {
        names[0]: ReplicaState.DOWN,
        names[1]: ReplicaState.STARTING,
    }
    observed = ObservedMessages(
        heartbeats={name: (beat(name, state=state), 1.0) for name, state in states.items()}
    )
    found = RegionFindings("us")
    compare(found, topology, observed, 1.1)
    [down, starting, *ready] = [
        (one.check, one.verdict) for one in found.findings if one.about in names
    ]
    assert down == starting == ("engine", CheckResult.WARNING)
    assert set(ready) == {("heartbeat", CheckResult.OK)}


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        (
            {"state": ReplicaState.DOWN, "down_reason": "unreachable"},
            "down (unreachable), 0 requests in it; its agent's log says why",
        ),
        (
            {
                "state": ReplicaState.DOWN,
                "down_reason": "unreachable",
                "down_detail": "no answer within 1 s",
            },
            "down (unreachable: no answer within 1 s), 0 requests in it",
        ),
        (
            {"state": ReplicaState.STARTING, "down_detail": "no connection to h:8: refused"},
            "starting (no connection to h:8: refused), 0 requests in it",
        ),
    ],
)
def test_an_engine_that_does_not_answer_is_found_with_what_its_agent_met(fields, detail):
    topology = load(DEFAULT_FILE)
    name = topology.region("us").replicas[0]
    observed = ObservedMessages(heartbeats={name: (beat(name, **fields), 1.0)})
    found = RegionFindings("us")
    compare(found, topology, observed, 1.1)
    commands = SystemdCommands(topology, Path("mesh.toml"), Path("rendered"))
    [one] = [one for one in with_causes(found.findings, {}, commands) if one.about == name]
    assert one.detail == detail
    assert one.remedy.command == f"journalctl -n 30 -u mesh-agent@{name}"


def test_a_page_that_fails_while_its_engine_answers_is_named_with_what_to_do():
    topology = load(DEFAULT_FILE)
    problems = ["metrics: HTTP 503", "metrics: HTTP 401", "models: HTTP 404", None]
    names = topology.region("us").replicas
    observed = ObservedMessages(
        heartbeats={
            name: (beat(name, page_problem=problem), 1.0)
            for name, problem in zip(names, problems, strict=False)
        }
    )
    found = RegionFindings("us")
    compare(found, topology, observed, 1.1)
    commands = SystemdCommands(topology, Path("mesh.toml"), Path("rendered"))
    pages = [
        (one.about, one.verdict, one.detail, one.remedy.what)
        for one in with_causes(found.findings, {}, commands)
        if one.check == ENGINE_PAGE
    ]
    assert [name for name, *_ in pages] == list(names[: len(pages)])
    assert len(pages) == min(3, len(names))
    assert {verdict for _, verdict, *_ in pages} == {CheckResult.WARNING}
    for (*_, detail, what), says, remedy in zip(
        pages,
        ("metrics fails (HTTP 503)", "(HTTP 401)", "/v1/models fails (HTTP 404)"),
        ("--metrics-url", "--engine-key-file", "--model"),
        strict=False,
    ):
        assert says in detail
        assert remedy in what


def test_an_engine_of_another_kind_than_its_agent_was_told_is_named():
    topology = load(DEFAULT_FILE)
    name = topology.region("us").replicas[0]
    other = "looks like llamacpp, not vllm: give --engine-kind llamacpp"
    seen = {name: (beat(name, page_problem=f"metrics: {other}"), 1.0)}
    found = RegionFindings("us")
    compare(found, topology, ObservedMessages(heartbeats=seen), 1.1)
    commands = SystemdCommands(topology, Path("mesh.toml"), Path("rendered"))
    [page] = [one for one in with_causes(found.findings, {}, commands) if one.check == ENGINE_PAGE]
    assert page.detail == f"its engine {other}; until then its agent counts its own requests"
    assert "ENGINE_KIND" in page.remedy.what


def test_an_engine_that_fails_its_requests_is_named_with_what_to_do():
    topology = load(DEFAULT_FILE)
    [fails, well, *others] = topology.region("us").replicas
    beats = {name: beat(name) for name in (fails, well, *others)}
    beats[fails] = beat(fails, results=FAILS)
    beats[well] = beat(
        well, results=EngineResults(failed=2, of=40, in_a_row=1, what="no connection")
    )
    observed = ObservedMessages(heartbeats={name: (each, 1.0) for name, each in beats.items()})
    found = RegionFindings("us")
    compare(found, topology, observed, 1.1)
    own = SystemdCommands(topology, Path("mesh.toml"), Path("rendered"))
    simulated, given = (
        DemoCommands(Path("mesh.toml"), Path("c"), Path("logs"), pids, lambda: Path("nats"))
        for pids in ({f"engine-{fails}": 7}, {})
    )
    for commands, command in (
        (own, f"journalctl -n 30 -u mesh-agent@{fails}"),
        (simulated, f"tail -n 30 logs/engine-{fails}.log"),
        (given, f"tail -n 30 logs/agent-{fails}.log"),
    ):
        [finding] = [
            one for one in with_causes(found.findings, {}, commands) if one.check == ENGINE_RESULTS
        ]
        assert (finding.about, finding.verdict) == (fails, CheckResult.WARNING)
        assert finding.detail == "fails: 9 of its last 10 requests, HTTP 500"
        assert finding.remedy.command == command
        assert "send it one yourself, read its own log, and restart it" in finding.remedy.what
        assert "does not answer" not in finding.remedy.what
    [hint] = [one.detail for one in found.findings if (one.check, one.about) == ("heartbeat", well)]
    assert "failed 2 of its last 40 requests, no connection" in hint


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"too_many": 3}, "answers 429 to more than it runs; it is given at most 3 at once"),
        ({"pending": 50, "outstanding": 2}, "its page tells of 50 requests, its agent has sent 2"),
        (
            {"results": EngineResults(failed=4, of=20, in_a_row=0, what="a cut answer")},
            "fails: 4 of its last 20 requests, a cut answer",
        ),
        ({}, "slow: tokens 7.0× its like; routers give it little work"),
    ],
)
def test_what_agents_and_routers_know_of_an_engines_answers_is_a_warning(fields, says):
    topology = load(DEFAULT_FILE)
    name = topology.region("us").replicas[0]
    avoids = digest("us", avoided={name: "slow: tokens 7.0× its like"})
    observed = ObservedMessages(
        heartbeats={name: (beat(name, **fields), 1.0)}, digests={("us", "r1"): avoids}
    )
    found = RegionFindings("us")
    compare(found, topology, observed, 1.1)
    [one] = [one for one in found.findings if one.check == ENGINE_RESULTS]
    assert (one.about, one.verdict) == (name, CheckResult.WARNING)
    assert one.detail.startswith(says)


def test_where_every_ready_replica_fails_its_requests_it_is_bad():
    topology = load(DEFAULT_FILE)
    [down, *others] = topology.region("us").replicas
    beats = {name: beat(name, results=FAILS) for name in others}
    beats[down] = beat(down, state=ReplicaState.DOWN, down_reason="unreachable")
    some = EngineResults(failed=4, of=20, in_a_row=0, what="a cut answer")
    for last, verdict in (
        (beats[others[-1]], CheckResult.BAD),
        (beat(others[-1]), CheckResult.WARNING),
        (beat(others[-1], results=some), CheckResult.WARNING),
    ):
        heartbeats = {name: (each, 1.0) for name, each in (beats | {others[-1]: last}).items()}
        found = RegionFindings("us")
        compare(found, topology, ObservedMessages(heartbeats=heartbeats), 1.1)
        told = {
            (one.check, one.about): one.verdict
            for one in found.findings
            if one.check in ("engine", ENGINE_RESULTS)
        }
        failing = {(ENGINE_RESULTS, name) for name, one in heartbeats.items() if one[0].results}
        assert told == dict.fromkeys({("engine", down), *failing}, verdict)


def test_a_peer_that_fails_what_is_forwarded_there_is_a_warning():
    why = "failing: 3 of its last 3, HTTP 500"
    digests = {
        ("us", "r1"): digest("us", avoided_peers={"eu": why, "stranger": why}),
        ("us", "r2"): digest("us", router="r2"),
        ("eu", "r1"): digest("eu", avoided_peers={"ap": "not the business of us"}),
    }
    found = RegionFindings("us")
    compare(found, load(DEFAULT_FILE), ObservedMessages(digests=digests), 1.1)
    [one] = [one for one in found.findings if one.check == PEER_RESULTS]
    assert (one.about, one.peer, one.verdict) == ("eu", "eu", CheckResult.WARNING)
    assert one.detail == f"{why}; routers forward little there"


def test_an_engine_that_is_down_is_not_said_to_fail_besides():
    topology = load(DEFAULT_FILE)
    name = topology.region("us").replicas[0]
    down = beat(name, state=ReplicaState.DOWN, down_reason="unreachable", results=FAILS)
    found = RegionFindings("us")
    compare(found, topology, ObservedMessages(heartbeats={name: (down, 1.0)}), 1.1)
    assert [one.check for one in found.findings if one.about == name] == ["engine"]


def test_a_drained_replica_is_a_warning_that_says_who_and_how_to_end_it():
    topology = load(DEFAULT_FILE)
    name = topology.region("us").replicas[0]
    drained = beat(name, state=ReplicaState.DRAINING)
    observed = ObservedMessages(heartbeats={name: (drained, 1.0)})
    orders = RegionControl(region="us", drained=(name,), by="ann@host", reason="new fan")
    for given, verdict, detail in (
        (orders, CheckResult.WARNING, f"`mesh undrain {name}` ends that (ann@host: new fan)"),
        (None, CheckResult.BAD, "keeps an order whose store was lost"),
    ):
        found = RegionFindings("us")
        compare(found, topology, observed, 1.1, given)
        [finding] = [one for one in found.findings if one.about == name]
        assert finding.verdict is verdict
        assert detail in finding.detail


@pytest.mark.parametrize(
    ("connected", "says"),
    [
        (None, ": stopped, cut off or starved of CPU"),
        ({"r1"}, ", and connected to its nats-server: stopped, hanging or starved of CPU"),
        ({"r1-0", "r9"}, ", and connected to its nats-server: stopped, hanging or starved of CPU"),
        ({"r9"}, ", and not connected to its nats-server: ended or cut off"),
    ],
)
def test_of_a_router_that_is_not_heard_it_says_what_is_known(connected, says):
    found = RegionFindings("us")
    compare(found, load(DEFAULT_FILE), ObservedMessages(listen_s=8.0), 1.0)
    late_or_gone(found, connected)
    told = {one.detail for one in found.findings if one.about == "r1"}
    assert told == {f"not heard for 8 s{says}"}
