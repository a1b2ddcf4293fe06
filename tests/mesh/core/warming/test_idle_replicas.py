"""What is idle is found and priced, and paid for before it is used."""

import pytest

from tests.mesh.core.build import request
from tests.mesh.core.warming.world import S_PER_TOKEN, World


def idle_of(world):
    return world.core.warming._idle


def test_only_what_can_be_paid_is_placed_and_replicas_take_turns():
    world = World()
    world.pass_time(10.0)
    idle = idle_of(world)
    asked = request(1, "ABCDEFGHIJ")
    serving = idle.serving(asked)
    assert [one.heartbeat.replica for one in serving] == world.names
    saved_s = world.core.warming.budget.saved_s
    first, second = (idle.place(asked, serving, world.now) for _ in range(2))
    assert [first.target, second.target] == world.names
    assert first.prefill_tokens == 100 and idle.tokens == 200
    spent_s = 2 * (100 * S_PER_TOKEN + 0.02)
    assert saved_s - world.core.warming.budget.saved_s == pytest.approx(spent_s)
    world.core.warming.budget.spend(world.core.warming.budget.saved_s)
    assert idle.place(asked, serving, world.now) is None


def test_a_speed_that_one_has_not_learned_is_that_of_the_others():
    world = World()
    world.fields[world.names[0]]["prefill_s_per_token"] = None
    world.pass_time(10.0)
    idle = idle_of(world)
    cold = idle.serving(request(1))[:1]
    saved_s = world.core.warming.budget.saved_s
    assert idle.place(request(1), cold, world.now) is not None
    assert saved_s - world.core.warming.budget.saved_s == pytest.approx(100 * S_PER_TOKEN + 0.02)
