"""Copies of requests for other models, whose answers are read and dropped.

A copy is a request of low priority that no client waits for. It goes to a replica of this region
that has room at once and that the request's labels allow, and is neither held, nor forwarded, nor
tried again, so that it takes nothing but room that is free at that moment. It is made after its
request was placed, in a later turn of the event loop, and whatever becomes of it concerns nobody
but the metrics and the access log.
"""

import asyncio
import logging
from dataclasses import dataclass

from infra.process import LimitedLog
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.refused import RequestRefused
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptReader
from mesh.core.model.request import Request
from mesh.core.model.served_names import served_name
from mesh.core.router import RouterCore
from mesh.http.read_request import BodyBudget, ParsedRequest
from mesh.runtime.model_mapping import conversation, placed
from mesh.session.body_model import with_model
from mesh.session.client_request import ClientRequest
from mesh.session.record import Ending
from mesh.session.session import Session
from schemas.engine_routes import GENERATING_PATHS, PLAIN_PATHS
from schemas.exchange import Priority
from schemas.http import Fault
from schemas.ids import ModelId, RequestId

COPIES_MAX = 32  # under way: as many streams as one replica answers, and of bodies some megabytes
ID_CHARS_MAX = 120  # of the request's id in its copy's
SKIPPED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.RESIDENCY, Fault.DRAINING)


@dataclass(slots=True, kw_only=True)
class CopyRequest(ClientRequest):
    """A copy from its dispatch to its end; nothing of it is sent to a client."""

    asked: ModelId  # what the client asked for

    def ending_at(
        self, at: float, outcome: str, status: int = 0, error_type: str = "", detail: str = ""
    ) -> Ending:
        ending = ClientRequest.ending_at(self, at, outcome, status, error_type, detail)
        taken = 0 if self.answer is None else self.answer.taken_bytes
        return ending._replace(
            asked=self.asked, sent_bytes=taken, is_copy=True, fault="", decided=None
        )


class ShadowCopies:
    """Those of one router."""

    def __init__(
        self,
        core: RouterCore,
        session: Session,
        prompts: PromptReader,
        bodies: BodyBudget,
        metrics: RouterMetrics,
    ) -> None:
        self._core, self._session, self._prompts = core, session, prompts
        self._bodies, self._metrics = bodies, metrics
        self._clock = session.clock
        self._open: dict[int, CopyRequest] = {}
        self._log = LimitedLog(logging.getLogger(__name__))

    def of(self, parsed: ParsedRequest, admitted: ClientRequest) -> None:
        """Send the copies that this request is to have, as soon as the loop comes to it."""
        targets = self._core.state.targets
        if not targets.rules:
            return
        asked = admitted.request.asked
        name = parsed.model if asked is None else asked.model
        if not any(rule and rule.shadow for rule in map(targets.rule, (name, parsed.model))):
            return
        which = conversation(parsed, admitted.tenant) if asked is None else asked.conversation
        for model in targets.shadows(name, parsed.model, which):
            asyncio.get_running_loop().call_soon(self._send, model, name, parsed, admitted)

    def end(self) -> None:
        """The router takes nothing new: its copies end."""
        for key, copy in tuple(self._open.items()):
            self._session.feed(ev.ClientGone(key))
            self._close(copy, "cancelled", 0)

    def _send(
        self, model: ModelId, asked: ModelId, parsed: ParsedRequest, original: ClientRequest
    ) -> None:
        try:
            if self._core.draining or len(self._open) >= COPIES_MAX or parsed.previous is not None:
                self._metrics.copy_ended(model, "skipped")
                return
            copy = self._copy(model, asked, parsed, original)
            if copy is None:
                self._metrics.copy_ended(model, "skipped")
                return
            self._open[copy.request.key] = copy
            self._session.admit(copy)
        except Exception as error:  # the request that it is a copy of goes on
            self._metrics.copy_ended(model, "failed")
            self._log.warning("copy", type(error).__name__, "a copy for %s: %r", model, error)

    def _copy(
        self, model: ModelId, asked: ModelId, parsed: ParsedRequest, original: ClientRequest
    ) -> CopyRequest | None:
        """None where there is no room for its body, or its model can't be written there."""
        name, path, request = served_name(model, parsed.path), parsed.path, original.request
        try:
            place = placed(parsed)
        except RequestRefused:
            return None
        body, place = with_model(parsed.body, place, model)
        if not self._bodies.take(len(body)):
            return None
        is_work = path in PLAIN_PATHS or path in GENERATING_PATHS
        tenant = original.tenant
        copied = Request(
            key=next(self._session.keys),
            request_id=RequestId(f"{request.request_id[:ID_CHARS_MAX]}:copy"),
            model=name,
            prompt=self._prompts.read(name, parsed.fields.text, parsed.options.salt, tenant or ""),
            arrived_at=self._clock(),
            deadline=request.deadline,
            hops=0,
            origin=request.origin,
            priority=Priority.LOW,
            session=request.session,
            shadow=True,
            answer_tokens=None if is_work else 0,
            residency=request.residency,
            wants_receipt=False,
            tenant=request.tenant,
            key_id=request.key_id,
        )
        copy = CopyRequest(
            request=copied,
            path=path,
            adds_usage=parsed.fields.adds_usage,
            for_engine=parsed.for_engine,
            body=body,
            model_place=place,
            tenant=tenant,
            kept_bytes=len(body),
            asked=asked,
        )
        copy.changed = lambda: self._changed(copy)
        return copy

    def _changed(self, copy: CopyRequest) -> None:
        """Read what came of its answer, and drop it."""
        answer, failure = copy.answer, copy.failure
        if failure is not None:
            outcome = "skipped" if failure.fault in SKIPPED and not copy.first_byte_at else "failed"
            self._close(copy, outcome, failure.fault.value.status, failure.message)
        elif copy.pass_engine_error:
            status = 0 if copy.engine_error is None else copy.engine_error.status
            self._close(copy, "failed", status, "the engine's own error")
        elif answer is not None and answer.is_startable:
            if copy.first_byte_at is None:
                copy.first_byte_at = self._clock()
                self._session.started(copy)
            answer.take()
            if answer.end is None:
                self._session.passed(copy)
            else:
                assert answer.head is not None
                outcome = "ok" if answer.engine_failure is None else "failed"
                self._close(copy, outcome, answer.head.status, answer.engine_failure or "")

    def _close(self, copy: CopyRequest, outcome: str, status: int, detail: str = "") -> None:
        self._open.pop(copy.request.key, None)
        self._session.end(copy, outcome, status, detail=detail)
