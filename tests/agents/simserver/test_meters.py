"""Histograms and rates."""

from agents.simserver.metrics import Histogram, Meters


def test_a_histogram_counts_at_or_below_each_bound():
    histogram = Histogram((0.1, 0.5))
    for value in (0.05, 0.1, 0.3, 9.0):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [("0.1", 2), ("0.5", 3), ("+Inf", 4)]
    assert histogram.count == 4


def test_throughput_is_the_rate_between_two_scrapes():
    meters = Meters()
    meters.throughput(0, 100.0)
    assert meters.throughput(50, 100.5) == 0.0, "too soon to say"
    assert meters.throughput(90, 102.0) == 45.0
