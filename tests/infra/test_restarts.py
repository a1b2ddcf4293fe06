from infra.restarts import RESTARTS_MAX, STEADY_S, WAIT_MAX_S, Restarts


def test_waits_double_up_to_a_limit_and_then_end():
    restarts = Restarts()
    waits = [restarts.after_death(1.0, was_ready=True) for _ in range(RESTARTS_MAX + 1)]
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert max(wait for wait in waits if wait) <= WAIT_MAX_S


def test_a_steady_run_earns_a_fresh_count():
    restarts = Restarts()
    for _ in range(RESTARTS_MAX + 1):
        restarts.after_death(1.0, was_ready=True)
    assert restarts.after_death(STEADY_S, was_ready=True) == 0.25


def test_what_was_never_ready_is_not_tried_again():
    assert Restarts().after_death(1.0, was_ready=False) is None


def test_without_a_limit_the_longest_wait_goes_on():
    restarts = Restarts(most=None)
    waits = [restarts.after_death(1.0, was_ready=True) for _ in range(RESTARTS_MAX + 50)]
    assert set(waits[RESTARTS_MAX:]) == {WAIT_MAX_S}
