"""The study of offline work across regions, on days that take a blink."""

from tests.programs.studies.offline.__main__ import plays, written
from tests.programs.studies.offline.runs import EVEN, OFFICE, ONE, jobs, played
from tests.programs.studies.tables.markdown import mark


def test_a_short_day_fills_every_table():
    asked = plays(8.0, 1, 1)
    runs = {play: played(play) for play in asked}
    text = "\n".join(written(runs))
    for origin in (EVEN, OFFICE, ONE):
        assert f"| {origin} |" in text
    assert mark(True) in text
    assert "nan" not in text


def test_jobs_of_one_origin_are_the_same_in_every_scope():
    by_origin = {}
    for play in plays(12.0, 1, 2):
        if play.origin:
            by_origin.setdefault((play.origin, play.seed), []).append(jobs(play))
    for found in by_origin.values():
        assert all(each == found[0] for each in found)
    assert by_origin[(OFFICE, 0)] != by_origin[(OFFICE, 1)]
    assert {job.region for job in by_origin[(ONE, 0)][0]} == {"us"}
