"""What an agent reports of its engine's KV cache, as block hashes of prompts.

Engines name KV blocks by hashes of tokens, routers name prompts by chained hashes of text
(`mesh.core.model.prompt`). The agent is beside the engine and relates the two: routers send it the
hashes of each prompt that they place on its replica, and it publishes which of them the engine
still holds, from the engine's own events. So no router needs a tokenizer.

Deltas are numbered without gaps inside the agent's epoch; heartbeats repeat the last number
(`Heartbeat.held_seq`), so a router notices one that is missing. It then asks for the whole set,
which the agent publishes to all routers of its region, in parts.
"""

from schemas.wire import WireMessage, wire_message

HASHES_MAX = 6144  # in one message: 9 bytes each, below `wire.MESSAGE_BYTES_MAX`
PARTS_MAX = 32


@wire_message(tag=14)
class PromptBlocks(WireMessage):
    """The blocks of the prompt whose answer goes to `inbox`; more than HASHES_MAX are left out.

    `length`: of the whole prompt, in blocks.
    """

    inbox: str
    length: float
    hashes: tuple[int, ...]


@wire_message(tag=15)
class HeldAsk(WireMessage):
    """A router lacks deltas of this epoch: publish the whole set."""

    epoch: int


@wire_message(tag=16)
class HeldDelta(WireMessage):
    """Blocks of prompts that the engine came to hold, by tier, and that it holds no longer.

    `seq`: 1 for the first of an epoch. `cleared`: 1 if the engine has lost all that it held before.
    """

    epoch: int
    seq: int
    gpu: tuple[int, ...] = ()
    cpu: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    cleared: int = 0


@wire_message(tag=17)
class HeldPart(WireMessage):
    """One part of the whole set as it is after delta `seq`. `part`: 0 to `parts` - 1."""

    epoch: int
    seq: int
    part: int
    parts: int
    gpu: tuple[int, ...] = ()
    cpu: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()
