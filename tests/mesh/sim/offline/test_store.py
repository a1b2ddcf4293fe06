"""What the twin's JetStream does with lines: delivered, acknowledged, delivered again."""

from itertools import pairwise

from mesh.sim.offline.jobs import SimJob, make_job, parse_offline
from mesh.sim.offline.store import JobStore, LineOutcome, LineResult
from mesh.sim.workload import keys_of
from tests.mesh.sim.build import US, node


def stored(lines=5):
    nodes = tuple(node(name=10 + n) for n in range(lines))
    job = SimJob(name="j", region=US, lines=nodes, window_s=60.0)
    return JobStore().submit(job, 10.0)


def answer(at=1.0):
    return LineResult(outcome=LineOutcome.ANSWERED, at=at)


def test_lines_are_delivered_once_until_they_are_put_back():
    job = stored(3)
    assert job.deliver(2, "a") == [1, 2]
    assert job.deliver(9, "b") == [3]
    assert job.deliver(9, "a") == []
    job.put_back(1, "b")  # not its own
    assert job.waiting == 0
    job.put_back(1, "a")
    assert job.deliver(9, "b") == [1]


def test_the_first_result_of_a_line_stays():
    job = stored(1)
    job.deliver(1, "a")
    assert job.keep(1, answer(at=1.0))
    assert not job.keep(1, answer(at=2.0))
    assert job.results[1].at == 1.0
    assert job.repeated == 1
    assert job.is_over


def test_a_silent_runners_lines_are_delivered_again_in_their_order():
    job = stored(5)
    job.deliver(3, "a")
    job.deliver(1, "b")
    job.keep(2, answer())
    job.abandon("a")
    assert job.deliver(9, "c") == [1, 3, 5]


def test_an_answer_after_the_redelivery_counts_once():
    job = stored(1)
    job.deliver(1, "a")
    job.abandon("a")
    assert job.deliver(1, "b") == [1]
    assert job.keep(1, answer())  # of the first runner, which was only slow
    assert not job.keep(1, answer())
    job.put_back(1, "b")
    assert job.waiting == 0


def test_when_the_window_is_over_every_line_has_a_result():
    job = stored(3)
    job.deliver(2, "a")
    job.keep(1, answer())
    assert job.expire(70.0) == 2
    outcomes = [job.results[n].outcome for n in (1, 2, 3)]
    assert outcomes == [LineOutcome.ANSWERED, LineOutcome.EXPIRED, LineOutcome.EXPIRED]
    assert job.deliver(9, "b") == []
    assert not job.keep(2, answer())
    assert job.deadline == 70.0


def test_lines_that_share_a_beginning_are_neighbours():
    spec = parse_offline("60,prompt=400,shared=320,groups=6")
    job = JobStore().submit(make_job(spec, 1, (US,), seed=1), 0.0)
    beginnings = [keys_of(line).hashes[0] for line in job.lines]
    changes = sum(one != other for one, other in pairwise(beginnings))
    assert changes == 5
