"""Lives put together: what the wait consisted of, whose part belongs to whom, and plain text."""

from dataclasses import replace

import pytest

from mesh.explain.story import largest, parts, prediction, stories, summary, waited_s
from mesh.explain.text import printable, story_lines
from schemas.decision import Candidate, CandidateKind, Decision, Placement
from schemas.explain import LifeStep, RequestLife

REPLICA = CandidateKind.REPLICA
FULL = Candidate(name="us-1", kind=REPLICA, available=False, why="full")
NEAR = Candidate(name="us-0", kind=REPLICA, available=True, seconds=0.9, terms={"queue_s": 0.9})
FAR = Candidate(
    name="eu", kind=CandidateKind.PEER, available=True, seconds=0.31,
    terms={"rtt_s": 0.08, "prefill_s": 0.23, "others_s": None},
)  # fmt: skip


def decided(at, placement, *, held_s=0.0, attempt=1, **where):
    decision = Decision(
        request="r", region="us", policy="mesh", placement=placement, reason="because",
        held_s=held_s, attempt=attempt, candidates=(FAR, NEAR, FULL), considered=5, **where,
    )  # fmt: skip
    return LifeStep(at=at, what="decided", decision=decision)


FORWARDED = RequestLife(
    request="r", region="us", router="r1", route="/v1/completions", outcome="ok", status=200,
    served_by_region="eu", served_by_replica="eu-0", peer_held_s=6.0, agent_ttft_s=0.5,
    is_stream=True, arrived_at=100.0, started_at=110.0, ended_at=111.0,
    steps=(
        decided(100.0, Placement.HOLD),
        decided(101.0, Placement.LOCAL, held_s=1.0, replica="us-0"),
        LifeStep(at=102.5, what="failed", detail="gone\x1b[2J"),
        decided(103.0, Placement.PEER, held_s=1.5, attempt=2, peer="eu"),
    ),
)  # fmt: skip
AT_PEER = replace(
    FORWARDED, region="eu", origin="us", outcome="placed", status=None, arrived_at=103.1,
    started_at=None, ended_at=109.1, steps=(),
)  # fmt: skip


PAIR = Candidate(
    name="us-1", kind=REPLICA, available=True, prefill="us-p", seconds=0.5,
    terms={"prefill_s": 0.4, "transfer_s": 0.1},
)  # fmt: skip
ALONE = replace(PAIR, prefill=None, seconds=0.7, terms={"prefill_s": 0.7})
OTHER_PAIR = replace(PAIR, name="us-2", seconds=0.6)


def paired(*, prefill_s=0.375, agent_ttft_s=0.25, chosen="us-p", **about):
    """A request at us-1, whose prompt was computed by `chosen`; half a second to its first byte."""
    decision = Decision(
        request="r", region="us", policy="mesh", placement=Placement.LOCAL, reason="because",
        replica="us-1", prefill=chosen, candidates=(ALONE, PAIR, OTHER_PAIR), considered=3,
    )  # fmt: skip
    fields = {
        "served_by_region": "us", "served_by_replica": "us-1", "prefill_replica": chosen,
        "prefill_s": prefill_s, "agent_ttft_s": agent_ttft_s, "peer_held_s": 0.0,
        "arrived_at": 100.0, "started_at": 100.75, "ended_at": 101.0,
        "steps": (LifeStep(at=100.0, what="decided", decision=decision),),
    } | about  # fmt: skip
    return replace(FORWARDED, **fields)


def test_a_pairs_prefill_is_a_part_of_its_own():
    found = parts(paired())
    assert {part.name: part.seconds for part in found} == pytest.approx(
        {"held_s": 0.0, "prefill_s": 0.375, "engine_s": 0.25, "transport_s": 0.125}
    )
    wheres = {part.name: part.where for part in found}
    assert wheres["prefill_s"] == "prefill at us-p"
    assert wheres["engine_s"] == "in the engine of us-1: its queue and the KV cache's transfer"
    assert summary(paired()).endswith("0.375 s prefill at us-p.")


@pytest.mark.parametrize("prefill_s", [None, 0.0, 0.375, 0.75, 3600.0])
@pytest.mark.parametrize("agent_ttft_s", [None, 0.25, 0.74, 3600.0])
def test_a_pairs_parts_are_its_whole_wait(prefill_s, agent_ttft_s):
    """A decode engine that is asked at once counts the prefill as its own wait."""
    life = paired(prefill_s=prefill_s, agent_ttft_s=agent_ttft_s)
    assert sum(part.seconds for part in parts(life)) == pytest.approx(waited_s(life))


def test_an_unanswered_request_of_a_pair_names_the_member_that_it_waited_for():
    waits = {"started_at": None, "outcome": "failed", "served_by_replica": None}
    for prefill_s, member in ((None, "us-p"), (0.25, "us-1")):
        last = parts(paired(prefill_s=prefill_s, **waits))[-1]
        assert last.where == f"without an answer of {member}"


@pytest.mark.parametrize(("first", "name"), [("us-p", "us-p + us-1"), (None, "us-1")])
def test_a_pair_reads_as_both_members_and_is_not_taken_for_the_replica_alone(first, name):
    life = paired(chosen=first, prefill_s=None if first is None else 0.375)
    assert prediction(life).predicted_s == (0.7 if first is None else 0.5)
    text = "\n".join(story_lines(stories([life])[0]))
    assert f"placed on {name} (policy mesh)" in text
    chosen = [line.split() for line in text.splitlines() if line.endswith(": chosen")]
    assert [" ".join(words[: words.index("s") - 1]) for words in chosen] == [name]
    for other in ("us-p + us-2", "us-1 ", "us-p + us-1"):
        assert text.count(f"{'':25}{other}") == 1, other
    assert ("+0.375 s  us/r1       us-p has computed the prompt for us-1" in text) == bool(first)


def test_a_chosen_pair_has_the_member_of_the_decision():
    """Where a policy prices no pairs, the candidate names any prefill replica."""
    text = "\n".join(story_lines(stories([paired(chosen="us-q")])[0]))
    assert "us-q + us-1 0.500 s" in text and "us-p + us-1" not in text


def test_the_parts_are_the_whole_wait():
    found = {part.name: part.seconds for part in parts(FORWARDED)}
    assert found == pytest.approx(
        {
            "held_s": 1.5,
            "earlier_attempts_s": 1.5,
            "peer_held_s": 6.0,
            "engine_s": 0.5,
            "transport_s": 0.5,
        }
    )
    assert sum(found.values()) == pytest.approx(waited_s(FORWARDED))
    assert largest(parts(FORWARDED)).name == "peer_held_s"
    assert summary(FORWARDED) == (
        "Most of its 10.000 s to the first token: 6.000 s waiting in eu's hold queue."
    )


@pytest.mark.parametrize("claim", [0.0, 5.0, 3600.0])
def test_claims_of_others_never_exceed_the_wait(claim):
    life = replace(FORWARDED, peer_held_s=claim, agent_ttft_s=claim)
    assert sum(part.seconds for part in parts(life)) == pytest.approx(10.0)


def test_one_that_was_never_answered():
    shed = replace(
        FORWARDED, started_at=None, steps=(decided(111.0, Placement.SHED, held_s=11.0),),
        outcome="shed", status=429,
    )  # fmt: skip
    assert summary(shed).startswith("Most of its 11.000 s until it ended (shed): 11.000 s waiting")
    refused = replace(FORWARDED, steps=(), started_at=None)
    assert sum(part.seconds for part in parts(refused)) == pytest.approx(11.0)
    assert summary(replace(FORWARDED, outcome="open", ended_at=None)) == "It is under way."


def test_a_peers_part_goes_to_the_request_that_it_fits():
    again = replace(FORWARDED, arrived_at=900.0, started_at=910.0, ended_at=911.0)
    older, newer = stories([again, AT_PEER, FORWARDED, FORWARDED])
    assert (older.asked, older.at_peers) == (FORWARDED, (AT_PEER,))
    assert (newer.asked, newer.at_peers) == (again, ())


def test_a_peers_part_alone_is_told_too():
    [story] = stories([AT_PEER])
    assert story.asked is None
    assert any("Its client asked us" in line for line in story_lines(story))


def test_the_text_has_each_term_and_who_was_not_chosen():
    [story] = stories([FORWARDED, AT_PEER])
    lines = list(story_lines(story))
    assert all(line.isprintable() for line in lines)
    text = "\n".join(lines)
    assert "0.310 s = rtt 0.080 + prefill 0.230: chosen" in text
    assert "0.900 s = queue 0.900: not chosen: 0.590 s more" in text
    assert "not available: full" in text and "and 2 more" in text
    assert "the attempt failed: gone\\x1b[2J" in text
    assert "0.310 s = rtt 0.080 + prefill 0.230: busy, and waited for" in text  # held
    assert "predicted 0.310 s from its dispatch, took 7.000 s: slower than" in text
    order = ["arrived", "held", "placed on us-0", "arrived from us", "first byte", "ended: 200"]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)


def test_a_terminal_is_told_nothing():
    assert printable("a\x1b]0;x\x07\n\udcffé") == "a\\x1b]0;x\\x07\\n\\udcffé"
