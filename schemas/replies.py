"""Where a request may have its answer sent: the one rule of routers and agents.

An answer is published with the answerer's permissions to a subject that the request names. Without
a check a sender could use these permissions: for JetStream requests, digests, leases.
So an answer goes to an inbox and nowhere else, to one of a region whose routers may ask on that
channel (`schemas.catalog`), and of the kind that belongs to it: a ping's to a ping inbox of the
region asked, a question's about gossip to a gossip inbox of the asker that the subject names, an
answer's to no inbox that is for something else. What is no such inbox gets no answer.

Which peer has asked is in no subject but a question's about gossip; there the inbox must be its
own. Elsewhere it is an inbox of some peer, which that peer could publish to itself.
"""

import re
from collections.abc import Callable, Container

from schemas import subjects
from schemas.catalog import Role, channel
from schemas.ids import NameInvalid, RegionId, checked_name
from schemas.parcels import is_stream
from schemas.subjects import InboxAddress

PING_BYTES = 8  # a ping's body, which is sent back

# Last tokens of a router's inboxes that are for no client's answer.
PING_PREFIX = "ping-"  # before the region that is asked
TRIE_PREFIX = "trie-"  # before a random token
LEASE_PREFIX = "lease-"
WHO, HERE = "who", "here"  # among routers of one name
_PLAIN = re.compile(r"[!-~]+")
_OWN = (PING_PREFIX, TRIE_PREFIX, LEASE_PREFIX)


def is_answer(token: str) -> bool:
    """Whether an inbox whose last token this is may be one of a client's answer."""
    own = token.startswith(_OWN) or token in (WHO, HERE)
    return is_stream(token) and not own and _PLAIN.fullmatch(token) is not None


def _is_trie(token: str) -> bool:
    return token.startswith(TRIE_PREFIX) and _PLAIN.fullmatch(token) is not None


_KINDS: dict[str, Callable[[str], bool]] = {
    "work": is_answer,
    "ingress": is_answer,
    "ingress_within": is_answer,
    "offline": is_answer,
    "offline_within": is_answer,
    "snapshot": _is_trie,
}
# Channels whose requests are answered, with whether a peer's routers and the region's own may ask.
_ASKERS = {
    name: (Role.PEER_ROUTER in channel(name).publish, Role.ROUTER in channel(name).publish)
    for name in (*_KINDS, "ping")
}


def reply_inbox(
    name: str, subject: str, reply: str, home: RegionId, peers: Container[str] | None
) -> InboxAddress | None:
    """The inbox to answer, or None: then there must be no answer.

    `name`: of the channel that `subject` is of. `home`: the region that answers. `peers`: regions
    that may ask beside it; None where they are not known, as to agents.
    """
    address = subjects.parse_inbox(reply)
    if address is None:
        return None
    by_peers, by_home = _ASKERS[name]
    region = address.region
    may_ask = by_home if region == home else by_peers and (peers is None or region in peers)
    if not may_ask or not _fits(name, subject, address, home):
        return None
    try:
        checked_name("region", region)
        checked_name("router", address.router)
    except NameInvalid:
        return None
    return address


def _fits(name: str, subject: str, address: InboxAddress, home: RegionId) -> bool:
    if name == "ping":
        return address.stream == f"{PING_PREFIX}{home}"
    if name == "snapshot" and subject.rpartition(".")[2] != address.region:
        return False
    return _KINDS[name](address.stream)


def is_service_reply(reply: str) -> bool:
    """Whether an answer of a NATS micro service may go there: services are asked from another
    account only, and then the server itself makes the reply subject."""
    root, _, rest = reply.partition(".")
    return root == subjects.SERVICE_REPLY_ROOT and bool(rest) and not set(rest) & set("*> ")
