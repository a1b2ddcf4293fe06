"""The lines that one batch runner has: fetched from the store, open as requests, stored as results.

It performs those effects of the core that are about lines, over one session. A line that is here is
reported to the store as in progress, so that no other runner gets it. Its result is stored before
it is acknowledged; a store that is full or away is tried again until it takes the result.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from infra.process import LimitedLog, end_all
from mesh.batch import output_line
from mesh.batch.job_tasks import stored
from mesh.batch.line_models import LineModels
from mesh.batch.output_line import Result, answered, error_code, unanswered
from mesh.batch.queues import ACK_WAIT_S, IN_PROGRESS_S, TakenLine
from mesh.batch.records import LinesGone, StoreError, StoreFull, StoreUnavailable, TooLarge
from mesh.batch.store import BatchStore
from mesh.core.model.prompt import PromptInvalid, PromptReader, TextSize
from mesh.core.model.prompt_shapes import text_at
from mesh.core.model.served_names import served_name
from mesh.core.offline import effects as ofx
from mesh.core.offline import events as oev
from mesh.core.offline.events import answer_tokens_max
from mesh.session.record import OpenRequest
from mesh.session.session import Session
from schemas.batch import BatchJob
from schemas.engine_routes import GENERATING_PATHS
from schemas.ids import ModelId, RequestId

log = logging.getLogger(__name__)

FETCH_WAIT_S = 2.0  # for a first line, where the job has none that is free
STORE_RETRY_S, STORE_RETRY_S_MAX = 0.5, 15.0
READ_BYTES_AT_ONCE = 1024 * 1024  # of bodies that are read before others have a turn
REPORTED_AT_ONCE = 64  # lines in progress, before others have a turn: a millisecond
STORING_MAX = 64  # results on their way to the store


@dataclass(slots=True, kw_only=True)
class LineRequest(OpenRequest):
    """An attempt of a line. `answer_bytes`: what came of its answer and was taken out already; none
    of one that `is_too_large` to be stored."""

    answer_bytes: list[bytes] = field(default_factory=list)
    is_too_large: bool = False
    size: TextSize


@dataclass(slots=True)
class HeldLine:
    """A line that this runner has."""

    taken: TakenLine
    line: oev.Line
    tenant: str
    size: TextSize
    body: bytes  # for the model that serves it
    request: LineRequest | None = None  # while it is tried


class LineMetrics:
    """Counters of `HeldLines`; this one counts nothing."""

    def stored(self, result: Result, code: str) -> None:
        """A line's result is stored; `code`: of its error, if it has no answer."""

    def put_back(self) -> None:
        """A line went back to the store."""

    def store_failed(self, error: StoreError) -> None:
        """The store did not take a result; it is tried again."""


class HeldLines:
    """One runner's. `performers` go to the session; `keep` runs until cancelled; then `close`."""

    def __init__(
        self,
        store: BatchStore,
        session: Session,
        prompts: PromptReader,
        job_of: Callable[[str], BatchJob | None],
        metrics: LineMetrics,
        models: LineModels | None = None,
    ) -> None:
        """`job_of`: the record of a job that is in progress. `models`: of lines with aliases."""
        self._models = LineModels() if models is None else models
        self._store, self._session, self._prompts = store, session, prompts
        self._job_of, self._metrics = job_of, metrics
        self._held: dict[int, HeldLine] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._storing = asyncio.Semaphore(STORING_MAX)
        self._log = LimitedLog(log, session.clock)
        self.performers: dict[type, Callable[[Any], None]] = {
            ofx.FetchLines: lambda effect: self._begin(self._fetch(effect)),
            ofx.OpenLine: self._open,
            ofx.CloseLine: self._close_request,
            ofx.SettleLine: self._settle,
            ofx.ReleaseLine: self._release,
        }

    def __len__(self) -> int:
        """Lines that are neither stored nor put back."""
        return len(self._held)

    @property
    def tried(self) -> int:
        """Those of them that an engine has, or is about to get."""
        return sum(held.request is not None for held in self._held.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way to or from the store."""
        return not self._tasks

    async def keep(self) -> None:
        """Report the lines as in progress, again and again. Runs until cancelled."""
        while True:
            await asyncio.sleep(IN_PROGRESS_S)
            held = [each.taken for each in self._held.values()]
            try:
                for at in range(0, len(held), REPORTED_AT_ONCE):
                    await self._store.lines.in_progress(held[at : at + REPORTED_AT_ONCE])
                    await asyncio.sleep(0)
            except StoreUnavailable as error:
                self._log.warning("lines", "in progress", "lines may be taken twice: %s", error)

    async def close(self) -> None:
        """Give up what is on its way; other runners get those lines after ACK_WAIT_S."""
        await end_all(self._tasks)

    def is_offline(self, key: int) -> bool:
        """Whether the attempt of that line which is open goes as offline work."""
        held = self._held.get(key)
        return held is not None and held.request is not None and held.request.request.offline

    def line_of(self, record: OpenRequest) -> HeldLine | None:
        """The line that this request is an attempt of; None for a peer's."""
        return self._held.get(record.request.key) if isinstance(record, LineRequest) else None

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a batch runner's task failed", exc_info=error)

    # Fetching.

    async def _fetch(self, effect: ofx.FetchLines) -> None:
        lines: list[oev.Line] = []
        try:
            taken = await self._store.lines.take(
                effect.job, effect.lines_max, FETCH_WAIT_S, effect.bytes_max
            )
            await self._enter(taken, lines)
        except LinesGone:
            log.info("job %s has no lines any more", effect.job)
        except StoreError as error:
            self._metrics.store_failed(error)
            self._log.warning("fetch", "store", "lines of %s: %s", effect.job, error)
        finally:
            self._session.feed(oev.LinesFetched(effect.job, tuple(lines), effect.number))

    async def _enter(self, taken: list[TakenLine], lines: list[oev.Line]) -> None:
        """Hold the lines and add them to `lines`. Raises StoreUnavailable; then those that were not
        added go back to the store."""
        read_bytes = 0
        for number, each in enumerate(taken):
            line = each.line
            job = self._job_of(line.job)
            try:
                if each.delivered > 1 and await self._is_answered(each):
                    continue
            except StoreUnavailable:
                for other in taken[number:]:
                    self._begin(self._put_back(other))
                raise
            key = next(self._session.keys)
            try:
                held = self._read(key, each, "" if job is None else job.tenant)
            except (
                PromptInvalid,
                orjson.JSONDecodeError,
            ) as error:  # its check was passed
                await self._refuse(each, str(error))
                continue
            self._held[key] = held
            lines.append(held.line)
            read_bytes += len(line.body)
            if read_bytes >= READ_BYTES_AT_ONCE:
                read_bytes = 0
                await asyncio.sleep(0)

    def _read(self, key: int, taken: TakenLine, tenant: str) -> HeldLine:
        line = taken.line
        fields = orjson.loads(line.body)
        text = text_at(line.url, fields)
        named, body = self._models.of(line, ModelId(fields["model"]), text, tenant)
        model, salt = served_name(named, line.url), fields.get("cache_salt")
        prompt = self._prompts.read(model, text, salt if isinstance(salt, str) else "", tenant)
        read = oev.Line(
            key=key,
            job=line.job,
            number=line.number,
            request_id=RequestId(f"{line.job}:{line.number}"),
            model=model,
            prompt=prompt,
            answer_tokens=answer_tokens_max(fields) if line.url in GENERATING_PATHS else 0,
            body_bytes=len(body),
        )
        return HeldLine(taken, read, tenant, text.size, body)

    async def _is_answered(self, taken: TakenLine) -> bool:
        """Whether it has a result, and only its acknowledgement was lost."""
        line = taken.line
        if await self._store.results.get(line.job, line.number) is None:
            return False
        await self._store.lines.ack(taken)
        return True

    async def _refuse(self, taken: TakenLine, why: str) -> None:
        line = taken.line
        args = (line.job, line.number, line.custom_id)
        await self._store_result(taken, unanswered(*args, "invalid_value", why))

    # Attempts.

    def _open(self, effect: ofx.OpenLine) -> None:
        held = self._held[effect.request.key]
        line = held.taken.line
        request = LineRequest(
            request=effect.request,
            path=line.url,
            body=held.body,
            tenant=held.tenant or None,
            size=held.size,
        )
        request.changed = lambda: self._take_bytes(request)
        held.request = request
        self._session.open(request)

    def _take_bytes(self, request: LineRequest) -> None:
        """Make room for more of a long answer, and drop one that may come without end."""
        answer = request.answer
        if answer is None or answer.end is not None or not answer.is_startable:
            return
        data = answer.take()
        if answer.taken_bytes > self._store.lines.body_bytes_max:
            request.is_too_large = True
            request.answer_bytes.clear()
        else:
            request.answer_bytes.append(data)
        self._session.passed(request)

    def _close_request(self, effect: ofx.CloseLine) -> None:
        held = self._held.get(effect.key)
        if held is not None and held.request is not None:
            self._session.close(held.request)
            held.request = None

    # Ends.

    def _settle(self, effect: ofx.SettleLine) -> None:
        self._begin(self._settled(effect.key, self._held[effect.key].taken, self._result(effect)))

    def _result(self, effect: ofx.SettleLine) -> Result:
        held = self._held[effect.key]
        line, request = held.taken.line, held.request
        args = (effect.job, effect.number, line.custom_id)
        if effect.settlement is ofx.Settlement.ERROR:
            return unanswered(*args, effect.code, effect.message)
        assert request is not None, "answers are of requests"
        request_id = request.request.request_id
        if effect.settlement is ofx.Settlement.ENGINE_ERROR:
            error = request.engine_error
            assert error is not None, "the engine has answered"
            return answered(*args, error.status, request_id, error.body)
        answer = request.answer
        assert answer is not None and answer.head is not None, "an answer has a head"
        if request.is_too_large:
            message = f"The answer has more than {self._store.lines.body_bytes_max} bytes."
            return unanswered(*args, output_line.TOO_LARGE, message)
        body = b"".join((*request.answer_bytes, answer.take()))
        return answered(*args, answer.head.status, request_id, body)

    async def _settled(self, key: int, taken: TakenLine, result: Result) -> None:
        async with self._storing:
            await self._store_result(taken, result)
        del self._held[key]
        self._session.feed(oev.LineStored(key))

    async def _store_result(self, taken: TakenLine, result: Result) -> None:
        """Store it and acknowledge its line, however long the store takes."""
        line, wait_s = taken.line, STORE_RETRY_S
        while self._job_of(line.job) is not None:  # else the result is not used any more
            try:
                await self._store.results.put(stored(line.job, line.number, line.custom_id, result))
                await self._store.lines.ack(taken)
            except TooLarge as error:
                args = (line.job, line.number, line.custom_id)
                message = f"The answer is too large to be stored: {error}."
                result = unanswered(*args, output_line.TOO_LARGE, message)
            except (StoreFull, StoreUnavailable) as error:
                self._metrics.store_failed(error)
                self._log.warning("result", type(error).__name__, "kept here: %s", error)
                await asyncio.sleep(wait_s)
                wait_s = min(STORE_RETRY_S_MAX, 2 * wait_s)
            else:
                self._metrics.stored(result, error_code(result.status, result.line))
                return

    def _release(self, effect: ofx.ReleaseLine) -> None:
        held = self._held.pop(effect.key)
        if held.request is not None:
            self._session.close(held.request)
        self._begin(self._put_back(held.taken))

    async def _put_back(self, taken: TakenLine) -> None:
        self._metrics.put_back()
        try:
            await self._store.lines.nak(taken)
        except StoreError as error:
            text = "a line was not put back; other runners get it in %g s: %s"
            self._log.warning("nak", "store", text, ACK_WAIT_S, error)
