"""A look at an engine says what is true at that moment, and leaves no trace."""

from hypothesis import given
from hypothesis import strategies as st

from agents.sim.engine import EngineSim
from agents.sim.events import Finished, PrefillFinished, SimRequest
from agents.sim.profiles import Profile

TINY = Profile(
    name="tiny",
    knots=((4, 0.010),),
    token_s=0.001,
    sequence_s=0.0005,
    context_s=0.000_01,
    arrival_s=0.0,
    batch_tokens=64,
    kv_tokens=1024,
    max_seqs=4,
)
REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 200), st.integers(1, 120)), min_size=1, max_size=8
)


def play(engine, requests, looks):
    """Every first token and end with its time, and what each look said."""
    todo = sorted(
        [(at, 0, n, row) for n, (at, *row) in enumerate(requests)]
        + [(at, 1, n, None) for n, at in enumerate(looks)],
        key=lambda entry: entry[:3],
    )
    ends, seen = [], []

    def step(now):
        events = engine.step(now).events
        ends.extend(event for event in events if isinstance(event, PrefillFinished | Finished))

    while todo or engine.wake_at is not None:
        wake_at = engine.wake_at
        if wake_at is not None and (not todo or wake_at <= todo[0][0]):
            step(wake_at)
            continue
        now, _, number, row = todo.pop(0)
        if row is None:
            seen.append(engine.stats(now))
        else:
            keys = range(1000 * number, 1000 * number + sum(row) // 16)
            engine.submit(SimRequest(number, *row, keys=keys), now)
    return ends, seen


@given(REQUESTS, st.lists(st.floats(0.0, 6.0), max_size=30))
def test_reading_stats_changes_nothing_and_agrees_with_stepping_by_token(requests, looks):
    ends, seen = play(EngineSim(TINY), requests, looks)
    alone, _ = play(EngineSim(TINY), requests, [])
    slowly, watched = play(EngineSim(TINY, watch_tokens=True), requests, looks)
    assert ends == alone == slowly
    assert seen == watched
