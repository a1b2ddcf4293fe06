"""Batches of KV events: recorded ones of vLLM, both forms, and bytes of any kind."""

import contextlib
import json
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.core.held_blocks import EnginePrompt, HeldBlocks
from agents.core.kv_events import (
    GROUPS_MAX,
    PAYLOAD_BYTES_MAX,
    AllCleared,
    BatchUse,
    BlocksRemoved,
    BlocksStored,
    GroupKind,
    KvEventOrder,
    KvEventsInvalid,
    Tier,
    parse_batch,
)

RECORDED = Path(__file__).parents[2] / "data" / "kv_events"
STORED = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2]


def batch(*events, rank=None):
    return msgpack.packb([1.5, list(events), rank])


def recorded(name):
    """A recorded event of vLLM 0.10, as an array and as newer versions' map."""
    row = json.loads((RECORDED / f"vllm_{name}.json").read_text())
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    values = [row.get(field) for field in (*names, "lora_name")]
    as_map = {"type": "BlockStored", **dict(zip((*names, "lora_name"), values, strict=True))}
    return row, ["BlockStored", *values], as_map


@pytest.mark.parametrize("name", ["base", "lora"])
def test_recorded_events_are_read_in_both_forms(name):
    row, as_array, as_map = recorded(name)
    events = parse_batch(batch(as_array, as_map))
    expected = BlocksStored(
        tuple(row["block_hashes"]), None, tuple(row["token_ids"]), 16, Tier.GPU,
        row["lora_name"] or "", is_plain=True,
    )  # fmt: skip
    assert events == [expected, expected]


def test_short_arrays_of_sglang_and_hashes_as_bytes_are_read():
    removed = ["BlockRemoved", [b"\x01" * 32]]
    assert parse_batch(batch(STORED, removed, ["AllBlocksCleared"])) == [
        BlocksStored((1, 2), None, (5, 6, 7, 8), 2, Tier.GPU, "", is_plain=True),
        BlocksRemoved((b"\x01" * 32,), Tier.GPU),
        AllCleared(),
    ]


def test_vllms_blocks_whose_hash_covers_tokens_after_them_are_named_by_their_own_tokens():
    recorded_batches = json.loads((RECORDED / "vllm_0.33_lookahead.json").read_text())
    first, second = (parse_batch(bytes.fromhex(recorded_batches[n])) for n in ("first", "second"))
    held = HeldBlocks()
    held.apply(first)
    held.attach([101, 102], 2, EnginePrompt(range(1, 9)))
    assert {text for text, _ in held.held()} == {101, 102}
    held.apply(second)  # of the two prompts' second blocks, one is left
    assert {text for text, _ in held.held()} == {101, 102}
    held.apply([BlocksRemoved((b"\x22" * 8,), Tier.GPU)])
    assert {text for text, _ in held.held()} == {101}


def test_vllms_groups_of_layers_are_told_apart_as_a_real_one_names_them():
    recorded_batches = json.loads((RECORDED / "vllm_0.32_windows.json").read_text())
    first, second = (parse_batch(bytes.fromhex(recorded_batches[n])) for n in ("first", "second"))
    assert [(event.group, event.kind, event.window, len(event.hashes)) for event in first] == [
        (0, GroupKind.WINDOW, 128, 0),
        (1, GroupKind.FULL, 0, 16),
    ]
    assert [len(event.hashes) for event in second] == [4, 5]
    texts, tokens = list(range(1, 22)), [*first[1].tokens, *second[1].tokens]
    for batches, found in ((first,), set()), ((first, second), set(texts)):
        held = HeldBlocks()  # without its window's last blocks nothing can be resumed
        for events in batches:
            held.apply(events)
        held.attach(texts, len(texts), EnginePrompt(tokens))
        assert {text for text, _ in held.held()} == found


# Of SGLang 0.5.17, page size 1, and 0.5.23, whose events are maps; the third as 0.5.18 sends it.
SGLANG = ["BlockStored", [7783675691531094162], -4675091308273846379, [3130], 1, None, "GPU"]
SGLANG_MAP = {
    "type": "BlockStored",
    "block_hashes": [7783675691531094162],
    "parent_block_hash": -4675091308273846379,
    "token_ids": [3130],
    "block_size": 1,
    "lora_id": None,
    "medium": "GPU",
}


@pytest.mark.parametrize(("name", "lora"), [("base", ""), ("lora", "sql")])
def test_recorded_batches_of_sglang_are_read(name, lora):
    recorded_batches = json.loads((RECORDED / "sglang_0.5.23.json").read_text())
    [event] = parse_batch(bytes.fromhex(recorded_batches[name]))
    assert (event.lora, event.tier, event.is_plain) == (lora, Tier.GPU, True)
    assert (len(event.hashes), len(event.tokens), event.parent) == (1, event.block_tokens, None)


@pytest.mark.parametrize(
    ("event", "lora", "is_plain"),
    [
        (SGLANG, "", True),
        ([*SGLANG, {"cache_salt": "a"}], "", False),
        (SGLANG_MAP, "", True),
        ({**SGLANG_MAP, "session_id": "s-1"}, "", True),
        ({**SGLANG_MAP, "cache_salt": "a"}, "", False),
        ({**SGLANG_MAP, "lora_name": "sql"}, "sql", True),
        ({**SGLANG_MAP, "lora_name": "sql", "cache_salt": "a"}, "sql", False),
    ],
)
def test_sglangs_adapters_are_known_and_what_is_salted_is_not_plain(event, lora, is_plain):
    assert parse_batch(batch(event, rank=0)) == [
        BlocksStored(
            (7783675691531094162,), -4675091308273846379, (3130,), 1, Tier.GPU, lora, is_plain
        )
    ]


def test_other_media_and_unknown_events_are_left_out():
    stored = [*STORED, None, "TAPE", None, None]
    assert parse_batch(batch(stored, ["BlockRemoved", [1], "TAPE"], ["New", 3])) == []


# As vLLM 0.32 sends them: all groups name a block by the same hash; a window's group leaves out
# blocks that no hit needs, whose tokens it names all the same.
VLLM_MAP = {
    "type": "BlockStored",
    "block_hashes": [b"\x02" * 32],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


@pytest.mark.parametrize(
    ("fields", "group", "kind", "window"),
    [
        ({"group_idx": 1, "kv_cache_spec_kind": "sliding_window",
          "kv_cache_spec_sliding_window": 128}, 1, GroupKind.WINDOW, 128),
        ({"group_idx": 0, "kv_cache_spec_kind": "sliding_window_mla",
          "kv_cache_spec_sliding_window": 1, "locality": "LOCAL"}, 0, GroupKind.WINDOW, 1),
        ({"group_idx": 2, "kv_cache_spec_kind": "mamba"}, 2, GroupKind.STATE, 0),
        ({"group_idx": 2, "kv_cache_spec_kind": "sliding_window"}, 2, GroupKind.OTHER, 0),
        ({"group_idx": 2, "kv_cache_spec_kind": "sliding_window",
          "kv_cache_spec_sliding_window": -4}, 2, GroupKind.OTHER, 0),
        ({"group_idx": 0, "kv_cache_spec_kind": "chunked_local_attention"}, 0, GroupKind.OTHER, 0),
        ({"group_idx": 0, "kv_cache_spec_kind": 7}, 0, GroupKind.OTHER, 0),
        ({"group_idx": 1}, 1, GroupKind.OTHER, 0),  # from before kinds were named
    ],
)  # fmt: skip
def test_groups_of_layers_are_told_apart_and_may_leave_out_blocks(fields, group, kind, window):
    [event] = parse_batch(batch({**VLLM_MAP, **fields}))
    assert (event.group, event.kind, event.window) == (group, kind, window)
    assert event.hashes == (b"\x02" * 32,)


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_the_group_of_full_attention_names_all_its_blocks(kind):
    given = {**VLLM_MAP, "group_idx": 0, "kv_cache_spec_kind": kind}
    [event] = parse_batch(batch({**given, "block_hashes": [1, 2]}))
    assert (event.group, event.kind) == (0, GroupKind.FULL)
    with pytest.raises(KvEventsInvalid, match="4 tokens in 1 blocks of 2"):
        parse_batch(batch(given))


def test_arrays_have_the_groups_fields_at_the_end():
    stored = [*STORED, None, "GPU", None, None, 1, "sliding_window", 64]
    [event, removed] = parse_batch(batch(stored, ["BlockRemoved", [1], "GPU", 1]))
    assert (event.group, event.kind, event.window) == (1, GroupKind.WINDOW, 64)
    assert removed == BlocksRemoved((1,), Tier.GPU, 1)


@pytest.mark.parametrize("group", [-1, GROUPS_MAX, "0", True, 1.0])
def test_a_group_is_a_small_number(group):
    with pytest.raises(KvEventsInvalid, match="group_idx"):
        parse_batch(batch({**VLLM_MAP, "group_idx": group, "kv_cache_spec_kind": "mamba"}))


@pytest.mark.parametrize(
    ("more", "is_plain"),
    [
        ([None, "CPU", None, [None, None]], True),
        ([None, None, "Ann", [["Ann"], ["Ann"]]], True),
        ([None, None, None, [["salt"], None]], False),
        ([None, None, "Ann", [["Ann", ["image", 0]], None]], False),
        ([7, None, None, None], False),
    ],
)
def test_only_blocks_of_tokens_and_an_adapter_are_plain(more, is_plain):
    [event] = parse_batch(batch([*STORED, *more]))
    assert event.is_plain is is_plain


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb({"a": 1}),
        msgpack.packb([1.0, 5]),
        batch(5),
        batch(["BlockStored", [1], None, [5, 6], 0]),
        batch(["BlockStored", [1], None, [5], 2]),
        batch(["BlockStored", [1], None, [-5, 6], 2]),
        batch(["BlockStored", ["x"], None, [5, 6], 2]),
        batch(["BlockStored", [1], "parent", [5, 6], 2]),
        batch(["BlockStored", [1], None, [5, 6], 2, None, None, "x" * 1000]),
        batch(["BlockRemoved", [b"x" * 65]]),
        b"\xc4" * (PAYLOAD_BYTES_MAX + 1),
        b"\x91" * 5000,
    ],
)
def test_anything_else_is_an_error_with_a_reason(payload):
    with pytest.raises(KvEventsInvalid, match=r"\w"):
        parse_batch(payload)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_read_or_refused(payload):
    with contextlib.suppress(KvEventsInvalid):
        parse_batch(payload)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**33)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.lists(values, max_size=9), max_size=3), st.booleans())
def test_events_of_any_form_are_read_or_refused(events, named):
    kinds = ("BlockStored", "BlockRemoved")
    rows = [[kinds[n % 2], *event] if named else event for n, event in enumerate(events)]
    with contextlib.suppress(KvEventsInvalid):
        parse_batch(batch(*rows))


def test_batches_in_order_are_taken_and_a_gap_is_replayed():
    order = KvEventOrder()
    assert [order.live(seq) for seq in (0, 1, 4)] == [BatchUse.TAKE, BatchUse.TAKE, BatchUse.REPLAY]
    assert order.replayed([2, 3, 4, 5])
    assert [order.live(seq) for seq in (5, 6)] == [BatchUse.IGNORE, BatchUse.TAKE]


def test_a_replay_without_the_missing_batches_shows_it():
    order = KvEventOrder()
    assert order.live(7) is BatchUse.REPLAY
    assert not order.replayed([3, 4, 5, 6, 7])
    assert order.live(8) is BatchUse.TAKE


def test_an_engine_that_restarted_begins_anew():
    order = KvEventOrder()
    for seq in range(5):
        order.live(seq)
    assert order.live(2) is BatchUse.RESTARTED  # its 0 and 1 are missing
    assert order.next == 0
    assert order.replayed([0, 1, 2])
    assert order.live(0) is BatchUse.RESTARTED  # and once more: nothing is missing
    assert order.next == 1
