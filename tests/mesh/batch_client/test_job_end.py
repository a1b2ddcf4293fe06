"""The end of a job: the mesh's estimate, else the pace that was seen, else nothing."""

import random

import orjson
import pytest

from mesh.batch_client.job_answers import JobAnswer, read_job
from mesh.batch_client.job_end import LOOKS_MAX, PACE_S, ObservedPace, estimate, pace_of_whole
from tests.support.batch_endpoint import CREATED_AT, job_fields

NOW_AT = CREATED_AT + 100.0


def job(completed: int = 0, total: int = 100, **changed: object) -> JobAnswer:
    counts = {"total": total, "completed": completed, "failed": 0}
    return read_job(orjson.dumps(job_fields(request_counts=counts, **changed)))


@pytest.mark.parametrize(
    ("looks", "lines_per_s"),
    [
        ([], None),
        ([(0, 5)], None),
        ([(0, 5), (10, 5)], None),
        ([(0, 5), (10, 25)], 2.0),
        ([(0, 0), (10, 20), (40, 20)], 0.5),  # it stands still: the pace falls
        ([(0, 50), (10, 20)], None),  # counted anew
        ([(0, 0), (0, 20)], None),
        ([(0, 0), (1000, 1000), (1300, 1300)], 1.0),
    ],
)
def test_the_pace_is_that_of_the_lines_answered_between_looks(looks, lines_per_s):
    pace = ObservedPace()
    for now, answered in looks:
        pace.looked(now, answered)
    assert pace.lines_per_s == lines_per_s


def test_the_pace_is_that_of_the_last_minutes_however_often_one_looks():
    pace = ObservedPace()
    for now in range(5000):
        pace.looked(now, 10 * now if now < 3000 else 30_000 + (now - 3000))
    assert pace.lines_per_s == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_the_looks_kept_are_few_and_go_back_five_minutes(seed):
    rng = random.Random(seed)
    print(f"seed {seed}")
    pace, now, answered = ObservedPace(), 0.0, 0
    every_s = rng.choice((0.1, 1.0, 7.0, 60.0, 900.0))
    for _ in range(1000):
        now, answered = now + rng.uniform(0.5, 1.5) * every_s, answered + rng.randint(0, 3)
        pace.looked(now, answered)
    looks = list(pace._looks)
    assert len(looks) <= LOOKS_MAX
    assert looks[-1] == (now, answered)
    assert now - looks[0][0] >= min(PACE_S / 2, 90 * every_s)
    assert len(looks) < 3 or now - looks[1][0] < PACE_S


def test_the_estimate_of_the_mesh_comes_first_unless_its_time_has_passed():
    mesh = {"estimated_end_at": NOW_AT + 60, "late": False, "tokens": 5}
    ahead = estimate(job(50, mesh=mesh), 1.0, NOW_AT, answers_lately=True)
    assert (ahead.end_at, ahead.by_mesh) == (NOW_AT + 60, True)
    late = job(50, mesh={**mesh, "estimated_end_at": NOW_AT - 1})
    passed = estimate(late, 1.0, NOW_AT, answers_lately=True)
    assert (passed.end_at, passed.by_mesh) == (NOW_AT + 50, False)


@pytest.mark.parametrize(
    "seen", [job(50), job(0, 0, status="validating"), job(100), job(50, status="completed")]
)
def test_no_end_is_said_where_none_is_known(seen):
    assert estimate(seen, None, NOW_AT, answers_lately=True).end_at is None
    if seen.lines.answered != 50:
        assert estimate(seen, 1.0, NOW_AT, answers_lately=True).end_at is None


def test_a_pace_says_no_end_when_nothing_is_answered_or_the_mesh_knows_none():
    unknown = {"estimated_end_at": None, "late": False, "tokens": 5}
    assert estimate(job(50, mesh=unknown), 1.0, NOW_AT, answers_lately=True).end_at is None
    passed = {**unknown, "estimated_end_at": NOW_AT - 1}
    for seen in (job(50), job(50, mesh=passed)):
        assert estimate(seen, 1.0, NOW_AT, answers_lately=True).end_at == NOW_AT + 50
        assert estimate(seen, 1.0, NOW_AT, answers_lately=False).end_at is None


def test_answers_are_of_late_for_a_minute():
    pace = ObservedPace()
    for now, answered, lately in ((0, 5, True), (59, 5, True), (60, 5, False), (61, 6, True)):
        pace.looked(now, answered)
        assert pace.answers_lately(now) == lately
    assert pace.answers_lately(120) and not pace.answers_lately(121)


@pytest.mark.parametrize(
    ("changed", "lines_per_s"),
    [
        ({}, None),
        ({"in_progress_at": CREATED_AT}, 0.5),
        ({"in_progress_at": CREATED_AT, "finalizing_at": CREATED_AT + 50}, 1.0),
        ({"in_progress_at": CREATED_AT, "completed_at": CREATED_AT + 25}, 2.0),
        ({"in_progress_at": NOW_AT + 5}, None),  # a clock that is behind the endpoint's
    ],
)
def test_the_pace_of_a_whole_job_is_its_lines_over_its_time(changed, lines_per_s):
    assert pace_of_whole(job(50, **changed), NOW_AT) == lines_per_s
