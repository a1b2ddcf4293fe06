"""Streams that may go on elsewhere if they break: what is kept for that, and what is sent then.

Of a stream that has begun, its request's body and what was said are kept, in the memory for bodies:
up to STREAM_BYTES_MAX of one stream, and while not more than half of that memory is taken in all.
Streams beyond it end with an error event if they break. What was said is kept as the engine's
events, and read into its text, a fiftieth of their size, where memory is short.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from mesh.adapters.metrics import RouterMetrics
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.model_targets import ModelTargets
from mesh.core.model.prompt import Prompt, PromptInvalid, PromptReader
from mesh.core.model.prompt_shapes import text_at
from mesh.core.model.served_names import model_of
from mesh.http.read_request import BodyBudget, salt_of
from mesh.session.body_model import model_in_json
from mesh.session.client_request import ClientRequest
from mesh.session.continuation import CantContinue, continuation
from mesh.session.record import STEPS_MAX, Step
from mesh.session.said import Said, Splice
from mesh.session.session import Session
from schemas.engine_routes import CONTINUING_KINDS
from schemas.http import CHAT, COMPLETIONS
from schemas.http_statuses import OK
from schemas.settings import ContinueStreams

log = logging.getLogger(__name__)
STREAM_BYTES_MAX = 1024 * 1024  # of one stream: its body and what was said
GROWN_BYTES = 32 * 1024  # of an answer, between two looks at what is kept of it
CHUNK_BYTES = 64  # that keeping a piece takes beside it
NOT_KEPT = "it has said more than is kept"
# Why the stream of a request is not kept, in its error event.
OTHER_API = "a stream of this API does not go on from another engine"
SWITCHED_OFF = "continue_streams of its model is off"
NO_ROOM = "it is not kept to go on from another engine: it is too long, or the router lacks memory"


class StreamContinuations:
    """Those of one router. The core decides which stream goes on; this knows what was said."""

    def __init__(
        self,
        session: Session,
        prompts: PromptReader,
        bodies: BodyBudget,
        metrics: RouterMetrics,
        targets: Callable[[], ModelTargets],
    ) -> None:
        """`targets`: what holds for single models now."""
        self._session, self._prompts, self._bodies = session, prompts, bodies
        self._metrics, self._targets = metrics, targets
        self._broken: deque[fx.Continue] = deque()  # that are to be read

    def begun(self, record: ClientRequest) -> None:
        """The client is being sent the first byte of an answer: keep what is said, if it may go on
        elsewhere."""
        answer = record.answer
        if answer is None or not answer.is_event_stream:
            return
        if record.said is None:
            if answer.head is None or answer.head.status != OK:
                return
            kept = len(record.body) + GROWN_BYTES
            if record.path not in (CHAT, COMPLETIONS):
                record.why_not = OTHER_API
            elif self._rule(record) is ContinueStreams.OFF:
                record.why_not = SWITCHED_OFF
            elif not self._has_room(record, kept):
                record.why_not = NO_ROOM
            if record.why_not:
                return
            self._keep(record, kept)
            record.said = Said(record.body, is_chat=record.path == CHAT)
        answer.keep = record.said.chunks.append
        answer.credit_at_bytes = min(answer.credit_at_bytes, GROWN_BYTES)

    def grew(self, record: ClientRequest) -> None:
        """More has left for its client."""
        said, answer = record.said, record.answer
        if said is None or said.why_not or answer is None:
            return
        if answer.taken_bytes < said.look_at_bytes:
            return
        kept = self._kept_bytes(record, said)
        if kept > STREAM_BYTES_MAX // 2 or not self._bodies.has_half(kept - record.kept_bytes):
            said.read()
            kept = self._kept_bytes(record, said)
        if said.why_not or not self._has_room(record, kept):
            said.give_up(said.why_not or NOT_KEPT)
            answer.keep = lambda data: None
            record.body, kept = b"", 0
        self._keep(record, kept)
        said.look_at_bytes = answer.taken_bytes + GROWN_BYTES
        answer.credit_at_bytes = min(answer.credit_at_bytes, said.look_at_bytes)

    def may_move(self, effect: fx.MayMove) -> None:
        """A stream flows that is to go on elsewhere: tell the core if another engine could."""
        record = self._session.record(effect.key)
        if not isinstance(record, ClientRequest):
            return
        answer, said = record.answer, record.said
        if answer is None or answer.is_whole or said is None:
            return
        try:
            splice = self._continued(record, said)[1]
        except Exception:  # an engine may have written anything: it stays where it is
            return
        kinds = CONTINUING_KINDS if splice.is_turn else ()
        self._session.feed(ev.Movable(effect.key, effect.attempt, kinds))

    def go_on(self, effect: fx.Continue) -> None:
        """The stream broke: have the core place what is to follow, or end it.

        A replica that is lost breaks many at once, and reading one takes milliseconds: each has a
        turn of the loop."""
        record = self._session.record(effect.key)
        if record is not None:
            self._session.stop_listening(record)
            if not self._broken:
                asyncio.get_running_loop().call_soon(self._next)
            self._broken.append(effect)

    def _next(self) -> None:
        effect = self._broken.popleft()
        if self._broken:
            asyncio.get_running_loop().call_soon(self._next)
        record = self._session.record(effect.key)
        if isinstance(record, ClientRequest):
            self._session.feed(self._read(record, effect))

    def _read(self, record: ClientRequest, effect: fx.Continue) -> ev.ContinuationRead:
        """What becomes of one stream."""
        key, attempt, detail = effect.key, effect.attempt, effect.detail
        answer, said = record.answer, record.said
        assert answer is not None and said is not None, "what was said is kept"
        if answer.is_whole:  # its client has all of it, or soon will
            return ev.ContinuationRead(key, attempt, detail)
        self._note(record, effect)
        try:
            answer.broke()
            said.sent_bytes += answer.taken_bytes + answer.buffered_bytes
            said.look_at_bytes = 0
            prompt = self._rewritten(record, said)
        except Exception as why:  # an engine may have written anything
            reason = str(why)
            if not isinstance(why, CantContinue | PromptInvalid):
                log.warning("%s can't go on", record.request.request_id, exc_info=why)
                reason = "what it said can't be read"
            if record.splice is None:  # else it is counted by how it ends
                self._metrics.streams_continued.labels("refused").inc()
            detail = f"{detail}; no other engine can go on with it: {reason}"
            return ev.ContinuationRead(key, attempt, detail)
        kinds = CONTINUING_KINDS if record.splice is not None and record.splice.is_turn else ()
        return ev.ContinuationRead(key, attempt, detail, prompt, kinds)

    def _rewritten(self, record: ClientRequest, said: Said) -> Prompt:
        """The prompt of what is asked next; it is the record's body from now on."""
        fields, splice = self._continued(record, said)
        if record.model_place is not None:
            fields["model"] = model_of(record.request.model)
        body = orjson.dumps(fields)
        place = None if record.model_place is None else model_in_json(body)
        if place is None and record.model_place is not None:
            raise CantContinue("its model is named twice")
        text = text_at(record.path, fields, len(body))
        record.body, record.model_place = body, place
        record.size = text.size
        kept = self._kept_bytes(record, said)
        if not self._bodies.has_half(kept - record.kept_bytes):
            raise CantContinue(NOT_KEPT)
        self._keep(record, kept)
        model, salt = record.request.model, salt_of(fields)
        prompt = self._prompts.read(model, text, salt, record.tenant or "")
        record.splice, record.request = splice, replace(record.request, prompt=prompt)
        return prompt

    def _continued(self, record: ClientRequest, said: Said) -> tuple[dict[str, Any], Splice]:
        """Raises CantContinue."""
        may_be_seeded = self._rule(record) is ContinueStreams.SEEDED
        return continuation(said, may_be_seeded=may_be_seeded)

    def _rule(self, record: ClientRequest) -> ContinueStreams:
        rule = self._targets().rule(model_of(record.request.model))
        return ContinueStreams.EXACT if rule is None else rule.continue_streams

    def _kept_bytes(self, record: ClientRequest, said: Said) -> int:
        again = 0 if record.body is said.body else len(record.body)
        chunks = sum(map(len, said.chunks)) + CHUNK_BYTES * len(said.chunks)
        return len(said.body) + again + chunks + 2 * len(said.text) + GROWN_BYTES

    def _has_room(self, record: ClientRequest, kept: int) -> bool:
        return kept <= STREAM_BYTES_MAX and self._bodies.has_half(kept - record.kept_bytes)

    def _keep(self, record: ClientRequest, kept: int) -> None:
        self._bodies.settle(record.kept_bytes, kept)
        record.kept_bytes = kept

    def _note(self, record: ClientRequest, effect: fx.Continue) -> None:
        """What the core itself found out is not among its steps yet."""
        if (
            record.steps
            and record.steps[-1].what is record.decided
            and len(record.steps) < STEPS_MAX
        ):
            failed = ev.AttemptFailed(effect.key, effect.attempt, effect.detail)
            record.steps += (Step(self._session.clock(), failed),)
