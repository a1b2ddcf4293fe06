"""What regions publish of the prompt prefixes that their replicas hold.

Every router is an *origin*: it publishes deltas of its own set of prefixes, numbered without gaps
inside its epoch, so a listener detects a missing delta at once. A block's hash
is chained (`mesh.core.model.prompt`): it names its whole path from the first byte, so a set of
hashes is the trie, and no parent, depth or text travels. The hash is keyed with the mesh's own
secret; without it a hash can't even be compared with a guess.

A listener with a gap asks for what came after the last number it has; the origin repeats the deltas
if it still has them, and otherwise its whole set, in parts. The reply subject of the question
is the inbox that the answer goes to, and the last token of that inbox is random.

A delta without content repeats the last number: so a listener learns that it missed the end.

Routers of one region exchange more, in a second stream of the same kind: which prompts each
has placed on which replica, because they place on the same ones. There a delta is about one
replica, and has nothing of what an engine evicts, which every listener works out for itself.

To peers a router names the replicas that hold each block: `replicas` are their names, and `holders`
has a number for each block, whose bit n stands for the n-th name. A block that is gained again has
other holders now. Without `holders` some replica of the region holds them, as 0.1 says of all.
"""

from schemas.wire import WireMessage, wire_message

BLOCKS_MAX = 65_536  # of one origin: 4 M tokens of prompts in a set of 590 kB
DELTA_BLOCKS_MAX = 4096  # in one message, which is at most 60 kB then
PART_BLOCKS_MAX = 512  # small beside a budget, so that parts keep coming
PARTS_MAX = BLOCKS_MAX // PART_BLOCKS_MAX
SIBLING_PARTS_MAX = 4096  # of all replicas, each part as large as a delta
BLOCK_BYTES = 9  # what one hash takes in a message
HOLDER_NAMES_MAX = 32  # replicas that one message names
MESSAGE_BYTES = 64  # what a message takes beside its hashes, subject included

PEERS, SIBLINGS = 0, 1  # the streams of an origin: what its region holds, what it placed where
EVERYTHING = -1  # instead of a number: the whole set, whatever is known of it


@wire_message(tag=11)
class TrieDelta(WireMessage):
    """What an origin's set gained and lost. `seq`: 1 for the first delta of an epoch; with
    nothing gained and nothing lost, the number of the last one.

    Between siblings: on one `replica`. `missed_ms`: what was not used on that replica for longer
    than this is not there any more, as an engine's answer has shown; -1: nothing was shown.
    `is_cold`: 1 while the origin has just started and knows little itself.
    """

    region: str
    router: str
    epoch: int
    seq: int
    gained: tuple[int, ...]
    lost: tuple[int, ...]
    replica: str = ""
    missed_ms: int = -1
    is_cold: int = 0
    replicas: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()

    @property
    def is_sign(self) -> bool:
        """Whether it only repeats a number."""
        return not self.gained and not self.lost and self.missed_ms < 0


@wire_message(tag=12)
class TrieAsk(WireMessage):
    """Repeat what came after number `after` of that epoch, or EVERYTHING of `stream`.

    `asker`: between siblings, the router that asks.
    """

    router: str  # the origin, of the region that the subject names
    epoch: int
    after: int
    stream: int = PEERS
    asker: str = ""


@wire_message(tag=13)
class TriePart(WireMessage):
    """One part of an origin's whole set as it is after delta `seq`. `part`: 0 to `parts` - 1.

    Between siblings: all that the origin knows of, part by part the longest unused of a `replica`
    first. `age_ms`: since the part's blocks were used. `missed_ms`: as in a delta. `is_all`: 0 if
    the set is of those replicas only that the missing deltas were about.
    """

    region: str
    router: str
    epoch: int
    seq: int
    part: int
    parts: int
    blocks: tuple[int, ...]
    replica: str = ""
    age_ms: int = 0
    missed_ms: int = -1
    is_all: int = 1
    replicas: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()


TrieAnswer = TrieDelta | TriePart


def holder_bytes(replicas: int) -> int:
    """What a block's holders take in a message that names so many replicas, at most."""
    return 1 if replicas <= 7 else 3 if replicas <= 16 else 5


def size_bytes(message: TrieAnswer | TrieAsk) -> int:
    """About what the message takes on a link."""
    if isinstance(message, TrieAsk):
        return MESSAGE_BYTES
    blocks = (
        len(message.blocks)
        if isinstance(message, TriePart)
        else len(message.gained) + len(message.lost)
    )
    named = holder_bytes(len(message.replicas)) * len(message.holders)
    return MESSAGE_BYTES + BLOCK_BYTES * blocks + named + sum(map(len, message.replicas))
