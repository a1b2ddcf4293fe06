"""What an engine reports of its KV cache: batches of msgpack, and the order in which they came.

vLLM and SGLang publish them alike: a batch is an array `[time, events, rank]`, an event an array
`[type, field, …]` or, from newer ones, a map with the key `type`. SGLang's arrays end with the
medium, or after it with a map of the request's salt. Models with several kinds of attention keep
blocks of each in a group of their own: vLLM's events name the group (`group_idx`), and those of
stored blocks its kind and window (`kv_cache_spec_kind`, `kv_cache_spec_sliding_window`). Source:
vLLM's `vllm/distributed/kv_events.py` (0.10 to 0.33) and SGLang's
`sglang/srt/disaggregation/kv_events.py` (0.5.17 to 0.5.23). Fields that are not read here may be
anything. Bytes of another form raise KvEventsInvalid, never anything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import msgpack

PAYLOAD_BYTES_MAX = 16 * 1024 * 1024  # a batch of a million tokens has about 5
ITEMS_MAX = 2 * 1024 * 1024
EVENTS_MAX = 65_536
HASH_BYTES_MAX = 64
BLOCK_TOKENS_MAX = 65_536
TOKEN_ID_MAX = 2**32 - 1
NAME_CHARS_MAX = 512
GROUPS_MAX = 32
WINDOW_TOKENS_MAX = 2**31

EngineHash = int | bytes


class KvEventsInvalid(ValueError):
    """Not a batch of KV events; the message says what is wrong."""


class Tier(IntEnum):
    """Where a block is, the fastest first."""

    GPU = 0
    CPU = 1
    DISK = 2


# Names of media in the events. No medium is the GPU: older engines have no other.
MEDIA = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "CPU_TIER1": Tier.CPU,
    "CPU_TIER2": Tier.CPU,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
}


class GroupKind(Enum):
    """Which of a prompt's blocks a group of layers must hold for the prompt to be resumed."""

    FULL = "full"  # all
    WINDOW = "window"  # the last ones, as many as the window has
    STATE = "state"  # the last one, which is the state after it
    OTHER = "other"  # it can't be told


# Names of kinds in vLLM's events (`KVCacheSpecKind`). Any other is OTHER.
KINDS = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
}


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """`hashes` follow each other, after the block `parent`; None: they begin a prompt.

    `tokens`: of all of them; empty where the engine only names blocks that are known.
    `lora`: the adapter's name; empty without one. `is_plain`: nothing but tokens and the adapter
    decides which prompts may share them. `group`: of layers, 0 where there is one; `window`: in
    tokens, of a group of that kind. Of groups that are not FULL, `hashes` may leave out some of
    the blocks that `tokens` are of.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: tuple[int, ...]
    block_tokens: int
    tier: Tier
    lora: str
    is_plain: bool
    group: int = 0
    kind: GroupKind = GroupKind.FULL
    window: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: tuple[EngineHash, ...]
    tier: Tier
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The cache is empty."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared

_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")


def parse_batch(payload: bytes) -> list[KvEvent]:
    """The events of one batch. Those of unknown types and media are left out."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise KvEventsInvalid(f"a batch of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}")
    try:
        batch = msgpack.unpackb(
            payload,
            use_list=False,
            strict_map_key=False,
            max_array_len=ITEMS_MAX,
            max_map_len=ITEMS_MAX,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise KvEventsInvalid(f"not msgpack: {error}") from error
    if not isinstance(batch, tuple) or len(batch) < 2 or not isinstance(batch[1], tuple):
        raise KvEventsInvalid("not an array of a time and events")
    if len(batch[1]) > EVENTS_MAX:
        raise KvEventsInvalid(f"{len(batch[1])} events in a batch, at most {EVENTS_MAX}")
    events = (_event(item) for item in batch[1])
    return [event for event in events if event is not None]


def _event(item: object) -> KvEvent | None:
    if isinstance(item, dict):
        kind, given = item.get("type"), item
    elif isinstance(item, tuple) and item:
        kind, given = item[0], {}
        names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}
        if isinstance(kind, str):
            given = dict(zip(names.get(kind, ()), item[1:], strict=False))
    else:
        raise KvEventsInvalid("an event is neither a map nor an array")
    if kind == "AllBlocksCleared":
        return AllCleared()
    medium = given.get("medium")
    is_ours = (medium is None or isinstance(medium, str)) and medium in MEDIA
    if kind not in ("BlockStored", "BlockRemoved") or not is_ours:
        return None
    hashes, tier, group = _hashes(given.get("block_hashes")), MEDIA[medium], _group(given)
    if kind == "BlockRemoved":
        return BlocksRemoved(hashes, tier, group)
    return _stored(given, hashes, tier, group)


def _group(given: dict[Any, Any]) -> int:
    group = given.get("group_idx")
    if group is None:
        return 0
    if type(group) is not int or not 0 <= group < GROUPS_MAX:
        raise KvEventsInvalid(f"group_idx is not a number below {GROUPS_MAX}")
    return group


def _kind(given: dict[Any, Any], group: int) -> tuple[GroupKind, int]:
    """Of a group: its kind, and its window in tokens."""
    name, window = given.get("kv_cache_spec_kind"), given.get("kv_cache_spec_sliding_window")
    if name is None:  # an older engine, which doesn't say what its other groups are
        return (GroupKind.OTHER if group else GroupKind.FULL), 0
    kind = KINDS.get(name, GroupKind.OTHER) if isinstance(name, str) else GroupKind.OTHER
    if kind is not GroupKind.WINDOW:
        return kind, 0
    if type(window) is not int or not 0 < window <= WINDOW_TOKENS_MAX:
        return GroupKind.OTHER, 0
    return kind, window


def _stored(
    given: dict[Any, Any], hashes: tuple[EngineHash, ...], tier: Tier, group: int
) -> BlocksStored:
    kind, window = _kind(given, group)
    parent, tokens, size = (
        given.get(name) for name in ("parent_block_hash", "token_ids", "block_size")
    )
    if parent is not None:
        [parent] = _hashes((parent,))
    if type(size) is not int or not 0 < size <= BLOCK_TOKENS_MAX:
        raise KvEventsInvalid("block_size is not a count of tokens")
    if not isinstance(tokens, tuple) or not all(
        type(token) is int and 0 <= token <= TOKEN_ID_MAX for token in tokens
    ):
        raise KvEventsInvalid("token_ids are no token ids")
    is_whole = len(tokens) in (0, size * len(hashes))
    if not is_whole and (kind is GroupKind.FULL or len(tokens) < size * len(hashes)):
        raise KvEventsInvalid(f"{len(tokens)} tokens in {len(hashes)} blocks of {size}")
    lora, salt = given.get("lora_name") or "", given.get("cache_salt")
    if isinstance(lora, dict):  # SGLang's array, which has no name there
        lora, salt = "", lora
    if not isinstance(lora, str) or len(lora) > NAME_CHARS_MAX:
        raise KvEventsInvalid("lora_name is no name")
    # An adapter by a number alone, from older engines, can't be told from others by its name.
    has_number = given.get("lora_id") not in (None, -1) and not lora
    is_plain = not (has_number or salt) and _is_plain(given.get("extra_keys"), lora)
    return BlocksStored(
        hashes, parent, tokens, size, tier, lora, is_plain, group=group, kind=kind, window=window
    )


def _is_plain(extra_keys: object, lora: str) -> bool:
    """Whether no image, salt or the like is part of any block's name."""
    if not extra_keys:
        return True
    if not isinstance(extra_keys, tuple):
        return False
    return all(not keys or (bool(lora) and keys in (lora, (lora,))) for keys in extra_keys)


def _hashes(given: object) -> tuple[EngineHash, ...]:
    if isinstance(given, tuple) and all(
        type(one) is int or (type(one) is bytes and 0 < len(one) <= HASH_BYTES_MAX) for one in given
    ):
        return given
    raise KvEventsInvalid("block hashes are neither numbers nor short bytes")


class BatchUse(Enum):
    """What to do with the batch that arrived."""

    TAKE = "take"
    IGNORE = "ignore"  # it was taken before
    REPLAY = "replay"  # batches before it are missing
    RESTARTED = "restarted"  # another run of the engine, whose first batches are missing


class KvEventOrder:
    """The numbers of one engine's batches: 0 for the first of a run, then without gaps."""

    def __init__(self) -> None:
        self.next = 0  # the number that is awaited
        self._last_live = -1

    def live(self, seq: int) -> BatchUse:
        """A batch arrived as it was published. After REPLAY and RESTARTED, `replayed` follows."""
        earlier, self._last_live = self._last_live, seq
        if seq == self.next:
            self.next += 1
            return BatchUse.TAKE
        if seq > self.next:
            return BatchUse.REPLAY
        if seq > earlier:
            return BatchUse.IGNORE  # a replay has brought it already
        self.next = 0
        if seq == 0:
            self.next = 1
        return BatchUse.RESTARTED

    def restarted(self) -> None:
        """The connection was lost: what answers next may be another run of the engine."""
        self.next, self._last_live = 0, -1

    def replayed(self, seqs: Sequence[int]) -> bool:
        """Batches were repeated, in this order. False if some before or among them are missing."""
        whole = True
        for seq in seqs:
            if seq >= self.next:
                whole = whole and seq == self.next
                self.next = seq + 1
        return whole

    def give_up(self, seq: int) -> None:
        """What is missing before this live batch can't be had any more."""
        self.next = max(self.next, seq + 1)
