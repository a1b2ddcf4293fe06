import pytest

from mesh.http.server import (
    CONNECTIONS_MAX,
    DESCRIPTORS_KEPT,
    ConnectionLimit,
    ConnectionSlot,
    connections_max,
)


def test_beyond_the_limit_there_are_places_for_probes_and_then_none():
    connections = ConnectionLimit(2, probes=1)
    places = [connections.enter() for _ in range(4)]
    assert places == [
        ConnectionSlot.ANY,
        ConnectionSlot.ANY,
        ConnectionSlot.PROBE,
        ConnectionSlot.NONE,
    ]
    assert connections.is_full and not connections.has_probes
    connections.leave()
    assert connections.enter() is ConnectionSlot.PROBE
    for _ in range(3):
        connections.leave()
    assert connections.enter() is ConnectionSlot.ANY


def test_more_leaving_than_came_is_our_own_fault():
    with pytest.raises(AssertionError):
        ConnectionLimit(1).leave()


@pytest.mark.parametrize(
    ("descriptors", "most"),
    [(1 << 20, CONNECTIONS_MAX), (4096, 4096 - DESCRIPTORS_KEPT), (256, 64)],
)
def test_descriptors_are_kept_for_all_else(descriptors, most):
    assert connections_max(descriptors) == most
