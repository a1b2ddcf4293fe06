"""What engines hold of models with several groups of layers: beside a model of such caches."""

import random

import pytest

from agents.core.held_blocks import NOT_HELD, TOLD_TIMES, EnginePrompt, HeldBlocks
from agents.core.kv_events import AllCleared, BlocksRemoved, BlocksStored, GroupKind, Tier

BLOCK = 16
PROMPT = tuple(range(1000, 1000 + 75 * BLOCK + 11))  # 1,211 tokens
BLOCKS = 75
FULL, WINDOW, STATE, OTHER = GroupKind
Group = tuple[GroupKind, int]  # and its window in tokens


def names(tokens):
    """An engine's hashes: of all tokens up to each block's end."""
    return tuple(hash(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK))


def stored(group, number, tokens, first=0, last=None, skipped=0):
    """Of a prompt's blocks `first` to `last`; a group may keep the later ones alone."""
    kind, window = group
    hashes = names(tokens)[:last]
    parent = hashes[first - 1] if first else None
    return BlocksStored(
        hashes[first + skipped :], parent, tokens[first * BLOCK : len(hashes) * BLOCK], BLOCK,
        Tier.GPU, "", is_plain=True, group=number, kind=kind, window=window,
    )  # fmt: skip


def removed(number, *hashes):
    return BlocksRemoved(tuple(hashes), Tier.GPU, number)


def engine(*groups, tokens=PROMPT):
    held = HeldBlocks()
    held.is_whole = True
    held.apply(stored(group, number, tokens) for number, group in enumerate(groups))
    return held


def usable(held, tokens=PROMPT):
    """Tokens of a prompt that its router counts as held: a text block for each of the engine's."""
    texts = names(tokens)
    held.attach(texts, len(tokens) / BLOCK, EnginePrompt(tokens))
    there = {text for text, _ in held.held()}
    count = next((at for at, text in enumerate(texts) if text not in there), len(texts))
    return count * BLOCK


TABLE = [
    ("plain", [(FULL, 0)], [], 1200),
    ("plain, evicted", [(FULL, 0)], [(0, 0, BLOCKS)], 0),
    ("full, window whose blocks are evicted", [(FULL, 0), (WINDOW, 128)], [(1, 0, BLOCKS)], 0),
    ("the same, the last block alone", [(FULL, 0), (WINDOW, 128)], [(1, 74, BLOCKS)], 1184),
    ("the same, one in the last window", [(FULL, 0), (WINDOW, 128)], [(1, 70, 71)], 1120),
    ("window whose old blocks are evicted, full", [(WINDOW, 128), (FULL, 0)], [(0, 0, 67)], 1200),
    ("and one that it needs", [(WINDOW, 128), (FULL, 0)], [(0, 0, 68)], 0),
    ("window, full whose start is evicted", [(WINDOW, 128), (FULL, 0)], [(1, 0, 1)], 0),
    ("the last state is left", [(FULL, 0), (STATE, 0)], [(1, 0, 74)], 1200),
    ("an earlier state is left", [(FULL, 0), (STATE, 0)], [(1, 0, 39), (1, 40, BLOCKS)], 640),
    ("no state is left", [(STATE, 0), (FULL, 0)], [(0, 0, BLOCKS)], 0),
    ("two of full attention", [(FULL, 0), (FULL, 0)], [(1, 50, 51)], 800),
    ("three kinds", [(FULL, 0), (WINDOW, 33), (STATE, 0)], [(1, 0, 60), (2, 70, BLOCKS)], 1120),
]


@pytest.mark.parametrize(("what", "groups", "evicted", "tokens"), TABLE)
def test_usable_is_what_all_groups_can_resume(what, groups, evicted, tokens):
    held = engine(*groups)
    assert usable(held) == 1200
    held.apply(removed(number, *names(PROMPT)[a:b]) for number, a, b in evicted)
    assert held.tells_all
    assert usable(held) == tokens, what


def test_a_window_that_keeps_its_last_blocks_alone_is_resumed_there():
    """vLLM stores no blocks that no hit would need: hashes are missing, their tokens are not."""
    held = HeldBlocks()
    held.is_whole = True
    held.apply([stored((WINDOW, 128), 0, PROMPT, skipped=67), stored((FULL, 0), 1, PROMPT)])
    assert usable(held) == 1200


def test_what_is_stored_again_is_usable_again():
    held = engine((FULL, 0), (WINDOW, 128))
    hashes = names(PROMPT)
    for number in (0, 1):
        held.apply([removed(number, *hashes)])
        assert usable(held) == 0
        held.apply([stored(((FULL, 0), (WINDOW, 128))[number], number, PROMPT)])
        assert usable(held) == 1200


def test_all_cleared_empties_all_groups():
    held = engine((FULL, 0), (WINDOW, 128))
    held.apply([AllCleared(), stored((FULL, 0), 0, PROMPT)])
    assert usable(held) == 0 and held.tells_all


def test_another_run_may_have_another_model():
    held = engine((FULL, 0), (OTHER, 0))
    assert not held.tells_all
    held.restarted()
    held.is_whole = True
    held.apply([stored((FULL, 0), 0, PROMPT)])
    assert held.tells_all and usable(held) == 1200


@pytest.mark.parametrize("groups", [
    [(FULL, 0), (OTHER, 0)], [(STATE, 0)], [(WINDOW, 64)], [(OTHER, 0)], [(WINDOW, 64), (STATE, 0)],
])  # fmt: skip
def test_what_cannot_be_followed_is_unknown_and_nothing_is_reported_as_lost(groups):
    held = engine(*groups)
    usable(held)
    assert not held.tells_all
    if groups[0][0] is not FULL:
        assert held.changes == {}


def test_windows_in_blocks_of_another_size_are_unknown():
    held = engine((FULL, 0))
    larger = BlocksStored((1,), None, PROMPT[:64], 64, Tier.GPU, "", True, 1, WINDOW, 128)
    held.apply([larger])
    assert not held.tells_all


def test_states_in_larger_blocks_are_found_by_their_hashes():
    held = engine((FULL, 0))
    ends = names(PROMPT)[3::4]
    held.apply([BlocksStored(ends, None, PROMPT[:1152], 64, Tier.GPU, "", True, 1, STATE)])
    assert held.tells_all and usable(held) == 1152


def test_parts_of_blocks_are_not_taken_for_blocks():
    """vLLM names the end of a prompt inside of a block by an event with a smaller block."""
    held = engine((FULL, 0), (STATE, 0))
    part = BlocksStored((5,), names(PROMPT)[-1], PROMPT[1200:1208], 8, Tier.GPU, "", True)
    held.apply([part, BlocksRemoved((5,), Tier.GPU)])
    assert (held.block_tokens, usable(held)) == (BLOCK, 1200)


# An engine that says nothing of prompts that it has computed.


def test_an_engine_that_never_told_anything_is_unknown_not_empty():
    held = HeldBlocks()
    held.is_whole = True  # it has published nothing since its start
    assert held.tells_all
    usable(held)
    assert not held.tells_all and held.changes == {}


def test_its_first_event_ends_the_silence_of_a_plain_one():
    held = HeldBlocks()
    held.is_whole = True
    usable(held)
    held.apply([stored((FULL, 0), 0, PROMPT)])
    assert usable(held) == 1200 and held.tells_all


def test_one_that_tells_of_long_prompts_alone_is_unknown_until_it_told_of_many():
    held = engine((FULL, 0), (STATE, 0))
    usable(held)
    held.changes.clear()
    short = tuple(range(5000, 5040))
    held.attach([1, 2], 2, EnginePrompt(short))
    assert held.changes == {} and not held.tells_all
    for _ in range(TOLD_TIMES):
        assert not held.tells_all
        usable(held)
    assert held.tells_all


def test_a_prompt_shorter_than_a_block_is_no_silence():
    held = engine((FULL, 0), (STATE, 0))
    held.attach([1], 1, EnginePrompt((7, 8, 9)))
    assert held.tells_all and usable(held) == 1200
    held.attach([1], 1, EnginePrompt(tuple(range(5000, 5040))))  # of which it says nothing
    for _ in range(TOLD_TIMES):
        held.attach([1], 1, EnginePrompt((7, 8, 9)))
    assert not held.tells_all, "nor is it a prompt that it told of"


def test_nothing_is_concluded_from_silence_while_batches_are_missing():
    held = engine((FULL, 0), (STATE, 0))
    held.is_whole = False
    held.attach([1], 1, EnginePrompt(tuple(range(5000, 5040))))
    assert held.tells_all


def test_a_group_beside_is_bounded_with_the_others():
    held = HeldBlocks(nodes_max=100)
    held.is_whole = True
    held.apply([stored((FULL, 0), 0, PROMPT), stored((WINDOW, 128), 1, PROMPT)])
    more = tuple(range(9000, 9000 + 60 * BLOCK))
    held.apply([stored((WINDOW, 128), 1, more), stored((STATE, 0), 2, more)])
    assert sum(len(group.held) for group in held._groups.values()) == 100
    assert held.unfollowed and not held.is_whole


class Engine:
    """A cache with groups, each of which holds hashes of its own; any may go at any time."""

    def __init__(self, dice, groups):
        self.dice, self.groups = dice, groups
        self.holds = [set() for _ in groups]

    def compute(self, tokens):
        events = []
        for number, group in enumerate(self.groups):
            kind, _ = group
            hashes = names(tokens)
            keep = self.dice.randint(0, len(hashes)) if kind is WINDOW else len(hashes)
            first = next((at for at, one in enumerate(hashes) if one not in self.holds[number]),
                         len(hashes))  # fmt: skip
            skipped = max(0, len(hashes) - first - keep)
            if kind is STATE:
                skipped = len(hashes) - first - 1
            if first < len(hashes):
                events.append(stored(group, number, tokens, first, skipped=max(0, skipped)))
                self.holds[number] |= set(events[-1].hashes)
        self.dice.shuffle(events)
        return events

    def evict(self):
        number = self.dice.randrange(len(self.groups))
        if not self.holds[number]:
            return []
        gone = self.dice.choice(sorted(self.holds[number]))
        self.holds[number].discard(gone)
        return [removed(number, gone)]

    def can_resume(self, hashes):
        """After these blocks, by vLLM's rules."""
        for held, (kind, window) in zip(self.holds, self.groups, strict=True):
            needed = {FULL: len(hashes), STATE: 1, WINDOW: -(-(window - 1) // BLOCK)}[kind]
            if not held >= set(hashes[-max(1, needed) :]):
                return False
        return True


GROUPS = [
    [(FULL, 0)],
    [(FULL, 0), (WINDOW, 40)],
    [(WINDOW, 20), (FULL, 0)],
    [(FULL, 0), (STATE, 0)],
    [(STATE, 0), (WINDOW, 40), (FULL, 0)],
    [(FULL, 0), (FULL, 0), (WINDOW, 90)],
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_held_is_what_the_engine_can_resume_after_any_events(seed, groups):
    dice = random.Random(seed)
    engine, held = Engine(dice, groups), HeldBlocks()
    prompts, published = {}, {}
    for _ in range(120):
        chance = dice.random()
        if chance < 0.02:
            held.apply([AllCleared()])
            engine.holds = [set() for _ in groups]
        elif chance < 0.5:
            parts = dice.choices(((1,) * BLOCK, (2,) * BLOCK), k=dice.randint(1, 6))
            tokens = tuple(token for part in parts for token in part)
            held.apply(engine.compute(tokens))
            held.attach(names(tokens), len(names(tokens)), EnginePrompt(tokens))
            prompts[tokens] = names(tokens)
        else:
            held.apply(engine.evict())
        if held.cleared:
            published, held.cleared = {}, False
        published |= held.changes
        held.changes.clear()
        there = {text for text, _ in held.held()}
        assert {text for text, tier in published.items() if tier != NOT_HELD} == there
        # All that is held leads to a point where it can be resumed; the deepest of those there are
        # of a prompt that was computed here is held, and all before it.
        points = {path[:end] for path in prompts.values() for end in range(1, len(path) + 1)
                  if engine.can_resume(path[:end])}  # fmt: skip
        assert there <= {block for path in points for block in path}, f"seed {seed}"
    for tokens, path in prompts.items():
        held.apply(engine.compute(tokens))
        held.attach(path, len(path), EnginePrompt(tokens))
        there = {text for text, _ in held.held()}
        if engine.can_resume(path):
            assert set(path) <= there, f"seed {seed}"
