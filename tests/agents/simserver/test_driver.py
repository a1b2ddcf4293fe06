"""The clock that runs faster, slower or not at all."""

from agents.simserver.driver import RateClock


class Wall:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_the_rate_changes_without_a_jump():
    wall = Wall()
    clock = RateClock(wall, 10.0)
    wall.at += 2
    assert clock.now() == 20.0
    clock.set_rate(0.0)
    wall.at += 100
    assert clock.now() == 20.0
    clock.set_rate(0.5)
    wall.at += 4
    assert clock.now() == 22.0


def test_wall_at_is_the_inverse_of_now():
    wall = Wall()
    clock = RateClock(wall, 4.0)
    due = clock.wall_at(8.0)
    wall.at = due
    assert clock.now() == 8.0
