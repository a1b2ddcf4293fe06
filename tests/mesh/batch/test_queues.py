"""Tasks, lines and results: taken by one, given back, answered once, and never dropped."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from mesh.batch import queues
from mesh.batch.records import (
    Line,
    LinesGone,
    Queued,
    Result,
    StoreFull,
    TooLarge,
    new_job_id,
)
from mesh.batch.store import BatchStore
from mesh.core.offline.jobs import FETCH_BYTES_MAX
from schemas.batch import STREAM_LINES, STREAM_TASKS, Task
from schemas.http import CHAT
from tests.support.batch_regions import opened
from tests.support.nats_regions import NatsRegions

WAIT_S = 20.0
ARRIVED_S = 30.0
KIB = 1024
SEED = 20261123


def a_line(job: str, number: int, body: bytes = b"{}") -> Line:
    custom_id = f'größe "{number}"'
    return Line(job=job, number=number, custom_id=custom_id, url=CHAT, body=body)


def a_result(job: str, number: int, body: bytes = b"{}", status: int = 200) -> Result:
    return Result(job=job, number=number, status=status, custom_id=f"ü{number}", body=body)


async def take(store: BatchStore, job: str, count: int) -> list[queues.TakenLine]:
    """So many lines, in however many pulls."""
    taken: list[queues.TakenLine] = []
    async with asyncio.timeout(WAIT_S):
        while len(taken) < count:
            taken += await store.lines.take(job, count - len(taken), WAIT_S)
    return taken


async def comes_to(read: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Acknowledgements of lines are not confirmed: they arrive at the stream a moment later."""
    deadline = time.monotonic() + ARRIVED_S
    while (found := await read()) != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert found == wanted


# Tasks


async def test_a_task_is_queued_once_until_it_is_done(store: BatchStore):
    job = new_job_id()
    assert await store.tasks.add(Task.CHECK, job)
    assert not await store.tasks.add(Task.CHECK, job)
    assert await store.tasks.add(Task.FINISH, job)
    taken = [await store.tasks.take(WAIT_S), await store.tasks.take(WAIT_S)]
    assert [(one.task, one.job, one.delivered) for one in taken] == [
        (Task.CHECK, job, 1),
        (Task.FINISH, job, 1),
    ]
    assert not await store.tasks.add(Task.FINISH, job)
    for one in taken:
        await store.tasks.ack(one)
    assert await store.tasks.add(Task.FINISH, job)
    assert await store._connection.count(STREAM_TASKS, ">") == 1


async def test_without_tasks_nobody_waits_longer_than_he_says(store: BatchStore):
    assert await store.tasks.take(0.01) is None
    assert await store.tasks.take(0) is None
    waiting = asyncio.create_task(store.tasks.take(WAIT_S))
    job = new_job_id()
    await store.tasks.add(Task.CHECK, job)
    assert (await waiting).job == job


async def test_each_task_goes_to_one_of_the_runners(us: NatsRegions, store: BatchStore):
    jobs = {new_job_id() for _ in range(10)}
    async with opened(us) as other:
        for job in jobs:
            await store.tasks.add(Task.CHECK, job)
        taken = []
        for where in (store, other) * 5:
            task = await where.tasks.take(WAIT_S)
            taken.append(task.job)
            await where.tasks.ack(task)
    assert sorted(taken) == sorted(jobs)


async def test_a_task_given_back_is_taken_again(us: NatsRegions, store: BatchStore):
    await store.tasks.add(Task.CHECK, new_job_id())
    async with opened(us) as other:
        taken = await other.tasks.take(WAIT_S)
        await other.tasks.nak(taken)
        again = await store.tasks.take(WAIT_S)
        assert (again.job, again.delivered) == (taken.job, 2)
        await store.tasks.nak(again, delay_s=0.2)
        late = await other.tasks.take(WAIT_S)
        assert late.delivered == 3


async def test_while_it_is_done_the_server_is_told_so(
    us: NatsRegions, store: BatchStore, monkeypatch
):
    """Said as often as IN_PROGRESS_S says, and not after the block."""
    said = []
    monkeypatch.setattr(queues, "IN_PROGRESS_S", 0.02)
    await store.tasks.add(Task.CHECK, new_job_id())
    taken = await store.tasks.take(WAIT_S)
    send = store._connection.send

    async def note(subject: str, payload: bytes) -> None:
        said.append((subject, payload))
        await send(subject, payload)

    monkeypatch.setattr(store._connection, "send", note)
    async with asyncio.timeout(WAIT_S), store.tasks.keep(taken):
        while len(said) < 3:
            await asyncio.sleep(0.01)
    assert set(said) == {(taken.reply, b"+WPI")}
    before = len(said)
    await asyncio.sleep(0.1)
    assert len(said) == before
    await store.tasks.ack(taken)


# Lines


async def test_a_line_comes_back_as_it_was_and_is_gone_when_done(store: BatchStore):
    job = new_job_id()
    lines = [a_line(job, number, b'{"n": %d}' % number) for number in range(1, 8)]
    assert await store.lines.add(lines) == 7
    await store.lines.make_ready(job, 100)
    taken = await take(store, job, 5) + await take(store, job, 2)
    assert [each.line for each in taken] == lines
    assert {each.delivered for each in taken} == {1}
    assert await store.lines.queued(job) == Queued(waiting=0, taken=7)
    await store.lines.in_progress(taken)
    for each in taken:
        await store.lines.ack(each)
    assert await store.lines.take(job, 5, 0.01) == []
    await comes_to(lambda: store.lines.queued(job), Queued(waiting=0, taken=0))
    await comes_to(lambda: store._connection.count(STREAM_LINES, ">"), 0)


async def test_a_line_is_in_the_queue_once(store: BatchStore):
    job = new_job_id()
    assert await store.lines.add([a_line(job, 1), a_line(job, 2)]) == 2
    assert await store.lines.add([a_line(job, 2), a_line(job, 3)]) == 2
    await store.lines.make_ready(job, 100)
    await store.lines.make_ready(job, 100)
    assert await store.lines.queued(job) == Queued(waiting=3, taken=0)


async def test_all_runners_together_have_one_window(us: NatsRegions, store: BatchStore):
    job = new_job_id()
    await store.lines.add(a_line(job, number) for number in range(1, 21))
    await store.lines.make_ready(job, 8)
    async with opened(us) as other:
        mine = await take(store, job, 5)
        await take(other, job, 3)
        assert await other.lines.take(job, 5, 0.01) == []
        await store.lines.ack(mine[0])
        assert len(await other.lines.take(job, 5, WAIT_S)) == 1


async def test_a_pull_has_a_limit_in_bytes(store: BatchStore):
    job = new_job_id()
    await store.lines.add(a_line(job, number, bytes(100 * KIB)) for number in range(1, 11))
    await store.lines.make_ready(job, 100)
    sizes = []
    while sum(sizes) < 10:
        sizes.append(len(await store.lines.take(job, 10, WAIT_S, bytes_max=350 * KIB)))
    assert max(sizes) <= 3
    one = new_job_id()
    await store.lines.add([a_line(one, 1, bytes(500 * KIB))])
    await store.lines.make_ready(one, 100)
    assert len(await store.lines.take(one, 10, WAIT_S, bytes_max=350 * KIB)) == 1


async def test_lines_of_mixed_sizes_all_come(store: BatchStore):
    job = new_job_id()
    sizes = [300, 300, 300, 300, 3000, 300, 1500, 300, 300, 300, 300, 300]
    await store.lines.add(a_line(job, n, bytes(size * KIB)) for n, size in enumerate(sizes, 1))
    await store.lines.make_ready(job, 100)
    found: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < len(sizes):
            some = await store.lines.take(job, 512, 2.0, FETCH_BYTES_MAX)
            found += [each.line.number for each in some]
    assert found == list(range(1, len(sizes) + 1))


async def test_large_lines_of_many_jobs_come_over_one_connection(store: BatchStore):
    """What is pulled at once must not be more than the server keeps for a reader."""
    size = min(7_000_000, store.lines.body_bytes_max)
    jobs = [new_job_id() for _ in range(8)]
    for job in jobs:
        await store.lines.add(a_line(job, number, bytes(size)) for number in range(1, 4))
        await store.lines.make_ready(job, 100)
    losses: list[None] = []
    store._connection.on_lost.add(lambda: losses.append(None))

    async def take_all(job: str) -> None:
        lines: set[int] = set()
        while len(lines) < 3:
            some = await store.lines.take(job, 512, 2.0, FETCH_BYTES_MAX)
            lines |= {each.line.number for each in some}

    async with asyncio.timeout(60):
        await asyncio.gather(*map(take_all, jobs))
    assert not losses


async def test_lines_given_back_are_taken_by_others(us: NatsRegions, store: BatchStore):
    job = new_job_id()
    await store.lines.add(a_line(job, number) for number in range(1, 5))
    await store.lines.make_ready(job, 100)
    async with opened(us) as other:
        for each in await take(store, job, 4):
            await store.lines.nak(each, delay_s=0.1 * (each.line.number % 2))
        found = await take(other, job, 4)
        assert sorted(each.line.number for each in found) == [1, 2, 3, 4]
        assert {each.delivered for each in found} == {2}


async def test_what_a_dead_runner_had_goes_to_another(
    us: NatsRegions, store: BatchStore, monkeypatch
):
    monkeypatch.setattr(queues, "ACK_WAIT_S", 0.3)
    job = new_job_id()
    await store.lines.add(a_line(job, number) for number in range(1, 4))
    await store.lines.make_ready(job, 100)
    async with opened(us) as dead:
        await take(dead, job, 3)
    found = Counter()
    while len(found) < 3:
        for each in await store.lines.take(job, 3, WAIT_S):
            found[each.line.number] += 1
            assert each.delivered > 1
            await store.lines.ack(each)


async def test_whoever_takes_lines_that_are_removed_is_told(us: NatsRegions, store: BatchStore):
    job, other = new_job_id(), new_job_id()
    with pytest.raises(LinesGone):
        await store.lines.take(job, 1, WAIT_S)
    with pytest.raises(LinesGone):
        await store.lines.queued(job)
    await store.lines.add([a_line(job, 1), a_line(other, 1)])
    await store.lines.make_ready(job, 10)
    async with opened(us) as taker:
        assert len(await taker.lines.take(job, 5, WAIT_S)) == 1
        waiting = asyncio.create_task(taker.lines.take(job, 5, WAIT_S))
        await asyncio.sleep(0.05)
        await store.lines.remove(job)
        with pytest.raises(LinesGone):
            await waiting
    await store.lines.remove(job)
    assert await store._connection.count(STREAM_LINES, ">") == 1


async def test_a_full_queue_refuses_lines_and_drops_none(full: BatchStore):
    """What was added before is there, each once; what fits when they are done is added then."""
    job, size = new_job_id(), 256 * KIB
    lines = [a_line(job, number, bytes(size)) for number in range(1, 81)]
    with pytest.raises(StoreFull):
        await full.lines.add(lines)
    await full.lines.make_ready(job, 1000)
    seen: Counter[int] = Counter()
    left = lines
    while left:
        queued = (await full.lines.queued(job)).waiting  # 0: what was done is not removed yet
        for each in [await _next(full, job) for _ in range(queued)]:
            seen[each.line.number] += 1
            assert each.line == lines[each.line.number - 1]
            await full.lines.ack(each)
        left = [line for line in lines if line.number not in seen]
        try:
            await full.lines.add(left)
        except StoreFull:
            continue
    assert sorted(seen) == list(range(1, 81))
    assert set(seen.values()) == {1}


async def _next(store: BatchStore, job: str) -> queues.TakenLine:
    [taken] = await store.lines.take(job, 1, WAIT_S)
    return taken


async def test_what_no_message_can_hold_is_refused_and_the_rest_passes(store: BatchStore):
    job, most = new_job_id(), store.lines.body_bytes_max
    with pytest.raises(TooLarge):
        await store.lines.add([a_line(job, 1), a_line(job, 2, bytes(most + 1))])
    assert await store.lines.add([a_line(job, 3, bytes(most))]) == 1
    with pytest.raises(TooLarge):
        await store.results.put(a_result(job, 1, bytes(most + 1)))
    assert await store.results.put(a_result(job, 1, bytes(most)))


async def test_5_000_lines_pass_and_are_answered_once(us: NatsRegions, store: BatchStore):
    """By two runners at once, of whom one gives some back; within a minute."""
    print(f"seed {SEED}")
    job, total, started = new_job_id(), 5_000, time.monotonic()
    chance = random.Random(SEED)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 300)
    assert await store.lines.add(a_line(job, n, body) for n in range(1, total + 1)) == total
    await store.lines.make_ready(job, 500)
    stored: Counter[bool] = Counter()

    async def answer(where: BatchStore, taken: queues.TakenLine) -> None:
        if chance.random() < 0.02:
            await where.lines.nak(taken)
            return
        stored[await where.results.put(a_result(job, taken.line.number, body))] += 1
        await where.lines.ack(taken)

    async def run(where: BatchStore) -> None:
        while sum(stored.values()) < total:
            taken = await where.lines.take(job, 500, 0.1)
            await asyncio.gather(*(answer(where, each) for each in taken))

    async with opened(us) as other:
        await asyncio.gather(run(store), run(other))
        heads = set()
        async for head in other.results.follow():
            heads.add(head.number)
            if len(heads) == total:
                break
    assert stored == {True: total}
    assert await store.results.count(job) == total
    numbers = [result.number async for result in store.results.read(job, total)]
    assert numbers == list(range(1, total + 1))
    assert time.monotonic() - started < 60


async def test_what_someone_put_there_by_hand_is_dropped(us: NatsRegions, store: BatchStore):
    """It blocks no runner, and what is right comes through."""
    job, client = new_job_id(), await us.connect("us", "batch")
    stream = client.jetstream()
    try:
        await stream.publish(f"batch.line.{job}.1", b"no headers")
        await stream.publish(f"batch.line.{job}.x", b"no number")
        await stream.publish(f"batch.task.dance.{job}", b"")
        await stream.publish(f"batch.result.{job}.1", b"no headers")
    finally:
        await client.close()
    await store.lines.add([a_line(job, 2)])
    await store.lines.make_ready(job, 10)
    taken: list[queues.TakenLine] = []
    async with asyncio.timeout(WAIT_S):
        while not taken:
            taken = await store.lines.take(job, 10, 0.1)
    assert [each.line.number for each in taken] == [2]
    assert await store.tasks.take(0.1) is None
    assert await store.tasks.add(Task.FINISH, job)
    assert (await store.tasks.take(WAIT_S)).task is Task.FINISH
    assert (await store.results.get(job, 1)).status == 0


# Results


async def test_a_result_comes_back_as_it_was(store: BatchStore):
    job = new_job_id()
    result = a_result(job, 3, b"\x00 bytes", status=0)
    assert await store.results.get(job, 3) is None
    assert await store.results.put(result)
    assert await store.results.get(job, 3) == result


async def test_of_two_results_at_once_one_is_stored(us: NatsRegions, store: BatchStore):
    job = new_job_id()
    async with opened(us) as other:
        for number in range(1, 31):
            puts = [
                each.results.put(a_result(job, number, name))
                for each, name in ((store, b"one"), (other, b"other"))
            ]
            won = await asyncio.gather(*puts)
            assert sorted(won) == [False, True]
            kept = await store.results.get(job, number)
            assert kept.body == (b"one" if won[0] else b"other")
            assert not await other.results.put(a_result(job, number, b"late"))
            assert await store.results.get(job, number) == kept


async def test_results_are_read_in_the_order_of_lines_whatever_their_size(store: BatchStore):
    print(f"seed {SEED}")
    chance, job = random.Random(SEED), new_job_id()
    numbers = [number for number in range(1, 201) if number % 7]
    bodies = {number: chance.randbytes(chance.choice((10, 300 * KIB))) for number in numbers}
    for number in chance.sample(numbers, len(numbers)):
        await store.results.put(a_result(job, number, bodies[number]))
    await store.results.put(a_result(new_job_id(), 1))
    found = {each.number: each.body async for each in store.results.read(job, 200)}
    assert list(found) == numbers
    assert found == bodies
    assert await store.results.count(job) == len(numbers)
    await store.results.remove(job)
    assert await store.results.count(job) == 0
    assert [each async for each in store.results.read(job, 200)] == []


async def test_a_follower_has_every_result_once_from_the_first(us: NatsRegions, store: BatchStore):
    job, other = new_job_id(), new_job_id()
    for number in (1, 2, 3):
        await store.results.put(a_result(job, number, bytes(KIB), status=200 + number))
    following = store.results.follow()
    async with asyncio.timeout(WAIT_S):
        first = [await anext(following) for _ in range(3)]
        assert [(head.job, head.number, head.status) for head in first] == [
            (job, 1, 201),
            (job, 2, 202),
            (job, 3, 203),
        ]
        async with opened(us) as elsewhere:
            await elsewhere.results.put(a_result(other, 9, status=0))
        head = await anext(following)
        assert (head.job, head.number, head.status) == (other, 9, 0)
    await following.aclose()


async def test_a_full_store_of_results_keeps_the_line_and_the_results(full: BatchStore):
    job, size = new_job_id(), 512 * KIB
    await full.lines.add(a_line(job, number) for number in range(1, 61))
    await full.lines.make_ready(job, 1000)
    refused, kept = [], 0
    for _ in range(60):
        taken = await _next(full, job)
        try:
            assert await full.results.put(a_result(job, taken.line.number, bytes(size)))
            await full.lines.ack(taken)
            kept += 1
        except StoreFull:
            refused.append(taken)
    assert 20 < kept < 32
    assert await full.results.count(job) == kept
    await comes_to(lambda: full.lines.queued(job), Queued(waiting=0, taken=60 - kept))
    await full.results.remove(job)
    for taken in refused:
        assert await full.results.put(a_result(job, taken.line.number))
