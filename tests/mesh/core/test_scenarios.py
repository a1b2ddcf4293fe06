"""Every story in tests/scenarios is its own transcript."""

from pathlib import Path

import pytest

from tests.mesh.core.script import play

STORIES = sorted((Path(__file__).parents[2] / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_router_follows_the_scenario(story):
    text = story.read_text()
    assert play(text).splitlines() == text.splitlines()


def test_there_are_stories():
    assert STORIES


def test_a_story_that_claims_too_little_or_too_much_is_caught():
    told = "heartbeat us-0\nrequest 1\n"
    assert play(told) == told + "> dispatch 1 us-0\n"
    assert play(told + "> dispatch 1 us-1\n") == told + "> dispatch 1 us-0\n"
