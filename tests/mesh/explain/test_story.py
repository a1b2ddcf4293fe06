"""Lives put together: what the wait consisted of, whose part belongs to whom, and plain text."""

from dataclasses import replace

import pytest

from mesh.console.request_page import shown_request
from mesh.explain.story import Story, largest, parts, stories, summary, waited_s
from mesh.explain.terminal import printable
from mesh.explain.text import story_lines, verdicts
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


def handed_back(at, region, detail="elsewhere"):
    return LifeStep(at=at, what="refused", region=region, detail=detail)


def test_what_waited_at_peers_that_handed_it_back_is_no_failure():
    steps = (
        decided(100.0, Placement.PEER, peer="ap"),
        handed_back(104.0, "ap"),
        decided(104.5, Placement.PEER, attempt=2, held_s=0.5, peer="eu"),
        handed_back(105.0, "eu", "full"),
        decided(105.0, Placement.PEER, attempt=3, held_s=0.5, peer="eu"),
        handed_back(107.0, "eu"),
        decided(107.0, Placement.PEER, attempt=4, held_s=0.5, peer="ap"),
    )
    life = replace(FORWARDED, steps=steps, served_by_region="ap", peer_held_s=1.0)
    found = {part.name: (part.seconds, part.where) for part in parts(life)}
    assert found["handed_back_s"] == (
        6.0, "waiting in ap's and eu's hold queues, which did not place it",
    )  # fmt: skip
    assert found["earlier_attempts_s"] == (0.5, "in attempts that were refused or failed")
    assert sum(seconds for seconds, _ in found.values()) == pytest.approx(waited_s(life))
    assert "6.000 s waiting in ap's and eu's hold queues" in summary(life)
    # Its client left while it was held again.
    left = replace(life, started_at=None, ended_at=109.0, outcome="client_gone", steps=steps[:-1])
    found = {part.name: part.seconds for part in parts(left)}
    assert found == {"held_s": 2.5, "handed_back_s": 6.0, "earlier_attempts_s": 0.5}


def test_what_waited_at_a_peer_that_had_no_room_in_the_end_waited_there():
    steps = (
        decided(100.0, Placement.PEER, peer="eu"),
        handed_back(109.4, "eu", "no_replica"),  # once its wait there was too long
        decided(109.5, Placement.PEER, attempt=2, peer="ap"),
        handed_back(109.55, "ap", "no_replica"),  # at once
        decided(110.0, Placement.SHED, attempt=2, held_s=0.4),
    )
    shed = replace(
        FORWARDED, started_at=None, ended_at=110.0, outcome="shed", status=429, steps=steps
    )
    found = {part.name: (part.seconds, part.where) for part in parts(shed)}
    assert found["handed_back_s"] == (
        pytest.approx(9.4), "waiting in eu's hold queue, which did not place it",
    )  # fmt: skip
    assert found["earlier_attempts_s"][0] == pytest.approx(0.2)
    assert "unanswered_s" not in found
    at_peer = replace(AT_PEER, outcome="refused", detail="no_replica", arrived_at=100.0)
    text = "\n".join(story_lines(Story(shed, (at_peer,))))
    assert "eu refused it: no room there, or no replica ready" in text
    assert " refused: no room there, or no replica ready" in text
    assert "no_replica" not in text


def test_one_that_was_never_answered():
    shed = replace(
        FORWARDED, started_at=None, steps=(decided(111.0, Placement.SHED, held_s=11.0),),
        outcome="shed", status=429,
    )  # fmt: skip
    shed = replace(shed, detail="expected wait 12.0 s > the queue_delay_s_max of 10 s")
    assert summary(shed) == (
        "It was refused after 11.000 s: expected wait 12.0 s > the queue_delay_s_max of 10 s. "
        "Most of its 11.000 s until it ended: 11.000 s waiting in us's hold queue."
    )
    at_once = replace(shed, steps=(decided(111.0, Placement.SHED),))
    assert (
        summary(at_once)
        == "It was refused after 11.000 s: expected wait 12.0 s > the queue_delay_s_max of 10 s."
    )
    refused = replace(FORWARDED, steps=(), started_at=None)
    assert sum(part.seconds for part in parts(refused)) == pytest.approx(11.0)
    assert summary(replace(FORWARDED, outcome="open", ended_at=None)) == "It is under way."


def test_a_failure_comes_first_and_as_its_client_saw_it():
    broke = replace(FORWARDED, outcome="failed", detail="the engine fell silent", ended_at=117.0)
    assert summary(broke).startswith(
        "It failed 7.000 s after the first byte, with an error event in its stream: "
        "the engine fell silent. Most of its 10.000 s to the first token: "
    )
    plain = replace(broke, is_stream=False)
    assert summary(plain).startswith("It failed 7.000 s after the first byte: the engine")
    held = replace(broke, started_at=None, detail=None, fault="no_replica", steps=())
    assert summary(held) == (
        "It failed after 17.000 s, with an error event in its stream: no_replica."
    )
    assert summary(replace(held, status=503)) == "It failed after 17.000 s: no_replica."


@pytest.mark.parametrize("ended_at", [107.0, None])
def test_one_whose_client_left_while_it_was_held_waited_there(ended_at):
    held = decided(104.0, Placement.HOLD, held_s=1.5, attempt=2)
    life = replace(
        FORWARDED, started_at=None, ended_at=ended_at, outcome="client_gone", peer_held_s=0.0,
        steps=(*FORWARDED.steps[:3], held),
    )  # fmt: skip
    found = {part.name: part.seconds for part in parts(life)}
    assert found == ({} if ended_at is None else {"held_s": 4.5, "earlier_attempts_s": 2.5})
    failed = replace(life, steps=FORWARDED.steps[:3])  # and returned to the queue
    found = {part.name: part.seconds for part in parts(failed)}
    assert found == ({} if ended_at is None else {"held_s": 5.5, "earlier_attempts_s": 1.5})
    if ended_at is not None:  # one that fails at once after its attempt was in no queue
        at_once = replace(failed, ended_at=failed.steps[-1].at + 0.05)
        assert "unanswered_s" in {part.name for part in parts(at_once)}
    alone = replace(life, steps=FORWARDED.steps[:1])
    assert ended_at is None or summary(alone) == (
        "Most of its 7.000 s until it ended (client_gone): 7.000 s waiting in us's hold queue."
    )


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


def test_terms_of_who_has_no_price_have_their_units():
    unpriced = replace(FAR, seconds=None, terms={"rtt_s": 0.169981, "load": 3.0})
    made = replace(FORWARDED.steps[0].decision, candidates=(unpriced,))
    [(_, text)] = verdicts(made)
    assert text == "busy, and waited for: rtt 0.170 s, load 3"


def test_the_delay_of_others_is_no_part_of_its_own_first_token():
    dear = replace(NEAR, seconds=1.0, terms={"queue_s": 0.9, "others_s": 0.1})
    made = replace(FORWARDED.steps[0].decision, candidates=(dear,))
    [(_, text)] = verdicts(made)
    assert text == "1.000 s = queue 0.900 + delay of others 0.100: busy, and waited for"


def test_a_terminal_is_told_nothing():
    assert printable("a\x1b]0;x\x07\n\udcffé") == "a\\x1b]0;x\\x07\\n\\udcffé"


PAIR = Candidate(
    name="us-1", prefill="us-0", kind=REPLICA, available=True, seconds=0.4,
    terms={"prefill_s": 0.3, "transfer_s": 0.1},
)  # fmt: skip
ALONE = Candidate(
    name="us-1", kind=REPLICA, available=True, seconds=0.7, terms={"prefill_s": 0.7}
)  # fmt: skip


def on_a_pair():
    made = decided(100.2, Placement.LOCAL, held_s=0.2, replica="us-1", prefill="us-0")
    decision = replace(made.decision, candidates=(ALONE, PAIR), considered=2)
    return replace(
        FORWARDED, served_by_region="us", served_by_replica="us-1", peer_held_s=0.0,
        agent_ttft_s=0.1, prefill_replica="us-0", prefill_s=0.35, started_at=100.7,
        ended_at=101.0, steps=(replace(made, decision=decision),),
    )  # fmt: skip


def test_the_prefill_replica_of_a_pair_has_a_part_of_its_own():
    life = on_a_pair()
    found = {part.name: part.seconds for part in parts(life)}
    assert found == pytest.approx(
        {"held_s": 0.2, "prefill_s": 0.35, "engine_s": 0.1, "transport_s": 0.05}
    )
    assert summary(life) == (
        "Most of its 0.700 s to the first token: 0.350 s computing the prompt on us-0."
    )
    [engine] = [part.where for part in parts(life) if part.name == "engine_s"]
    assert engine == "in the engine of us-1: its queue and the transfer of the KV cache"


@pytest.mark.parametrize("claim", [0.3, 5.0])
def test_where_both_engines_begin_at_once_the_parts_are_the_whole_wait(claim):
    found = parts(replace(on_a_pair(), agent_ttft_s=claim))
    assert sum(part.seconds for part in found) == pytest.approx(0.7)


def test_a_chosen_pair_is_found_and_named_where_its_candidate_lists_another_prefill_replica():
    """A policy that prices no pairs takes the shortest queue, after its candidates were listed."""
    [step] = on_a_pair().steps
    decision = replace(step.decision, prefill="us-2")
    life = replace(on_a_pair(), prefill_replica="us-2", steps=(replace(step, decision=decision),))
    text = "\n".join(story_lines(stories([life])[0]))
    assert "us-2 + us-1 0.400 s = prefill 0.300 + transfer 0.100: chosen" in text
    assert "us-0 + us-1" not in text and "predicted 0.400 s" in text


def test_a_pair_and_its_decode_replica_alone_are_told_apart():
    lines = "\n".join(story_lines(stories([on_a_pair()])[0]))
    assert "placed on us-0 + us-1 after 0.200 s in the hold queue" in lines
    assert "us-0 + us-1 0.400 s = prefill 0.300 + transfer 0.100: chosen" in lines
    assert "us-1        0.700 s = prefill 0.700: not chosen: 0.300 s more" in lines
    assert "predicted 0.400 s from its dispatch, took 0.500 s" in lines


def test_the_prefill_of_a_peer_s_pair_is_in_the_wait_of_the_client():
    at_peer = replace(
        AT_PEER, served_by_replica="eu-1", prefill_replica="eu-0", prefill_s=0.4, arrived_at=109.0
    )
    refused = replace(at_peer, outcome="refused", prefill_s=9.0, arrived_at=109.5)
    elsewhere = replace(at_peer, region="ap", prefill_s=9.0)
    [story] = stories([FORWARDED, refused, elsewhere, at_peer])
    found = {part.name: part.seconds for part in parts(FORWARDED, story.at_peers)}
    assert found["prefill_s"] == pytest.approx(0.4) and found["engine_s"] == pytest.approx(0.5)
    assert sum(found.values()) == pytest.approx(10.0)
    lines = "\n".join(story_lines(story))
    assert "0.400 s  computing the prompt on eu-0" in lines
    assert "handed to eu-0 + eu-1, which answers us directly" in lines


def test_the_console_names_the_prefill_replica_of_the_place_that_answered():
    at_peer = replace(AT_PEER, served_by_replica="eu-1", prefill_replica="eu-0")
    for served_by, named in (("eu-1", "eu-0"), ("eu-2", None)):
        asked = replace(FORWARDED, served_by_replica=served_by)
        facts = shown_request(Story(asked, (at_peer,)))["facts"]
        assert (facts["served by"], facts.get("prefill on")) == (f"eu/{served_by}", named)


def test_without_a_first_byte_both_of_a_pair_were_waited_for_until_the_prompt_is_computed():
    lost = replace(on_a_pair(), started_at=None, prefill_s=None, outcome="failed")
    assert summary(lost).endswith("0.800 s without an answer of us-0 + us-1.")
    computed = replace(lost, prefill_s=0.3)
    assert [part.where for part in parts(computed)][1:] == [
        "computing the prompt on us-0",
        "without an answer of us-1",
    ]


def test_the_wait_for_the_first_token_ends_before_a_stream_goes_on_elsewhere():
    went_on = replace(
        FORWARDED, served_by_region="us", served_by_replica="us-1", started_at=101.75, peer_held_s=0
    )
    found = {part.name: (part.seconds, part.where) for part in parts(went_on)}
    assert [name for name, (seconds, _) in found.items() if seconds] == ["held_s", "attempt_s"]
    assert "to us-0 to the first byte" in found["attempt_s"][1]
    assert summary(went_on).startswith(
        "Its stream broke at us-0, 0.750 s after the first byte, and went on at eu. Most of "
    )
    steps = (
        replace(one, detail="us-0 is drained: moved") if one.what == "failed" else one
        for one in went_on.steps
    )
    assert summary(replace(went_on, steps=tuple(steps))).startswith(
        "Its stream was moved from us-0, 0.750 s after the first byte, and went on at eu. Most of "
    )
    again = (
        LifeStep(at=103.5, what="failed", detail="gone"),
        decided(103.6, Placement.HOLD, attempt=3),
        decided(103.7, Placement.LOCAL, attempt=3, replica="us-1"),
    )
    twice = replace(went_on, steps=(*went_on.steps, *again))
    assert "broke at us-0 and eu, 0.750 s after the first byte, and went on at us-1." in summary(
        twice
    )
    lost = replace(went_on, outcome="failed", steps=(*went_on.steps, *again[:2]))  # held, in vain
    assert "after the first byte, and was sent on to eu." in summary(lost)
    held = replace(went_on, outcome="open", steps=(*went_on.steps[:3], again[1]))
    assert summary(held) == "It is under way."  # and does not go on yet
