"""Long streams leave a replica that operators want empty, and none is lost by that."""

import pytest

from mesh.core.lifecycle.continued_streams import LONG_S, MOVES_AT_ONCE
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from schemas.residency import OPEN_GROUND, Ground, Label, ground
from schemas.state import ReplicaState
from tests.mesh.core import build
from tests.mesh.core.lifecycle.test_continued_streams import LONGER, Story

DRAINING = ReplicaState.DRAINING
EMPTY = ev.MoveStreams(everywhere=True)
PATIENT = {"heartbeat_late_s": 240.0, "heartbeat_lost_s": 240.0}


def drained(
    engines: tuple[str, ...] = ("vllm", "vllm", "vllm"),
    order: ev.Event = EMPTY,
    where: Ground = OPEN_GROUND,
) -> Story:
    """A stream that has taken LONG_S on a replica that is drained since, under that order."""
    story = Story(engines, {**PATIENT, "ground": where})
    story.started()
    story.feed(order)
    story.beat(story.replica, state=DRAINING, outstanding=1, engine=engines[int(story.replica[-1])])
    story.now += LONG_S
    return story


def asked(told: list[fx.Effect]) -> list[int]:
    return [one.key for one in told if isinstance(one, fx.MayMove)]


def test_a_long_stream_goes_on_elsewhere_and_the_edge_is_asked_once() -> None:
    story = drained()
    story.now -= 0.1
    assert asked(story.feed(ev.Tick())) == [], "it may end by itself"
    story.now += 0.1
    assert story.feed(ev.Tick()) == [fx.MayMove(1, 1)]
    assert asked(story.feed(ev.Tick())) == []
    left = story.replica
    cancelled, broke = story.feed(ev.Movable(1, 1, ("vllm",)))
    why = f"{left} is drained, and its streams go on elsewhere: moved"
    assert cancelled == fx.CancelAttempt(1, 1, build.US, left, why)
    assert broke == fx.Continue(1, 1, why)
    assert story.feed(ev.Movable(1, 1)) == [], "it has left"
    [placed] = story.read("vllm")
    assert isinstance(placed, fx.Dispatch) and placed.replica != left
    story.started()
    story.feed(ev.AnswerEnded(1, 2, Served(150, 0, 9)))
    assert not story.core.inflight


@pytest.mark.parametrize("order", [None, ev.MoveStreams(("us-9",))])
def test_it_stays_where_nobody_wants_its_replica_empty(order) -> None:
    story = drained(order=order or ev.MoveStreams())
    assert asked(story.feed(ev.Tick())) == []
    story.feed(ev.MoveStreams((story.replica,)))
    assert asked(story.feed(ev.Tick())) == [1]
    story = drained()
    story.beat(story.replica, outstanding=1)  # it takes work, so the rest could go there
    assert asked(story.feed(ev.Tick())) == []


def test_a_stream_that_no_other_place_could_go_on_with_stays_and_ends_well() -> None:
    alone = drained(("vllm",))
    assert asked(alone.feed(ev.Tick())) == []
    story = drained(("openai", "openai", "openai"))
    assert asked(story.feed(ev.Tick())) == [1]
    assert story.feed(ev.Movable(1, 1, ("vllm",))) == []
    unarmed = drained()
    unarmed.started(may_continue=False)
    assert asked(unarmed.feed(ev.Tick())) == []
    for left in (alone, story, unarmed):
        assert left.core.inflight[1].has_started
        assert left.feed(ev.AnswerEnded(1, 1)) == []


def test_a_few_are_moved_at_once_and_none_while_requests_for_their_model_wait() -> None:
    story = Story(("vllm",), PATIENT)
    keys = range(1, 2 * MOVES_AT_ONCE + 1)
    for key in keys[1:]:
        story.feed(ev.RequestArrived(build.request(key, arrived_at=story.now)))
    for key in keys:
        story.feed(ev.AnswerStarted(key, 1, may_continue=True))
    story.beat("us-0", state=DRAINING, outstanding=len(keys))
    story.beat("us-1")
    story.feed(EMPTY)
    story.now += LONG_S
    first = asked(story.feed(ev.Tick()))
    assert len(first) == MOVES_AT_ONCE
    for key in first:
        attempt = story.core.inflight[key].attempt
        story.feed(ev.Movable(key, attempt))
        story.feed(ev.ContinuationRead(key, attempt, "moved", LONGER))
    assert asked(story.feed(ev.Tick())) == [], "none of these has begun again"
    for key in first:
        story.feed(ev.AnswerStarted(key, story.core.inflight[key].attempt, may_continue=True))
    story.beat("us-1", full=True, pending=1)
    story.feed(ev.RequestArrived(build.request(99, arrived_at=story.now)))
    assert story.core.inflight[99].held_since is not None
    assert asked(story.feed(ev.Tick())) == []
    story.feed(ev.ClientGone(99))
    assert len(asked(story.feed(ev.Tick()))) == MOVES_AT_ONCE


def test_none_is_held_up_by_requests_that_no_replica_may_serve() -> None:
    story = drained(where=ground({build.US: ("gdpr",)}))
    for name in {"us-0", "us-1", "us-2"} - {story.replica}:
        story.beat(name, residency=())
    wanted = build.request(9, arrived_at=story.now, residency=(Label("gdpr"),))
    story.feed(ev.RequestArrived(wanted))
    assert story.core.inflight[9].held_since is not None, "the drained replica may come back"
    assert asked(story.feed(ev.Tick())) == [1]


def test_none_is_moved_while_the_bus_is_away() -> None:
    story = drained()
    story.feed(ev.BusLost())
    assert asked(story.feed(ev.Tick())) == []
    story.feed(ev.BusReturned())
    assert asked(story.feed(ev.Tick())) == [1]


def test_streams_of_other_regions_clients_go_on_too() -> None:
    """The region's digests say what is to be empty, as long as it is not."""
    story = Story()
    story.feed(EMPTY)
    story.beat("us-0", state=DRAINING, outstanding=1)
    story.beat("us-1", state=DRAINING)
    story.now += 1.0
    told = story.core.handle(ev.Tick(), story.now)
    [digest] = [one.digest for one in told if isinstance(one, fx.PublishDigest)]
    assert digest.moving == ("us-0",)

    core, now = build.core(policy="least-load"), 10.0
    core.handle(ev.DigestSeen(build.digest("eu", free=2)), now)
    told = core.handle(ev.RequestArrived(build.request(1, arrived_at=now)), now)
    assert any(isinstance(one, fx.Forward) for one in told)
    core.handle(ev.PlacedByPeer(1, 1, "eu-0"), now)
    core.handle(ev.AnswerStarted(1, 1, may_continue=True), now)
    now += LONG_S
    for seq, moving in ((2, ("eu-1",)), (3, ("eu-0", "eu-1"))):
        core.handle(ev.DigestSeen(build.digest("eu", seq, free=1, moving=moving)), now)
        assert asked(core.handle(ev.Tick(), now)) == ([1] if "eu-0" in moving else [])
    told = core.handle(ev.Movable(1, 1), now)
    assert isinstance(told[-1], fx.Continue)
    told = core.handle(ev.ContinuationRead(1, 1, "moved", LONGER), now)
    [sent] = [one for one in told if isinstance(one, fx.Forward)]
    assert sent.peer == build.EU, "another replica of that region may go on with it"
