"""Pushing: the three rules read from text, and what each allows."""

import pytest

from mesh.core.model.settings import RouterSettings
from mesh.core.view.replica_table import ReplicaTable
from schemas.settings import BLIND, PENDING, Pushing, PushingKind, parse_pushing
from tests.mesh.core.build import MODEL, ROUTER, beat


@pytest.mark.parametrize("text", ["blind", "pending", "outstanding:1", "outstanding:100000"])
def test_what_is_read_is_what_is_written(text):
    assert str(parse_pushing(text)) == text


NONSENSE = ("", "Blind", "outstanding", "outstanding:", "outstanding:0", "outstanding:-1")
NONSENSE += ("outstanding:1.5", "outstanding:100001", "outstanding:٣", "pending:3")


@pytest.mark.parametrize("text", NONSENSE)
def test_anything_else_is_refused_with_what_fits(text):
    with pytest.raises(ValueError, match="blind, pending or outstanding:N"):
        parse_pushing(text)


@pytest.mark.parametrize(
    ("pushing", "fields", "why"),
    [
        (PENDING, {"pending": 1}, "pending"),
        (PENDING, {"full": True}, "full"),
        (PENDING, {"running": 7}, None),
        (BLIND, {"pending": 9, "running": 8, "full": True}, None),
        (Pushing(PushingKind.OUTSTANDING, 3), {"outstanding": 2, "pending": 1}, None),
        (Pushing(PushingKind.OUTSTANDING, 3), {"outstanding": 3}, "outstanding"),
    ],
)
def test_who_may_be_given_work(pushing, fields, why):
    table = ReplicaTable(ROUTER, RouterSettings(pushing=pushing))
    table.see(beat("a", **fields), 0.0)
    (replica,) = table
    assert table.unavailable_because(replica, MODEL, 0.0) == why


def test_hand_offs_count_as_outstanding():
    table = ReplicaTable(ROUTER, RouterSettings(pushing=Pushing(PushingKind.OUTSTANDING, 2)))
    table.see(beat("a"), 0.0)
    (replica,) = table
    for why in (None, None, "outstanding"):
        assert table.unavailable_because(replica, MODEL, 0.0) == why
        table.hand_off(replica.heartbeat.replica, 10, 10, 0.0)
