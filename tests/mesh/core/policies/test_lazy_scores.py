"""Scores that are made when a receipt is read."""

from mesh.core.policies.base import LazyScores, Score, Target


def test_scores_are_made_only_when_they_are_read():
    made = []

    def score(name: str) -> Score:
        made.append(name)
        return Score(Target(name, 0))

    scores = LazyScores(["a", "b", "c"], score)
    assert len(scores) == 3
    assert made == []
    assert scores[1].target.name == "b"
    assert made == ["b"]
    assert [one.target.name for one in scores[1:]] == ["b", "c"]
    assert [one.target.name for one in scores] == ["a", "b", "c"]
