"""Durations of a report."""

import pytest

from mesh.doctor.findings import as_ms, go_duration_s


@pytest.mark.parametrize(
    ("seconds", "ms"),
    [(0.080469123, 80.5), (0.00004567, 0.0457), (0.2204, 220.0), (1.23456, 1230.0), (0.0, 0.0)],
)
def test_a_duration_has_three_significant_digits(seconds: float, ms: float) -> None:
    assert as_ms(seconds) == ms


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("80.469123ms", 0.080469123),
        ("456µs", 0.000456),
        ("456us", 0.000456),
        ("900ns", 9e-7),
        ("1.5s", 1.5),
        ("1m2.5s", 62.5),
        ("1h0m1s", 3601.0),
        ("", None),
        ("soon", None),
        ("1.5", None),
    ],
)
def test_a_servers_durations_are_read(text: str, seconds: float | None) -> None:
    assert go_duration_s(text) == (None if seconds is None else pytest.approx(seconds))
