"""When the last requests at an engine say that it fails them."""

import pytest

from schemas.state import RESULTS_MAX, EngineResults


@pytest.mark.parametrize(
    ("failed", "of", "in_a_row", "is_failing", "words"),
    [
        (9, 10, 2, True, "9 of its last 10 requests, HTTP 500"),
        (3, 3, 3, True, "its last 3 requests, HTTP 500"),
        (2, 2, 2, False, "2 of its last 2 requests, HTTP 500"),  # too few to say so
        (3, 5, 0, True, "3 of its last 5 requests, HTTP 500"),
        (2, 4, 1, False, "2 of its last 4 requests, HTTP 500"),
        (5, 10, 1, True, "5 of its last 10 requests, HTTP 500"),
        (4, 10, 2, False, "4 of its last 10 requests, HTTP 500"),
        (3, 64, 3, True, "its last 3 requests, HTTP 500"),  # it began to fail just before
        (1, RESULTS_MAX, 1, False, "1 of its last 64 requests, HTTP 500"),
    ],
)
def test_failing_is_three_in_a_row_or_half_of_some(failed, of, in_a_row, is_failing, words):
    results = EngineResults(failed=failed, of=of, in_a_row=in_a_row, what="HTTP 500")
    assert (results.is_failing, results.words) == (is_failing, words)
