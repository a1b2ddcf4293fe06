"""What routers and agents promise each other, whatever is lost, late or restarted between them.

Sessions, cores, relays and outboxes are the live ones, joined in memory (`tests/support/ring`).
"""

from random import Random

import pytest

from schemas.exchange import SILENCE_S_MAX, Frame
from schemas.http import Fault
from tests.support.ring.members import Ask
from tests.support.ring.ring import Ring, frames_of, play_ring
from tests.support.ring.wire import Message, Trouble

REGIONS = {"routers": ("us.r1", "eu.r1"), "agents": ("eu.g0", "eu.g1")}  # us forwards all
ASKS_S = 3.0  # in which clients come
GOOD = ("stream", "plain")
BAD = ("cut", "error", "hang", "stall")


def ask(dice: Random, kind: str) -> Ask:
    """Short and long answers and bodies, clients that read slowly and clients that leave."""
    answer = {
        "kind": kind,
        "events": dice.randint(2, 20),
        "size": dice.choice((50, 50, 3000, 40_000)),
        "gap_s": dice.choice((0.005, 0.05, 0.2)),
    }
    return Ask(
        answer,
        body_bytes=dice.choice((200, 200, 200_000)),
        deadline_s=dice.choice((4.0, 25.0)) if kind in ("hang", "stall") else 40.0,
        reads_every_s=dice.choice((0.0, 0.0, 0.0, 0.7)),
        hangs_up_after_s=dice.random() * 2 if dice.random() < 0.15 else None,
        streams_past=dice.random() < 0.7,
    )


def ask_all(ring: Ring, kinds: tuple[str, ...], count: int) -> None:
    for _ in range(count):
        ring.ask(ring.dice.random() * ASKS_S, ask(ring.dice, ring.dice.choice(kinds)))


def check(ring: Ring) -> None:
    """What holds at the end of every run."""
    for client in ring.clients:
        said, received = ring.said_to(client), bytes(client.received)
        about = (client.number, client.outcome, client.ask)
        assert client.ends == 1, about
        fitting = [answer for answer in said if answer.said.startswith(received)]
        assert fitting or not received, about
        if client.outcome == "ok":
            whole = [one for one in fitting if one.is_whole and one.status == 200]
            assert any(one.said == received for one in whole), about
    assert ring.late_data.found == []
    assert ring.is_empty()


def outcomes(ring: Ring) -> list[str | None]:
    return [one.outcome for one in ring.clients if one.outcome != "gone"]


async def calm(ring: Ring) -> None:
    ask_all(ring, GOOD, 8)
    await ring.end()


@pytest.mark.parametrize("seed", range(12))
def test_on_a_good_wire_every_answer_is_whole(seed):
    ring = play_ring(seed, calm, **(REGIONS if seed % 2 else {}))
    check(ring)
    assert set(outcomes(ring)) == {"ok"}


def has_end(message: Message) -> bool:
    return any(kind is Frame.END for _, (kind, _, _) in frames_of(message))


async def lossy(ring: Ring) -> None:
    ask_all(ring, GOOD, 8)
    trouble = Trouble(lost=0.1, twice=0.1, late=0.1, spared=has_end)
    for _ in range(2):
        ring.bad_wire(ring.dice.random() * ASKS_S, 0.4, trouble)
    await ring.end()


@pytest.mark.parametrize("seed", range(20))
def test_what_a_later_frame_shows_to_be_missing_is_sent_again(seed):
    """So no answer that has begun is broken. Before, each attempt may fail, and the only peer."""
    ring = play_ring(seed, lossy, **(REGIONS if seed % 2 else {}))
    check(ring)
    assert set(outcomes(ring)) <= {"ok", Fault.ENGINE_FAILED.value.code}


async def ends_lost(ring: Ring) -> None:
    answer = {"kind": "stream", "events": 9, "size": 50, "gap_s": 0.05}
    for _ in range(8):
        ring.ask(ring.dice.random(), Ask(answer))
    ring.bad_wire(0.0, 2.0, Trouble(lost=1.0, spared=lambda message: not has_end(message)))
    await ring.end()


@pytest.mark.parametrize("regions", [{}, REGIONS], ids=["own", "peer"])
def test_an_end_that_is_lost_is_sent_again(regions):
    """No later frame shows it, and nobody has lost the bus."""
    ring = play_ring(0, ends_lost, **regions)
    check(ring)
    assert outcomes(ring) == ["ok"] * 8
    assert max(client.took_s for client in ring.clients) < 5.0


async def agent_lost(ring: Ring) -> None:
    ask_all(ring, GOOD, 8)
    ring.agent_restarts(ring.dice.random() * ASKS_S, 0.5)
    await ring.end()


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_agent_costs_no_more_than_the_answers_that_it_had_begun(seed):
    ring = play_ring(seed, agent_lost)
    check(ring)
    [lost] = [agent.name for agent in ring.agents if agent.epoch > 1]
    for client in ring.clients:
        assert client.outcome in ("ok", "broken", "gone")
        if client.outcome == "broken":
            assert f"<{lost}.".encode() in client.received


@pytest.mark.parametrize("seed", range(10))
def test_a_region_that_waits_for_a_lost_agent_is_told(seed):
    """At once, and not after the longest silence; nothing of the answers is left."""
    ring = play_ring(seed, agent_lost, **REGIONS)
    check(ring)
    assert set(outcomes(ring)) <= {"ok", "broken", Fault.ENGINE_FAILED.value.code}
    assert max(client.took_s for client in ring.clients) < SILENCE_S_MAX


async def hanging(ring: Ring) -> None:
    for _ in range(6):
        kind = ring.dice.choice(("hang", "stall"))
        answer = {"kind": kind, "events": 4, "size": 50, "gap_s": 0.05}
        ring.ask(ring.dice.random(), Ask(answer, deadline_s=3.0))
    await ring.end()


@pytest.mark.parametrize("seed", range(4))
def test_a_deadline_ends_a_request_before_and_after_its_first_byte(seed):
    ring = play_ring(seed, hanging, **(REGIONS if seed % 2 else {}))
    check(ring)
    late = Fault.DEADLINE.value.code
    for client in ring.clients:
        assert client.outcome == ("broken" if client.received else late)
        assert 2.9 < client.took_s < 3.3


async def anything(ring: Ring) -> None:
    dice = ring.dice
    ask_all(ring, (*GOOD, *GOOD, *BAD), dice.randint(3, 9))
    trouble = Trouble(lost=dice.random() * 0.3, twice=dice.random() * 0.2, late=dice.random() * 0.3)
    for _ in range(dice.randint(1, 3)):
        begin_s, lasts_s = dice.random() * ASKS_S, dice.choice((0.05, 0.5, 2.5, 4.5))
        if dice.random() < 0.4:
            ring.bad_wire(begin_s, lasts_s, trouble)
        else:
            fault = dice.choice(
                (ring.agent_cut_off, ring.router_cut_off, ring.agent_restarts, ring.router_restarts)
            )
            fault(begin_s, lasts_s)
    await ring.end()


@pytest.mark.parametrize("seed", range(40))
def test_each_request_ends_once_with_a_true_prefix_and_nothing_stays_behind(seed):
    check(play_ring(seed, anything, **(REGIONS if seed % 3 == 0 else {})))


def test_two_runs_of_a_seed_are_equal():
    first, again = (play_ring(7, anything) for _ in range(2))
    assert first.wire.fingerprint == again.wire.fingerprint
    assert outcomes(first) == outcomes(again)
