"""Where an answer may go, as a table of requesters and channels."""

import itertools

from schemas import subjects
from schemas.catalog import CHANNELS, Carrier
from schemas.replies import is_answer, is_service_reply, reply_inbox

HOME, PEERS = "us", ("eu", "ap")
NAMES = {"region": "us", "replica": "us-0", "asker": "eu", "label": "any"}
ASKED = {row.name: row.subject(**NAMES) for row in CHANNELS if row.carrier is Carrier.REQUEST}
HONEST = {
    "ping": ["_INBOX.eu.r1.ping-us", "_INBOX.ap.doctor-1.ping-us"],
    "snapshot": ["_INBOX.eu.r1.trie-0a"],
    "ingress": ["_INBOX.eu.r1.p-1-1-0a", "_INBOX.ap.r1.7"],
    "ingress_within": ["_INBOX.eu.r1.p-1-1-0a"],
    "offline": ["_INBOX.eu.batch-0.p-1-1-0a", "_INBOX.ap.batch-0.7"],
    "offline_within": ["_INBOX.eu.batch-0.p-1-1-0a"],
    "work": ["_INBOX.eu.r1.p-1-1-0a", "_INBOX.us.r1.p-1-1-0a"],
}
HOSTILE = (
    "",
    "$JS.API.STREAM.UPDATE.HEARTBEATS",
    "$SYS.REQ.SERVER.PING",
    "$SRV.PING",
    "_R_.abc.1",
    "mesh.us.gossip.digest",
    "mesh.us.lease.owner",
    "mesh.eu.ping",
    "mesh.us.replica.us-0.work",
    ">",
    "_INBOX.>",
    "_INBOX.eu.>",
    "_INBOX.eu.r1.>",
    "_INBOX.eu.r1.*",
    "_INBOX.eu.*.7",
    "_INBOX.*.r1.7",
    "_INBOX.eu.r1",
    "_INBOX.eu.r1.7.8",
    "_INBOX.eu..7",
    "_INBOX.eu.r1.",
    "_INBOX.eu.r 1.7",
    "_INBOX.eu.r1.7 8",
    "_INBOX.EU.r1.7",
    "_inbox.eu.r1.7",
    "_INBOX.eu.r1.parcel",
    "_INBOX.eu.r1.who",
    "_INBOX.eu.r1.here",
    "_INBOX.eu.r1.lease-1-0a",
    "_INBOX.eu.r1.ping-eu",
    "_INBOX.us.r1.ping-us",
    "_INBOX.us.r1.trie-0a",
    "_INBOX.ap.r1.trie-0a",
)


def test_an_inbox_of_a_user_who_may_ask_is_answered():
    for name, replies in HONEST.items():
        for reply in replies:
            found = reply_inbox(name, ASKED[name], reply, HOME, PEERS)
            assert found == subjects.parse_inbox(reply), (name, reply)


def test_no_other_inbox_is_answered():
    for name, reply in itertools.product(HONEST, HOSTILE):
        assert reply_inbox(name, ASKED[name], reply, HOME, PEERS) is None, (name, reply)


def test_an_inbox_of_another_channel_is_not_answered():
    answered = {"work", "ingress", "ingress_within", "offline", "offline_within"}  # by an engine
    for name in HONEST:
        others = {reply for other in HONEST for reply in HONEST[other]}
        for reply in others - set(HONEST[name]):
            found = reply_inbox(name, ASKED[name], reply, HOME, PEERS)
            kinds = {name, *(other for other in HONEST if reply in HONEST[other])}
            assert found is None or kinds <= answered, (name, reply)


def test_a_reply_to_the_own_region_is_for_channels_of_its_own_routers():
    own, trie = "_INBOX.us.r2.p-1-1-0a", "_INBOX.us.r2.trie-0a"
    assert reply_inbox("work", ASKED["work"], own, HOME, PEERS)
    assert not reply_inbox("ingress", ASKED["ingress"], own, HOME, PEERS)
    among_siblings = subjects.snapshot("us", "us")
    assert reply_inbox("snapshot", among_siblings, trie, HOME, PEERS)
    assert not reply_inbox("ping", ASKED["ping"], "_INBOX.us.r2.ping-us", HOME, PEERS)


def test_no_region_but_a_peer_is_answered_and_an_agent_knows_no_peers():
    stranger = "_INBOX.sa.r1.p-1-1-0a"
    assert not reply_inbox("ingress", ASKED["ingress"], stranger, HOME, PEERS)
    assert reply_inbox("work", ASKED["work"], stranger, HOME, None)


def test_every_channel_of_requests_is_in_the_rule():
    own_name = {"name"}  # answered at a subject that the agent knows by itself
    by_people = {"requests"}  # answered as services are
    assert set(ASKED) - own_name - by_people == set(HONEST)


def test_tokens_of_a_routers_own_inboxes_are_no_answers():
    assert is_answer("7") and is_answer("p-1-1-0a") and not is_answer("")
    assert not any(is_answer(one) for one in ("who", "here", "parcel", "ping-us", "trie-0"))


def test_a_service_answers_only_where_the_server_made_the_subject():
    for reply in ("_R_.Ab1.x", "_R_.a"):
        assert is_service_reply(reply), reply
    for reply in (*HOSTILE[:4], *HOSTILE[5:], "_R_", "_R_.", "_R_.>", "_R_.a b"):
        assert not is_service_reply(reply), reply
