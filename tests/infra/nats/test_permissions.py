"""What the channel table allows, read back from the permissions made of it."""

import itertools

import pytest

from infra.nats import permissions
from infra.nats.permissions import covers
from schemas import subjects
from schemas.catalog import CHANNELS, Channel, Role
from schemas.residency import ground
from tests.support.link_speech import everything, overlaps, unspoken

REGIONS = ("ap", "eu", "us")
PAIRS = list(itertools.permutations(REGIONS, 2))
OPERATOR = Role.OPERATOR
PEERS = {Role.PEER_AGENT, Role.PEER_ROUTER}
NAMES = {"region": "us", "replica": "us-0", "router": "r1", "stream": "7"}
NAMES |= {"label": "any", "asker": "us"}
EVERYWHERE = ground(dict.fromkeys(REGIONS, ("any",)))  # one label that all carry


def may(allowed: tuple[str, ...], subject: str) -> bool:
    """Whether some pattern covers it; `subject` may be one in a queue group: "subject group"."""
    return any(covers(pattern, subject) for pattern in allowed)


@pytest.mark.parametrize("row", CHANNELS, ids=lambda row: row.name)
def test_a_channel_is_open_to_the_roles_in_its_row_and_closed_to_the_others(row: Channel):
    says = row.subject(**(NAMES | {"region": "eu"} if Role.PEER_ROUTER in row.publish else NAMES))
    subject = row.subject(**NAMES)
    agent, router = permissions.agent("us", "us-0"), permissions.router("us", EVERYWHERE)
    operator = permissions.watcher(Role.OPERATOR)
    assert may(agent.publish, subject) == bool(row.publish & {Role.AGENT, Role.PEER_AGENT})
    operator = permissions.watcher(Role.OPERATOR)
    subscribed = subject if row.queue is None else f"{subject} {row.queue}"
    assert may(agent.subscribe, subscribed) == bool(row.subscribe & {Role.AGENT, Role.PEER_AGENT})
    assert may(router.publish, says) == bool(row.publish & {Role.ROUTER, Role.PEER_ROUTER})
    assert may(router.subscribe, subscribed) == bool(
        row.subscribe & {Role.ROUTER, Role.PEER_ROUTER}
    )
    for role, allowed in (
        (Role.OBSERVER, permissions.watcher(Role.OBSERVER)),
        (OPERATOR, operator),
    ):
        assert may(allowed.subscribe, subject) == (role in row.subscribe or row.name == "inbox")
        assert may(allowed.publish, subject) == (role in row.publish)


@pytest.mark.parametrize("row", [row for row in CHANNELS if row.queue], ids=lambda row: row.name)
def test_work_of_a_queue_group_is_received_in_that_group_only(row: Channel):
    """Else whoever may listen could take work away, or read it beside those who share it."""
    subject = row.subject(**NAMES)
    for allowed in (permissions.agent("us", "us-0"), permissions.router("us", EVERYWHERE)):
        assert not may(allowed.subscribe, subject)
        assert not may(allowed.subscribe, f"{subject} of-mine")


def test_two_agents_share_only_inboxes_services_and_signs_of_life():
    one, two = permissions.agent("us", "us-0"), permissions.agent("us", "us-1")
    assert set(one.publish) & set(two.publish) == {"_INBOX.*.*.*", "_R_.>"}
    shared = {pattern.split(".")[0] for pattern in set(one.subscribe) & set(two.subscribe)}
    assert shared == {"$SRV", "mesh"}
    mine = f"{subjects.work('us', 'us-0')} agent"
    assert may(one.subscribe, mine)
    assert not any(overlaps(pattern, mine) for pattern in two.subscribe)


def test_an_agent_receives_no_inbox_and_no_stream():
    allowed = permissions.agent("us", "us-0")
    forbidden = ("_INBOX.>", "$JS.>", "$SYS.>")
    assert not any(overlaps(a, b) for a in allowed.subscribe for b in forbidden)
    assert not any(overlaps(a, "$JS.>") for a in allowed.publish)


def test_a_router_may_read_streams_and_make_none():
    publish = permissions.router("us").publish
    calls = {pattern for pattern in publish if pattern.startswith("$")}
    assert calls == {
        "$JS.API.DIRECT.GET.CONTROL.>",
        "$JS.API.DIRECT.GET.KEYS.>",
        "$JS.API.DIRECT.GET.HEARTBEATS.>",
        "$JS.API.STREAM.INFO.CONTROL",
        "$JS.API.STREAM.INFO.KEYS",
        "$JS.API.STREAM.INFO.HEARTBEATS",
        "$JS.API.STREAM.INFO.LEASES",
        "$JS.API.STREAM.INFO.USAGE",
        "$JS.API.STREAM.MSG.GET.USAGE",
    }


def test_only_routers_write_accounts_and_only_they_and_operators_read_them():
    written = subjects.usage("us", "r1", "2026-11-29", "1-0")
    others = {
        "observer": permissions.watcher(Role.OBSERVER),
        "operator": permissions.watcher(Role.OPERATOR),
        "admin": permissions.admin(),
        "agent": permissions.agent("us", "us-0"),
        "batch": permissions.batch(),
    }
    assert may(permissions.router("us").publish, written)
    assert not any(overlaps(a, written) for each in others.values() for a in each.publish)
    assert not any(overlaps(a, written) for a in permissions.allowed_across("eu", "us"))
    read = "$JS.API.STREAM.MSG.GET.USAGE"
    assert [name for name, each in others.items() if may(each.publish, read)] == ["operator"]
    assert may(permissions.router("us").publish, read)  # when they start: what is left of limits


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (subjects.control("us"), subjects.controlled("us")),
        (subjects.keys("us"), subjects.keyed("us")),
    ],
)
def test_only_an_admin_may_write_orders_and_keys(write, written):
    others = (
        *(permissions.watcher(role) for role in (Role.OBSERVER, Role.OPERATOR)),
        *(permissions.router("us"), permissions.agent("us", "us-0"), permissions.setup()),
        *(permissions.batch(), permissions.batch_setup(), permissions.batch_observer()),
    )
    assert may(permissions.admin().publish, write)
    assert not any(overlaps(a, write) for each in others for a in each.publish)
    assert not any(overlaps(a, write) for a in permissions.allowed_across("eu", "us"))
    assert not any(overlaps(a, written) for a in permissions.router("us").publish)


@pytest.mark.parametrize(
    "allowed", [permissions.watcher(Role.OBSERVER), permissions.watcher(Role.OPERATOR)]
)
def test_watchers_publish_questions_alone_and_receive_state_alone(allowed):
    of_the_mesh = [one for one in allowed.publish if one.startswith(("mesh.", "_INBOX."))]
    assert of_the_mesh == [subjects.requests("*")]
    assert not any(overlaps(a, "*.>") for a in allowed.publish if a[0] in "*>")
    writes = ("CREATE", "UPDATE", "DELETE", "PURGE", "NEXT", "RESTORE", "SNAPSHOT")
    assert not any(word in pattern.split(".") for pattern in allowed.publish for word in writes)
    hidden = [row.subject() for row in CHANNELS if row.prompts or "asker" in row.template]
    hidden += [subjects.cancel("*", "*"), subjects.credit("*", "*"), subjects.name("*", "*")]
    assert not any(overlaps(a, b) for a in allowed.subscribe for b in hidden)


def test_only_observers_write_and_read_the_inboxes_of_checks():
    inbox = f"{subjects.INBOX_CHECK}.x"
    observer = permissions.watcher(Role.OBSERVER)
    assert may(observer.publish, inbox) and may(observer.subscribe, inbox)
    others = (
        *(permissions.watcher(Role.OPERATOR), permissions.admin(), permissions.setup()),
        *(permissions.router("us"), permissions.agent("us", "us-0"), permissions.batch()),
    )
    for allowed in others:
        assert not any(overlaps(a, inbox) for a in (*allowed.publish, *allowed.subscribe))
    assert not any(overlaps(a, inbox) for a in permissions.allowed_across("eu", "us"))


def test_only_setup_may_make_streams_and_it_may_do_nothing_else():
    setup = permissions.setup()
    backups = {one for one in setup.publish if "SNAPSHOT" in one or "RESTORE" in one}
    assert backups == {
        "$JS.API.STREAM.SNAPSHOT.CONTROL",
        "$JS.SNAPSHOT.ACK.CONTROL.*",
        "$JS.API.STREAM.RESTORE.CONTROL",
        "$JS.SNAPSHOT.RESTORE.CONTROL.*",
        "$JS.API.STREAM.SNAPSHOT.KEYS",
        "$JS.SNAPSHOT.ACK.KEYS.*",
        "$JS.API.STREAM.RESTORE.KEYS",
        "$JS.SNAPSHOT.RESTORE.KEYS.*",
        "$JS.API.STREAM.SNAPSHOT.USAGE",
        "$JS.SNAPSHOT.ACK.USAGE.*",
        "$JS.API.STREAM.RESTORE.USAGE",
        "$JS.SNAPSHOT.RESTORE.USAGE.*",
    }
    assert all(pattern.startswith("$JS.API.") for pattern in {*setup.publish} - backups)
    assert setup.subscribe == ("_INBOX.>",)


@pytest.mark.parametrize(("speaker", "listener"), PAIRS)
def test_a_region_may_publish_only_what_concerns_the_receiver(speaker, listener):
    spoken = permissions.allowed_across(speaker, listener, EVERYWHERE)
    for region, row in itertools.product(REGIONS, CHANNELS):
        subject = row.subject(**(NAMES | {"region": region, "asker": speaker}))
        to_listener = region == listener and bool(row.publish & PEERS)
        of_itself = region == speaker and bool(row.subscribe & PEERS)
        assert may(spoken, subject) == (to_listener or of_itself), subject


@pytest.mark.parametrize(("speaker", "listener"), PAIRS)
def test_no_forbidden_pattern_meets_an_allowed_one(speaker, listener):
    spoken = permissions.allowed_across(speaker, listener)
    forbidden = unspoken(speaker, listener, REGIONS)
    (third,) = set(REGIONS) - {speaker, listener}
    assert set(everything(third)) <= set(forbidden)
    assert not any(overlaps(a, b) for a in spoken for b in forbidden)


@pytest.mark.parametrize(("speaker", "listener"), PAIRS)
def test_a_region_requests_in_its_own_name_only(speaker, listener):
    """What a question costs is charged to who the subject says has asked."""
    routers = permissions.router(speaker).publish
    for asker in REGIONS:
        question = subjects.snapshot(listener, asker)
        assert may(permissions.allowed_across(speaker, listener), question) == (asker == speaker)
        assert may(routers, question) == (asker == speaker)


def test_gossip_of_siblings_crosses_no_link():
    assert may(permissions.router("us").publish, subjects.siblings("us"))
    assert may(permissions.router("us").subscribe, subjects.siblings("us"))
    for one, other in PAIRS:
        assert not may(permissions.allowed_across(one, other), subjects.siblings(one))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_two_directions_of_a_link_share_no_subject(a, b):
    """Else two accounts would import the same subject from each other, without end."""
    there, back = permissions.allowed_across(a, b), permissions.allowed_across(b, a)
    assert not any(overlaps(x, y) for x in there for y in back)


def test_the_list_of_one_direction_in_full():
    assert permissions.allowed_across("us", "eu") == (
        "_INBOX.eu.>",
        "mesh.eu.gossip.snapshot.us",
        "mesh.eu.ingress",
        "mesh.eu.lease.owner",
        "mesh.eu.offline",
        "mesh.eu.ping",
        "mesh.eu.replica.*.body",
        "mesh.eu.replica.*.cancel",
        "mesh.eu.replica.*.credit",
        "mesh.eu.replica.*.work",
        "mesh.us.gossip.digest",
        "mesh.us.gossip.lease",
        "mesh.us.gossip.limits",
        "mesh.us.gossip.offline",
        "mesh.us.gossip.trie",
        "mesh.us.heartbeat.*",
        "mesh.us.router.*.alive",
    )


@pytest.mark.parametrize("allowed", [permissions.agent("us", "us-0"), permissions.router("eu")])
def test_no_subscription_widened_at_its_end_brings_in_an_answer(allowed):
    """To nats-server, `a.*` also admits a subscription to `a.>` [tried, 2.15.1]."""
    widened = [p[:-1] + ">" for p in allowed.subscribe if p.endswith(".*")]
    assert not may(tuple(widened), subjects.inbox("us", "r1", "7"))
