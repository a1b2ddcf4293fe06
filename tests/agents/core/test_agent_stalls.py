"""AgentCore and an engine that answers scrapes and computes nothing."""

import pytest

from agents.core import effects, events
from agents.core.engine_health import BLIND_S, FIRST_S, FLOOR_S, LOADED_S, MARGIN
from agents.core.events import EngineReading
from schemas.engine_routes import SERVER_PATHS
from schemas.exchange import Outcome, Refusal
from schemas.state import DownReason, ReplicaState
from tests.agents.core.bench import MODEL, Bench, inbox

LATE = {"Mesh-Deadline-Ms": "600000", "Mesh-Prefill-Tokens": "20"}


class Stage(Bench):
    """Looks at the engine 20 times a second, and its router says that it lives."""

    steps = 0.0
    models = (MODEL,)
    paths = ()
    shows_numbers = True

    def run(self, seconds: float, *, works: bool = False, held: tuple[str, ...] = ()) -> list:
        done = []
        for _ in range(round(seconds * 20)):
            self.steps += works
            done += self.tick(0.05)
            reading = EngineReading(
                waiting=0, running=0, progress=(self.steps,) * self.shows_numbers
            )
            done += self.feed(
                events.EngineScraped(
                    self.now, reading, self.models, paths=self.paths, held=frozenset(held)
                )
            )
            done += self.feed(events.AliveArrived("us", "r1", 1))
        return done


@pytest.fixture
def stage() -> Stage:
    stage = Stage(outstanding_max=8)
    stage.run(0.5)
    stage.work(9, **LATE)
    stage.run(1.0, works=True)
    stage.feed(events.RelayBegan(inbox(9)))
    stage.end(9)
    return stage


HANGS_S = FLOOR_S + MARGIN * 0.1


def test_what_has_no_byte_is_refused_and_what_has_is_left_alone_for_a_while(stage) -> None:
    stage.work(1, **LATE)
    stage.work(2, **LATE)
    stage.feed(events.RelayBegan(inbox(1)))
    stage.work(3, **{**LATE, "Mesh-Body-Bytes": "4"})
    done = stage.run(HANGS_S + 0.5)
    refused, aborted, probe = (
        next(one for one in done if isinstance(one, kind))
        for kind in (effects.Refuse, effects.AbortRelay, effects.ProbeEngine)
    )
    assert len(done) == 3
    assert (refused.inbox, refused.message.reason) == (inbox(3), Refusal.ENGINE_DOWN)
    assert (aborted.inbox, aborted.refused.reason) == (inbox(2), Refusal.ENGINE_DOWN)
    assert probe == effects.ProbeEngine("/v1/completions", MODEL)
    assert (stage.beat.state, stage.beat.down_reason) == (ReplicaState.DOWN, DownReason.HUNG)
    because = stage.core.down_because(stage.now)
    said = "engine hung: 2 requests outstanding, no output and no counter moved for 4."
    assert because.startswith(said), because
    stage.end(2, Outcome.ENGINE_LOST)
    [late] = [one for one in stage.work(4, **LATE) if isinstance(one, effects.Refuse)]
    assert late.message.reason is Refusal.ENGINE_DOWN
    done = stage.run(HANGS_S)
    [given_up] = [one for one in done if isinstance(one, effects.AbortRelay)]
    assert (given_up.inbox, given_up.outcome) == (inbox(1), Outcome.ENGINE_LOST)
    assert given_up.refused is None


@pytest.mark.parametrize("sign", ["probe", "step"])
def test_it_takes_work_again_when_it_computes(stage, sign) -> None:
    stage.work(1, **LATE)
    stage.run(HANGS_S + 0.5)
    stage.end(1, Outcome.ENGINE_LOST)
    if sign == "probe":
        stage.feed(events.ProbeEnded(answered=False))
        assert [one for one in stage.run(1.5) if isinstance(one, effects.ProbeEngine)]
        stage.feed(events.ProbeEnded(answered=True))
    else:
        stage.run(0.1, works=True)
    assert (stage.beat.state, stage.beat.down_reason) == (ReplicaState.READY, None)
    assert [one for one in stage.work(2, **LATE) if isinstance(one, effects.StartRelay)]


def test_answers_that_wait_for_their_clients_are_no_hang(stage) -> None:
    stage.work(1, **LATE)
    stage.feed(events.RelayBegan(inbox(1)))
    assert stage.run(10 * HANGS_S, held=(inbox(1),)) == []


def test_what_waits_for_its_client_outlives_a_hang(stage) -> None:
    for number in (1, 2):
        stage.work(number, **LATE)
        stage.feed(events.RelayBegan(inbox(number)))
    done = stage.run(3 * HANGS_S, held=(inbox(1),))
    [given_up] = [one for one in done if isinstance(one, effects.AbortRelay)]
    assert given_up.inbox == inbox(2)
    assert [one.inbox for one in stage.run(0.2) if isinstance(one, effects.AbortRelay)] == [
        inbox(1)
    ]


def test_one_without_numbers_keeps_what_it_was_handed_for_long() -> None:
    """With one slot a probe waits as well: no new work comes, and what it has may end."""
    stage = Stage(outstanding_max=8, counts_own=True, load_s=BLIND_S)
    stage.shows_numbers = False
    stage.run(0.5)
    stage.work(1, **LATE)
    found, ended_s = [], 0.0
    while not any(isinstance(one, effects.AbortRelay) for one in found):
        assert ended_s < 600.0
        ended_s += 1.0
        done = stage.run(1.0)
        if any(isinstance(one, effects.ProbeEngine) for one in done):
            if not found:
                stage.work(2, **{**LATE, "Mesh-Body-Bytes": "4"})
            done += stage.feed(events.ProbeEnded(answered=False))
            assert stage.beat.down_reason is DownReason.HUNG
        found += done
    refused = next(one for one in found if isinstance(one, effects.Refuse))
    assert refused.inbox == inbox(2), "not handed over yet"
    assert ended_s > 5 * BLIND_S


def test_time_around_failed_scrapes_is_not_counted(stage) -> None:
    stage.work(1, **LATE)
    stage.run(FLOOR_S / 2)
    stage.tick(1.5)
    stage.fail(times=1)
    done = stage.run(FLOOR_S / 2)
    assert not [one for one in done if isinstance(one, effects.AbortRelay)]


def test_occasional_failed_scrapes_hide_no_hang(stage) -> None:
    stage.work(1, **LATE)
    done = []
    for _ in range(4):
        stage.fail(times=1)
        done += stage.run(FLOOR_S - 0.1)
    assert [one for one in done if isinstance(one, effects.AbortRelay)]


def test_a_new_engine_has_its_time(stage) -> None:
    fresh = Stage()
    fresh.run(0.5)
    fresh.work(1, **LATE)
    assert fresh.run(FIRST_S) == []
    assert fresh.run(0.5)


def test_errors_of_its_front_are_no_signs_and_no_probe_is_like_them(stage) -> None:
    """vLLM's HTTP server refuses requests by itself while the processes behind it hang."""
    chat = {**LATE, "Mesh-Path": "/v1/chat/completions"}
    stage.work(1, **LATE)
    for number in range(2, 7):
        stage.work(number, **chat)
        stage.feed(events.RelayBegan(inbox(number), good=False))
        stage.end(number)
        assert stage.run(HANGS_S / 8) == []
    assert effects.ProbeEngine("/v1/completions", MODEL) in stage.run(HANGS_S / 2)


@pytest.mark.parametrize("known", [None, "/v1/embeddings"])
def test_a_path_that_an_operator_listed_is_no_probe(stage, known) -> None:
    """What its smallest body would be is not known."""
    listed, optional = "/invocations", "/v1/embeddings"
    stage.paths = (listed, optional)
    stage.run(0.5)
    for number, path in enumerate([known, listed][known is None :], 20):
        stage.work(number, **{**LATE, "Mesh-Path": path})
        stage.run(0.5, works=True)
        stage.feed(events.RelayBegan(inbox(number)))
        stage.end(number)
    stage.work(30, **{**LATE, "Mesh-Path": listed})
    assert effects.ProbeEngine(known or "/v1/completions", MODEL) in stage.run(2.0 * HANGS_S)


@pytest.mark.parametrize("path", sorted(SERVER_PATHS))
def test_what_an_http_server_answers_alone_is_no_sign_and_no_probe(stage, path) -> None:
    """SGLang and vLLM count tokens while their engine hangs."""
    stage.paths = (path,)
    stage.run(0.5)
    stage.work(20, **LATE)
    stage.work(21, **{**LATE, "Mesh-Path": path})
    done = stage.run(0.8 * HANGS_S)
    done += stage.feed(events.RelayBegan(inbox(21))) + stage.end(21)
    done += stage.run(0.4 * HANGS_S)
    assert effects.ProbeEngine("/v1/completions", MODEL) in done


@pytest.mark.parametrize("path", sorted(SERVER_PATHS))
def test_a_steady_load_that_an_http_server_answers_alone_is_no_hang(stage, path) -> None:
    stage.paths = (path,)
    stage.run(0.5)
    done = []
    for number in range(round(20 * HANGS_S)):  # each is at the engine when it is looked at
        stage.work(number, **{**LATE, "Mesh-Path": path})
        done += stage.run(0.1)
        done += stage.feed(events.RelayBegan(inbox(number))) + stage.end(number)
    assert not [one for one in done if isinstance(one, effects.ProbeEngine)]
    assert (stage.beat.state, stage.beat.down_reason) == (ReplicaState.READY, None)


def test_a_probe_requests_a_model_that_the_engine_serves(stage) -> None:
    """It may have been started again with others."""
    stage.work(1, **LATE)
    stage.run(0.5)
    stage.read(EngineReading(progress=(stage.steps,)), models=("other",))
    stage.models = ("other",)
    assert effects.ProbeEngine("/v1/completions", "other") in stage.run(HANGS_S + 0.5)


def test_an_engine_that_lists_no_model_any_more_is_probed_all_the_same(stage) -> None:
    stage.work(1, **LATE)
    stage.run(0.5)
    stage.models = ()
    assert effects.ProbeEngine("/v1/completions", "") in stage.run(HANGS_S + 0.5)


def test_an_engine_that_sleeps_gets_no_work_and_no_probe_until_it_is_woken_up(stage) -> None:
    stage.work(1, **LATE)
    asleep = EngineReading(waiting=0, running=0, progress=(stage.steps,), is_asleep=True)
    done = []
    for _ in range(round(3 * HANGS_S * 20)):
        done += stage.tick(0.05)
        done += stage.feed(events.EngineScraped(stage.now, asleep, stage.models, paths=()))
        done += stage.feed(events.AliveArrived("us", "r1", 1))
    assert not [one for one in done if isinstance(one, effects.ProbeEngine)]
    [given_up] = [one for one in done if isinstance(one, effects.AbortRelay)]
    assert given_up.outcome is Outcome.ENGINE_LOST
    assert (stage.beat.state, stage.beat.down_reason) == (ReplicaState.DOWN, DownReason.ASLEEP)
    assert stage.core.down_because(stage.now).startswith("engine asleep")
    stage.end(1, Outcome.ENGINE_LOST)
    [late] = [one for one in stage.work(4, **LATE) if isinstance(one, effects.Refuse)]
    assert late.message.reason is Refusal.ENGINE_DOWN
    stage.run(0.5)
    assert (stage.beat.state, stage.beat.down_reason) == (ReplicaState.READY, None)


@pytest.mark.parametrize("load_s", [95.0, 250.0])
def test_a_long_load_is_no_hang(load_s) -> None:
    """The first of an engine, and that of a model which it may have unloaded meanwhile."""
    stage = Stage(outstanding_max=8, counts_own=True)
    stage.shows_numbers = False
    stage.run(0.5)
    for number in (1, 2):
        stage.work(number, **LATE)
        assert stage.run(load_s) == []
        assert stage.beat.state is ReplicaState.READY
        stage.feed(events.RelayBegan(inbox(number)))
        stage.end(number)
        stage.core.state.hangs._usual_s = 0.1  # it is forgotten in an hour
        stage.run(LOADED_S + 1.0)


def test_a_model_that_answered_just_now_has_no_time_to_load() -> None:
    stage = Stage(outstanding_max=8, counts_own=True)
    stage.shows_numbers = False
    stage.run(0.5)
    stage.work(1, **LATE)
    stage.run(0.5)
    stage.feed(events.RelayBegan(inbox(1)))
    stage.end(1)
    stage.work(2, **LATE)
    done = stage.run(BLIND_S + 3.0)
    assert [one for one in done if isinstance(one, effects.ProbeEngine)]


def test_an_engine_that_hangs_under_steady_requests_does_not_load_for_the_latest_one() -> None:
    stage = Stage(outstanding_max=8, counts_own=True)
    stage.shows_numbers = False
    stage.run(0.5)
    stage.work(1, **LATE)
    stage.run(0.5)
    stage.feed(events.RelayBegan(inbox(1)))
    stage.end(1)
    done = []
    stage.work(2, **LATE)
    for number in range(3, 3 + round(BLIND_S + 10.0)):
        stage.work(number, **LATE)
        done += stage.run(0.5)
        stage.end(number - 1, Outcome.CANCELLED)  # its client has left
        done += stage.run(0.5)
    assert [one for one in done if isinstance(one, effects.ProbeEngine)]
