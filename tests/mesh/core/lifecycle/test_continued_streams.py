"""A stream that breaks is placed again with what was said, a bounded number of times."""

from collections.abc import Mapping

import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.model_targets import Asked, ModelRule
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Served
from mesh.core.router import RouterCore
from schemas.exchange import Refusal
from schemas.http import Fault
from tests.mesh.core import build

RULES = (ModelRule(name="chat", to=(("stable", 0.5), ("canary", 0.5))),)
LONGER = Prompt(150, build.prompt("AB").hashes)


class Story:
    """One router with three replicas, and what it does about one request."""

    def __init__(
        self,
        engines: tuple[str, ...] = ("vllm", "vllm", "vllm"),
        settings: Mapping[str, object] = {},
        **fields: object,
    ):
        self.core: RouterCore = build.core(policy="least-load", **settings)
        self.now, self.seq = 10.0, 1
        for number, engine in enumerate(engines):
            models = (fields.get("model", build.MODEL),)
            self.beat(f"us-{number}", engine=engine, models=models)
        [placed] = self.feed(ev.RequestArrived(build.request(1, arrived_at=10.0, **fields)))
        self.attempt, self.replica = placed.attempt, placed.replica

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        told = self.core.handle(event, self.now)
        return [one for one in told if not isinstance(one, fx.Decided | fx.PublishDigest)]

    def beat(self, name: str, **fields: object) -> None:
        self.seq += 1
        self.feed(ev.HeartbeatSeen(build.beat(name, self.seq, **fields)))

    def reported(self) -> None:
        self.seq += 1
        for number in range(3):
            self.feed(ev.HeartbeatSeen(build.beat(f"us-{number}", seq=self.seq)))

    def started(self, *, may_continue: bool = True, why_not: str = "") -> None:
        self.feed(
            ev.AnswerStarted(1, self.attempt, may_continue=may_continue, why_not=why_not),
        )

    def failed(self) -> list[fx.Effect]:
        return self.feed(ev.AttemptFailed(1, self.attempt, "cut"))

    def read(self, *kinds: str) -> list[fx.Effect]:
        told = self.feed(ev.ContinuationRead(1, self.attempt, "cut", LONGER, kinds))
        if told and isinstance(told[0], fx.Dispatch):
            self.attempt, self.replica = told[0].attempt, told[0].replica
        return told


def test_what_was_said_goes_to_another_replica_as_part_of_the_prompt() -> None:
    story = Story(slo_ttft_s=0.15)
    story.now = 10.1
    first = story.replica
    story.started()
    story.now = 10.2
    assert story.failed() == [fx.Continue(1, 1, "cut")]
    [placed] = story.read("vllm")
    assert isinstance(placed, fx.Dispatch)
    assert (placed.attempt, placed.prefill_tokens > 100) == (2, True)
    assert placed.replica != first
    assert story.core.inflight[1].request.slo_ttft_s is None, "its first token was in time"
    story.started()
    story.feed(ev.AnswerEnded(1, 2))
    assert not story.core.inflight


def test_it_breaks_so_often_and_no_more() -> None:
    story = Story()
    for _ in range(3):
        story.started()
        assert isinstance(story.failed()[0], fx.Continue)
        assert isinstance(story.read()[0], fx.Dispatch)
        story.reported()  # those that failed it before may have it again
    story.started()
    message = "cut; it has gone on from 3 other engines, and does no more"
    assert story.failed() == [fx.Fail(1, Fault.ENGINE_FAILED, message, None, None)]


@pytest.mark.parametrize("why", ["", "its model's are not to"])
def test_what_can_not_go_on_at_all_says_why(why) -> None:
    story = Story()
    story.started(may_continue=False, why_not=why)
    [failed] = story.failed()
    assert failed.message == (f"cut; {why}" if why else "cut")


def test_it_is_the_requests_end_where_nothing_is_kept_or_nobody_can() -> None:
    unarmed = Story()
    unarmed.started(may_continue=False)
    assert isinstance(unarmed.failed()[0], fx.Fail)
    gone = "no other replica serves its model at present"
    unable = "a chat goes on from engines of kind vllm alone, and no other is left"
    for engines, kinds, why in (
        (("vllm",), (), gone),
        (("vllm",), ("vllm",), gone),
        (("vllm", "openai", "openai"), ("vllm",), unable),
    ):
        story = Story(engines)
        while story.replica != "us-0":  # it goes to any of them
            story = Story(engines)
        story.started()
        story.failed()
        [failed] = story.read(*kinds)
        assert isinstance(failed, fx.Fail) and failed.message == f"cut; {why}"
        assert not story.core.inflight
    refused = Story()
    refused.started()
    refused.failed()
    assert refused.feed(ev.ContinuationRead(1, 1, "cut; it has a grammar")) == [
        fx.Fail(1, Fault.ENGINE_FAILED, "cut; it has a grammar", None, None)
    ]


def test_a_lost_replica_breaks_it_too_and_a_client_may_leave_meanwhile() -> None:
    story = Story()
    story.started()
    for _ in range(30):  # the others go on
        story.now += 0.1
        for number in range(3):
            if (name := f"us-{number}") != story.replica:
                beat = build.beat(name, seq=round(story.now * 10))
                story.feed(ev.HeartbeatSeen(beat))
        told = story.feed(ev.Tick())
        if any(isinstance(one, fx.Continue) for one in told):
            break
    else:
        raise AssertionError("it was not noticed")
    story.feed(ev.Tick())
    assert isinstance(story.read()[0], fx.Dispatch)
    story.started()
    story.failed()
    story.feed(ev.ClientGone(1))
    assert not story.core.inflight
    assert story.feed(ev.ContinuationRead(1, 2, "cut", LONGER)) == []


def test_an_engines_error_to_the_rest_ends_the_stream_with_an_error_event() -> None:
    story = Story()
    story.started()
    story.failed()
    story.read()
    for _ in range(3):
        told = story.feed(ev.AttemptFailed(1, story.attempt, "the engine answered 400", 400))
        if isinstance(told[-1], fx.Fail):
            assert "; where it was to go on: the engine answered 400" in told[-1].message
            return
        story.attempt = told[-1].attempt
    raise AssertionError(told)


def test_the_rest_of_a_stream_is_not_taken_from_a_replica_whose_client_reads_slowly() -> None:
    """It begins when the client has read on, while the replica's like begin others at once."""
    story = Story()

    def others_answer(keys: range) -> None:
        for key in keys:
            arrived = build.request(key, arrived_at=story.now)
            [placed] = story.feed(ev.RequestArrived(arrived))
            assert isinstance(placed, fx.Dispatch)
            if placed.replica == story.replica:
                story.feed(ev.ClientGone(key))
            else:
                story.now += 0.1
                story.feed(ev.AnswerStarted(key, placed.attempt))
                story.feed(ev.AnswerEnded(key, placed.attempt, Served(100, 0, 9)))
            story.now += 0.5
            story.reported()
            story.feed(ev.AttemptProgressed(1, story.attempt))
            story.feed(ev.Tick())

    story.started()
    others_answer(range(2, 42))
    story.failed()
    story.read()
    others_answer(range(42, 62))
    assert story.core.inflight[1].attempt == 2
    assert not story.core.inflight[1].failures


def test_no_other_model_goes_on_with_what_one_has_begun() -> None:
    story = Story(
        ("vllm", "vllm"), settings={"models": RULES}, model="canary", asked=Asked("chat", 1)
    )
    story.started()
    story.beat("us-0", models=("canary",), full=True, pending=1)
    story.beat("us-1", models=("canary",), full=True, pending=1)
    story.failed()
    told = story.read()
    for name in ("us-0", "us-1"):
        story.beat(name, models=("stable",))
    for _ in range(10):
        story.now += 0.1
        told += story.feed(ev.Tick())
    moved = [one for one in told if isinstance(one, fx.Retargeted | fx.Dispatch)]
    assert story.core.inflight[1].held_since is not None and not moved


def test_a_stream_does_not_return_to_where_it_broke_while_another_place_is_left() -> None:
    story = Story()
    went = [story.replica]
    for _ in range(2):
        story.started()
        story.failed()
        for name in ("us-0", "us-1", "us-2"):
            new = name not in went
            story.beat(name, running=6 * new, outstanding=6 * new)
        story.read()
        went.append(story.replica)
    assert set(went) == {"us-0", "us-1", "us-2"}


def test_a_peer_that_refuses_what_is_to_go_on_is_right_for_all_else() -> None:
    story = Story(("vllm",))
    story.feed(ev.DigestSeen(build.digest("eu", free=4)))
    assert story.replica == "us-0"
    story.started()
    story.failed()
    told = story.feed(ev.ContinuationRead(1, 1, "cut", LONGER))
    [sent] = [one for one in told if isinstance(one, fx.Forward)]
    refused = ev.AttemptRefused(1, sent.attempt, Refusal.WRONG_MODEL, build.EU, None, -1, -1)
    story.feed(refused)
    peers = story.core.peers
    assert peers.unavailable_because(peers.get("eu"), build.MODEL, story.now) is None
    story.now += 5.0  # longer than a refusal keeps it away from a peer
    story.feed(ev.DigestSeen(build.digest("eu", 2, free=4)))
    assert not any(isinstance(one, fx.Forward) for one in story.feed(ev.Tick()))
