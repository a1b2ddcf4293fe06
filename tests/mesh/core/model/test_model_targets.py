"""Which model serves a conversation: its share, what it keeps, what is away; the error's list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.model_targets import (
    LISTED_MAX,
    ModelRule,
    ModelTargets,
    conversation_of,
    unknown_model,
)
from mesh.core.model.prompt_shapes import text_at
from schemas.http import CHAT, COMPLETIONS, MESSAGES, RESPONSES

NAMES = ["a", "b", "c", "d"]
SHARES = st.lists(st.integers(0, 10), min_size=2, max_size=4).filter(any)
CONVERSATIONS = 4000


def targets_of(parts):
    shares = tuple((name, part / sum(parts)) for name, part in zip(NAMES, parts, strict=False))
    return ModelTargets([ModelRule(name="alias", to=shares)]), dict(shares)


def conversations(count=CONVERSATIONS):
    return [conversation_of("", f"s{number}", b"", "") for number in range(count)]


def chosen(targets, there=NAMES, count=CONVERSATIONS):
    return [targets.choose("alias", one, there.__contains__) for one in conversations(count)]


@pytest.mark.parametrize("parts", [(95, 5), (1, 1), (1, 2, 3, 4), (99, 1), (1, 0)])
def test_each_target_has_its_share_of_conversations(parts):
    targets, shares = targets_of(parts)
    found = chosen(targets)
    for name, share in shares.items():
        spread = 4.5 * (CONVERSATIONS * share * (1 - share)) ** 0.5  # standard deviations
        assert abs(found.count(name) - CONVERSATIONS * share) <= spread


@given(SHARES, st.sets(st.sampled_from(NAMES), min_size=1))
def test_only_conversations_of_targets_that_are_away_move(parts, there):
    targets, shares = targets_of(parts)
    for before, now in zip(chosen(targets, count=50), chosen(targets, [*there], 50), strict=True):
        assert now == before if before in there else now is None or now in there
        assert (now is None) == (not any(shares.get(name) for name in there))


def test_the_others_share_what_a_target_that_is_away_had():
    targets, _ = targets_of((2, 3, 5))
    found = chosen(targets, ["a", "b"])
    assert abs(found.count("a") / len(found) - 0.4) < 0.035


def test_a_larger_share_takes_conversations_and_moves_none_between_the_others():
    before, after = chosen(targets_of((4, 4, 2))[0]), chosen(targets_of((3, 3, 4))[0])
    moved = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
    assert {new for _, new in moved} == {"c"}


def test_the_one_that_failed_is_left_out():
    targets, _ = targets_of((1, 1))
    assert {targets.choose("alias", one, lambda _: True, without="a") for one in range(9)} == {"b"}


TURNS = [
    {"role": "system", "content": "Be short." * 200},
    {"role": "user", "content": "First question"},
    {"role": "assistant", "content": "An answer"},
    {"role": "user", "content": "Second question"},
]


def of_prompt(path, body, tenant="", request="r"):
    return conversation_of(tenant, None, text_at(path, body).data, request)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda turns: {"messages": turns, "tools": [{"type": "function"}]}),
        (MESSAGES, lambda turns: {"messages": turns[1:], "system": turns[0]["content"]}),
        (RESPONSES, lambda turns: {"input": turns}),
    ],
)
def test_a_conversation_is_known_by_all_up_to_its_first_question(path, body):
    first = of_prompt(path, body(TURNS[:2]))
    assert first == of_prompt(path, body(TURNS[:3])) == of_prompt(path, body(TURNS))
    other = [TURNS[0], {"role": "user", "content": "Another question"}]
    assert first != of_prompt(path, body(other))
    assert first != of_prompt(path, body(TURNS), tenant="acme")
    assert first == of_prompt(path, body(TURNS), request="another")


def test_a_completion_is_known_by_its_beginning():
    def known(text):
        return of_prompt(COMPLETIONS, {"prompt": text})

    begins = "x" * 1024
    assert known(begins + "y") == known(begins + "yz") != known("z" + begins)


def test_a_session_goes_before_the_prompt_and_a_request_without_either_is_its_own():
    assert conversation_of("", "s", b"a", "1") == conversation_of("", "s", b"b", "2")
    assert conversation_of("", "s", b"", "1") != conversation_of("t", "s", b"", "1")
    assert conversation_of("", None, b"", "1") != conversation_of("", None, b"", "2")
    assert conversation_of("a", "bc", b"", "") != conversation_of("ab", "c", b"", "")


def test_copies_are_for_a_share_of_conversations_by_the_name_asked_for_and_the_one_that_serves():
    rules = [
        ModelRule(name="alias", to=(("a", 1.0),), shadow=(("c", 0.1),)),
        ModelRule(name="a", shadow=(("d", 0.5), ("a", 1.0))),
    ]
    targets = ModelTargets(rules)
    found = [tuple(targets.shadows("alias", "a", one)) for one in conversations()]
    for name, share in (("c", 0.1), ("d", 0.5), ("a", 0.0)):
        assert abs(sum(name in each for each in found) / len(found) - share) < 0.04
    assert found == [tuple(targets.shadows("alias", "a", one)) for one in conversations()]
    assert not any("c" in tuple(targets.shadows("a", "a", one)) for one in conversations(50))


def test_aliases_are_known_where_a_target_is():
    rules = [
        ModelRule(name="one", to=(("a", 1.0),)),
        ModelRule(name="zero", to=(("a", 0.0), ("gone", 1.0))),
        ModelRule(name="b", to=(("a", 1.0),)),
        ModelRule(name="a", slo_ttft_s=1.0),
    ]
    assert ModelTargets(rules).known(("a", "b")) == ("a", "b", "one")
    assert ModelTargets(rules[:3]).known(("gone",)) == ("gone", "zero")
    assert not ModelTargets().rules and ModelTargets(rules[3:]).rules


def test_an_unknown_model_is_told_a_few_names_the_like_first():
    known = [f"org/model-{number}" for number in range(4000)]
    text = unknown_model("org/model-17x", known)
    assert text.startswith("the model 'org/model-17x' is not served here; known: org/model-17, ")
    more = f" and {4000 - LISTED_MAX} more; did you mean 'org/model-17'?"
    assert text.endswith(more) and len(text) < 400
    assert unknown_model("a", ["b"]).endswith("known: b")
    assert unknown_model("a", []) == "the model 'a' is not served here"
