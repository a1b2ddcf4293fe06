"""Small worlds of other seeds each day, in a file of their own for a worker of their own."""

from datetime import UTC, datetime

import pytest

from tests.seeds.small import FIRST_ONES, no_promise_is_broken

OF_TODAY = 1_000_000 + 1000 * datetime.now(UTC).date().toordinal()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [OF_TODAY + first for first in FIRST_ONES])
def test_no_promise_is_broken(first):
    no_promise_is_broken(first)
