"""A recording is replayed to the same decisions, and what was changed in it is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from mesh.core import recording
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import POLICIES
from mesh.core.recording import RecordingHeader, RecordingInvalid
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.sim.recording_replay import NOTHING, replay
from tests.mesh.core import build
from tests.mesh.core.chaos import Chaos

SEED = 11


def chaos_lines(seed: int, policies: Sequence[str] = tuple(POLICIES)) -> list[bytes]:
    """The recording of a router to which anything happened."""
    chaos = Chaos(seed, policies)
    chaos.run(400)
    head = RecordingHeader(
        version="0.1.0",
        region=build.US,
        router=build.ROUTER,
        epoch=1,
        seed=seed,
        settings=chaos.core.state.settings,
    )
    pairs = zip(chaos.history, chaos.effects, strict=True)
    steps = [recording.encode_step(now, event, effects) for (event, now), effects in pairs]
    return [recording.encode_header(head), *steps, recording.encode_end("the router left")]


@pytest.fixture
def lines() -> list[bytes]:
    return chaos_lines(SEED, ["skywalker"])


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "us.jsonl"


def line_of(lines: list[bytes], wanted: Callable[[Any], bool]) -> int:
    """The index of the first step that `wanted` is true for."""
    return next(n for n, line in enumerate(lines) if n and wanted(orjson.loads(line)))


def changed(line: bytes, change: Callable[[Any], None]) -> bytes:
    fields = orjson.loads(line)
    change(fields)
    return orjson.dumps(fields) + b"\n"


def place_of(decision: Any) -> str:
    """Where a recorded decision put its request, as a verdict names it."""
    return decision["replica"] or decision["peer"] or decision["placement"]


def is_local(step: Any) -> bool:
    event, effects = step.get("event", {}), step.get("effects", [])
    return "RequestArrived" in event and any("Dispatch" in effect for effect in effects)


def waited(step: Any) -> bool:
    decided = (effect.get("Decided") for effect in step.get("effects", []))
    return any(one is not None and one["decision"]["held_s"] for one in decided)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happened_is_decided_again(file, seed):
    lines = chaos_lines(seed)
    file.write_bytes(b"".join(lines))
    verdict = replay(file)
    assert verdict.agrees, str(verdict)
    assert (verdict.events, verdict.ended) == (len(lines) - 2, "the router left")
    assert (verdict.decisions_changed, verdict.swaps) == (0, {})
    assert verdict.decisions > 20
    assert "every decision and every other effect is the same" in str(verdict)


def test_an_event_that_was_changed_is_found_at_its_line(lines, file):
    at = line_of(lines, is_local)

    def other_model(step: Any) -> None:
        step["event"]["RequestArrived"]["request"]["model"] = "unheard-of"

    lines[at] = changed(lines[at], other_model)
    file.write_bytes(b"".join(lines))
    verdict = replay(file)
    assert verdict.first is not None
    assert (verdict.first.line, verdict.first.event) == (at + 1, "RequestArrived")
    assert verdict.first.at_s == pytest.approx(
        orjson.loads(lines[at])["now"] - orjson.loads(lines[1])["now"]
    )
    assert verdict.decisions_changed > 0
    assert verdict.first_decision is not None and verdict.first_decision.line == at + 1
    assert f"first difference at line {at + 1}," in str(verdict)


def test_an_effect_that_was_changed_is_found_to_the_field(lines, file):
    at = line_of(lines, is_local)
    before = orjson.loads(lines[at])
    number = next(n for n, effect in enumerate(before["effects"]) if "Decided" in effect)
    was = before["effects"][number]["Decided"]["decision"]["replica"]

    def other_replica(step: Any) -> None:
        step["effects"][number]["Decided"]["decision"]["replica"] = "us-9"

    lines[at] = changed(lines[at], other_replica)
    file.write_bytes(b"".join(lines))
    verdict = replay(file)
    assert verdict.first is not None
    assert verdict.first.line == at + 1
    assert verdict.first.where == f"effects[{number}].Decided.decision.replica"
    assert (verdict.first.recorded, verdict.first.replayed) == ("us-9", was)
    assert verdict.swaps == {("us-9", was): 1}
    assert verdict.decisions_changed == 1
    assert f"us-9 → {was}" in str(verdict)


def test_a_time_that_was_changed_by_a_nanosecond_is_found(lines, file):
    at = line_of(lines, waited)  # how long it waited is the difference of two times
    lines[at] = changed(lines[at], lambda step: step.update(now=step["now"] + 1e-9))
    file.write_bytes(b"".join(lines))
    first = replay(file).first
    assert first is not None and first.line == at + 1
    assert first.where.endswith("Decided.decision.held_s")


def test_effects_that_are_missing_or_too_many_are_found(lines, file):
    at = line_of(lines, is_local)
    for change in (lambda e: e.pop(), lambda e: e.append({"PassEngineError": {"key": 1}})):
        altered = lines.copy()
        altered[at] = changed(lines[at], lambda step, change=change: change(step["effects"]))
        file.write_bytes(b"".join(altered))
        first = replay(file).first
        assert first is not None and first.line == at + 1
        assert None in (first.recorded, first.replayed)


@pytest.mark.parametrize("seed", [SEED, SEED + 2])  # the first is of either kind
def test_another_policy_is_a_question_with_counts_for_an_answer(file, seed):
    lines = chaos_lines(seed, ["skywalker"])
    file.write_bytes(b"".join(lines))
    recorded = replay(file).header.settings.policy
    other = next(name for name in ("round-robin", "least-load") if name != recorded)
    verdict = replay(file, policy=other)
    assert not verdict.agrees
    assert verdict.settings.policy == other
    assert sum(verdict.swaps.values()) == verdict.decisions_changed > 0
    assert all(was != would_be for was, would_be in verdict.swaps)
    assert f"replayed with policy {other} instead of {recorded}" in str(verdict)
    first = verdict.first_decision
    assert first is not None
    assert (first.recorded, first.replayed) in verdict.swaps
    step = orjson.loads(lines[first.line - 1])
    decided = [e["Decided"]["decision"] for e in step["effects"] if "Decided" in e]
    places = {f"attempt {d['attempt']} of request {d['request']}": place_of(d) for d in decided}
    # The other policy may be the only one that decides anything there.
    assert first.recorded == places.get(first.where, NOTHING) != first.replayed
    assert "first difference" not in str(verdict)  # it is but the policy's name in a receipt
    assert f"first decision that differs at line {first.line}," in str(verdict)
    assert replay(file, policy=other) == verdict


def test_a_setting_that_decides_nothing_changes_nothing(lines, file):
    file.write_bytes(b"".join(lines))
    verdict = replay(file, relayed_max=4000)
    assert verdict.agrees
    assert "relayed_max 4000 instead of 4096" in str(verdict)


def test_the_text_for_another_policy_with_the_same_decisions(lines, file):
    """Without a replica and without a peer every policy holds, and that is all there is."""
    kept = [
        line
        for line in lines
        if not any(
            received in line for received in (b"HeartbeatSeen", b"DigestSeen", b"AnswerEnded")
        )
    ]
    core = RouterCore(
        RouterState(
            region=build.US,
            router=build.ROUTER,
            epoch=1,
            settings=RouterSettings(policy="skywalker"),
            dice=Random(SEED),
        )
    )
    steps = [recording.decode_line(line) for line in kept[1:-1]]
    head = replace(recording.decode_header(lines[0]), settings=core.state.settings)
    again = [
        recording.encode_step(step.now, step.event, core.handle(step.event, step.now))
        for step in steps
        if isinstance(step, recording.RecordedStep)
    ]
    file.write_bytes(b"".join([recording.encode_header(head), *again]))
    verdict = replay(file, policy="round-robin")
    assert verdict.decisions > 0 == verdict.decisions_changed
    assert f"none of the {verdict.decisions} decisions differs" in str(verdict)
    assert "nothing" not in str(verdict)
    file.write_bytes(recording.encode_header(head))
    assert "no request came while this was recorded" in str(replay(file, policy="round-robin"))


def test_a_setting_out_of_range_is_refused(lines, file):
    file.write_bytes(b"".join(lines))
    for settings in ({"hold_max": 0}, {"policy": "clairvoyance"}):
        with pytest.raises(ValueError, match=r"hold_max|clairvoyance"):
            replay(file, **settings)


def test_a_crash_takes_the_last_line_and_no_more(lines, file):
    file.write_bytes(b"".join(lines[:-1])[:-5])
    verdict = replay(file)
    assert verdict.agrees
    assert (verdict.events, verdict.ended) == (len(lines) - 3, None)
    assert "cut off" in str(verdict)


def test_what_broke_the_core_breaks_it_again(file):
    event = ev.AttemptFailed(1, 1, "")
    head = RecordingHeader(
        version="0.1.0",
        region=build.US,
        router=build.ROUTER,
        epoch=1,
        seed=1,
        settings=RouterSettings(),
    )
    calm = [recording.encode_header(head), recording.encode_step(1.0, event, [])]
    file.write_bytes(b"".join(calm))
    assert replay(file).agrees
    broke = recording.encode_raised(1.0, event, RuntimeError("a bug of ours"))
    file.write_bytes(calm[0] + broke)
    first = replay(file).first
    assert first is not None
    assert first.recorded == {"Raised": {"error": "RuntimeError: a bug of ours"}}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda lines: [], "line 1: "),
        (lambda lines: lines[1:], "line 1: this is no recording"),
        (lambda lines: [*lines[:5], b"{}\n", *lines[5:]], "line 6: "),
        (lambda lines: [*lines[:5], lines[5][:-9] + b"\n", *lines[6:]], "line 6: not JSON"),
        (lambda lines: [*lines[:2], b" " * (recording.LINE_BYTES_MAX + 1)], "line 3 is too long"),
    ],
)
def test_damage_is_named_by_file_and_line(lines, file, damage, problem):
    file.write_bytes(b"".join(damage(lines)))
    with pytest.raises(RecordingInvalid, match=rf"us\.jsonl: {problem}"):
        replay(file)
