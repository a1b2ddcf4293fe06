"""A few inputs for each decoder: the same each time, and others each day."""

from datetime import UTC, datetime

import pytest

from tests.fuzz.__main__ import tried
from tests.fuzz.decoders import decoders

OF_TODAY = datetime.now(UTC).date().toordinal()


@pytest.mark.parametrize("name", [name for name, _ in decoders()])
def test_a_decoder_raises_what_it_promises(name):
    taken = 0
    for seed in (1, OF_TODAY):
        ends, faults = tried(name, 150, seed)
        assert not faults, "\n".join((f"seed {seed}", *faults.values()))
        taken += ends["taken"]
    assert taken, "what is damaged was not valid before"
