"""One index of all routers of a region: entered, passed on, and merged in order of use."""

from mesh.core.gossip.remote_prefixes import SetOutcome
from mesh.core.gossip.siblings import REPLICAS_MAX, UNKNOWN_S, SharedIndex
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.gossip import SIBLING_PARTS_MAX, TrieDelta, TriePart


def common(knows=lambda replica: True):
    found = SharedIndex(knows)
    found.indexes.append(PrefixIndex(1000))
    return found


def delta(replica, gained=(), lost=(), missed_ms=-1):
    return TrieDelta("us", "r2", 1, 1, tuple(gained), tuple(lost), replica, missed_ms)


def passed_on(source, to, now, about=None, *, asked_at=None):
    """All, or a part, as it is sent when it is asked for; what became of it."""
    parts = source.parts(about, now if asked_at is None else asked_at)
    messages = [
        TriePart(
            *("us", "r2", 1, 1, number, len(parts), blocks, replica, round((now - at) * 1000)),
            -1 if missed_at is None else round((now - missed_at) * 1000),
        )
        for number, (replica, at, blocks, missed_at) in enumerate(parts)
    ]
    return to.put(messages, now if asked_at is None else asked_at, now)


def order(index, replica):
    return [block for block, _ in index.indexes[0].held(replica)]


def test_a_snapshot_keeps_the_order_of_use():
    one, other = common(), common()
    for at, path in enumerate(((1, 2, 3), (1, 2, 4), (9,))):
        one.take(delta("us-0", path), 10.0 * at)
    assert passed_on(one, other, 30.0) is SetOutcome.TAKEN
    assert order(one, "us-0") == order(other, "us-0") == [3, 4, 2, 1, 9]


def test_of_two_that_know_something_the_later_use_counts():
    one, other = common(), common()
    one.take(delta("us-0", (1,)), 0.0)
    one.take(delta("us-0", (2,)), 5.0)
    other.take(delta("us-0", (3,)), 3.0)
    other.take(delta("us-0", (1,)), 8.0)
    passed_on(one, other, 10.0)
    assert order(other, "us-0") == [3, 2, 1]


def test_only_the_replicas_that_are_asked_about_are_passed_on():
    one, other = common(), common()
    for replica in ("us-0", "us-1"):
        one.take(delta(replica, (1, 2)), 0.0)
    passed_on(one, other, 1.0, about={"us-1"})
    assert other.indexes[0].owners == ("us-1",)


def test_what_was_missed_does_not_come_back_with_an_old_snapshot():
    one, other = common(), common()
    one.take(delta("us-0", (1, 2)), 0.0)
    other.take(delta("us-0", (1, 2)), 0.0)
    other.indexes[0].forget_until("us-0", 4.0)
    passed_on(one, other, 5.0)
    assert order(other, "us-0") == []
    passed_on(other, one, 6.0)  # it has nothing of that replica
    one.take(delta("us-0", missed_ms=2000), 6.0)
    assert order(one, "us-0") == []


def test_a_replica_that_was_lost_while_a_snapshot_came_is_left_out_of_it():
    """Its sender did not know of that yet: only the next one has what is there since then."""
    one, other = common(), common()
    one.take(delta("us-0", (1, 2)), 0.9)
    one.take(delta("us-1", (3, 4)), 0.9)
    other.indexes[0].expire(1.4)
    other.indexes[0].forget(
        "us-0"
    )  # asked at 1.0, answered at 1.5: as if it had been placed at 1.4
    assert passed_on(one, other, 1.5, asked_at=1.0) is SetOutcome.IN_PART
    assert other.indexes[0].owners == ("us-1",)
    one.indexes[0].forget("us-0")
    one.take(delta("us-0", (5,)), 1.5)
    assert passed_on(one, other, 2.0) is SetOutcome.TAKEN
    assert order(other, "us-0") == [5]


def test_parts_have_a_limit_however_much_there_is():
    one = common()
    one.indexes[0] = PrefixIndex(65_536, ttl_s=1e9)
    for number in range(2 * SIBLING_PARTS_MAX):
        one.take(delta("us-0", (number,)), 2.0 * number)
    parts = one.parts(None, 4.0 * SIBLING_PARTS_MAX)
    assert len(parts) <= SIBLING_PARTS_MAX
    assert sum(len(blocks) for _, _, blocks, _ in parts) == 2 * SIBLING_PARTS_MAX


def test_invented_replicas_are_limited():
    one = common()
    for number in range(REPLICAS_MAX + 5):
        one.take(delta(f"x-{number}", (number,)), 0.0)
    one.take(delta("", (1,)), 0.0)
    assert len(one.indexes[0].owners) == REPLICAS_MAX


def test_a_replica_that_stays_unknown_is_dropped():
    ours = {"us-0"}
    one = common(ours.__contains__)
    for replica in ("us-0", "eu/eu-0"):
        one.take(delta(replica, (1, 2)), 0.0)
    for now in (0.0, UNKNOWN_S - 0.1):
        one.expire(now)
    assert set(one.indexes[0].owners) == {"us-0", "eu/eu-0"}, "its heartbeat may be on its way"
    one.expire(UNKNOWN_S + 1.0)
    assert one.indexes[0].owners == ("us-0",)


def test_one_that_is_known_in_time_stays_and_its_time_starts_anew_when_it_goes():
    ours = set()
    one = common(ours.__contains__)
    one.take(delta("us-0", (1, 2)), 0.0)
    one.expire(0.0)
    ours.add("us-0")
    one.expire(UNKNOWN_S + 1.0)
    ours.clear()
    one.expire(UNKNOWN_S + 3.0)
    assert order(one, "us-0") == [2, 1]
    one.expire(2 * UNKNOWN_S + 4.0)
    assert one.indexes[0].owners == ()
