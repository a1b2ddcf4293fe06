"""What policies have in common: the least loaded, and what a choice says of the first token."""

from mesh.core.policies.base import Choice, FirstToken, Score, Target

A, B = Target("a", 1), Target("b", 2)
SCORES = (
    Score(A, 3.0, {"queue_s": 2.0, "others_s": 0.5}),
    Score(B, 2.8, {"queue_s": 1.0}),
    Score(Target("c", 0)),
)


def test_the_first_token_is_expected_at_the_pick_without_what_others_pay():
    assert Choice(B, "because", scores=SCORES).first_token == FirstToken(2.8, 1.0)


def test_held_it_is_expected_where_it_comes_soonest():
    assert Choice(None, "held", scores=SCORES).first_token == FirstToken(2.5, 2.0)


def test_what_is_no_experience_is_not_expected():
    assert Choice(B, "because", scores=SCORES, is_guess=True).first_token is None
    assert Choice(A, "because", scores=SCORES[2:]).first_token is None
    assert Choice(None, "held").first_token is None


def test_a_choice_is_called_after_its_pick():
    assert (Choice(A, "because").name, Choice(None, "held").name) == ("a", None)
