"""Is another attempt worth its cost? By what the attempts before came to."""

import pytest

from mesh.core.requests.inflight import Inflight
from mesh.core.requests.retries import is_worth_another, note_status
from tests.mesh.core.build import request

LOST = None


@pytest.mark.parametrize(
    ("failures", "again"),
    [
        ([LOST], True),
        ([LOST, LOST], True),
        ([LOST, LOST, LOST], False),
        ([500], True),
        ([500, 500], False),
        ([500, 503], False),
        ([501], False),
        ([LOST, 501], False),
        ([LOST, 500], True),
        ([500, LOST], True),
        ([500, LOST, 500], False),
        ([429], True),
        ([429, 429], True),
        ([429, 429, 429], False),
        ([500, 429], True),
    ],
)
def test_another_attempt(failures, again) -> None:
    record = Inflight(request(1))
    for status in failures:
        record.release(now=0.0)
        note_status(record, status)
        record.failures += 1
    assert is_worth_another(record, failures_max=3) is again
