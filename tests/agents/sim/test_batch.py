"""Who gets in, who gives way, and how far the memory reaches."""

from agents.sim.batch import Batch, SequenceState
from agents.sim.events import SimRequest
from agents.sim.kv_cache import KvCache


def sequence(request_id: int, prompt: int, output: int = 100) -> SequenceState:
    return SequenceState(SimRequest(request_id, prompt, output), ready_at=0.0)


def admitted(batch: Batch, *sequences: SequenceState) -> None:
    for seq in sequences:
        assert batch.admit(seq)
        assert batch.prefill(seq, seq.target)


def test_admission_leaves_everyone_who_runs_a_block_to_grow():
    batch = Batch(KvCache(10), block_tokens=16, max_seqs=8)
    admitted(batch, sequence(1, 64))
    assert not batch.admit(sequence(2, 80)), "5 of the 6 blocks left would leave 1 for 2"
    assert batch.admit(sequence(3, 64))


def test_alone_a_sequence_may_fill_the_memory():
    batch = Batch(KvCache(4), block_tokens=16, max_seqs=8)
    assert batch.admit(sequence(1, 64))


def test_the_batch_has_a_size():
    batch = Batch(KvCache(100), block_tokens=16, max_seqs=2)
    admitted(batch, sequence(1, 16), sequence(2, 16))
    assert not batch.admit(sequence(3, 16))


def test_rounds_that_fit_is_exact():
    batch = Batch(KvCache(6), block_tokens=16, max_seqs=8)
    one, two = sequence(1, 16), sequence(2, 24)
    admitted(batch, one, two)
    # 3 blocks are left: one needs its second at once and its third 16 tokens later, two its
    # third after 8. The fourth comes at 25 tokens from now, for two.
    assert batch.rounds_that_fit(10) == 10
    assert batch.rounds_that_fit(90) == 24
    batch.decode(24)
    assert batch.cache.available == 0
    assert batch.rounds_that_fit(1) == 0


def test_the_newest_gives_way_and_gives_everything_back():
    batch = Batch(KvCache(20), block_tokens=16, max_seqs=8)
    old, new = sequence(1, 64), sequence(2, 64)
    admitted(batch, old)
    assert batch.admit(new)
    assert batch.newest() is new, "in prefill is newer than in decode"
    batch.prefill(new, 64)
    assert batch.newest() is new
    batch.remove(new)
    assert (batch.newest(), batch.cache.used, new.computed) == (old, 4, 0)
