"""Answers people who ask over the bus about requests of this router (`schemas.explain`)."""

import logging
from collections.abc import Callable
from dataclasses import replace

from nats.aio.msg import Msg

from infra.process import LimitedLog
from mesh.adapters.bus import RouterBus
from mesh.runtime.request_manager import RequestManager
from schemas.explain import QUESTION_BYTES_MAX, decode_question, encode_answer
from schemas.replies import is_service_reply
from schemas.wire import WireError

log = logging.getLogger(__name__)

# A question reads through all kept requests, and an answer may take tens of milliseconds, in which
# no client is served.
ANSWERING_SHARE_MAX = 0.05  # of the router's time
ANSWERING_AT_ONCE_S = 0.25  # that may be spent before: some people ask at the same moment
CHANNEL = "requests"


class AnsweringTime:
    """Whether there is time for one more answer; all times on one clock."""

    def __init__(self) -> None:
        self._spent_s, self._seen_at = 0.0, 0.0

    def is_left(self, now: float) -> bool:
        regained_s = (now - self._seen_at) * ANSWERING_SHARE_MAX
        self._spent_s, self._seen_at = max(0.0, self._spent_s - regained_s), now
        return self._spent_s < ANSWERING_AT_ONCE_S

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds


class RequestQuestions:
    """One router's."""

    def __init__(
        self,
        requests: RequestManager,
        bus: RouterBus,
        clock: Callable[[], float],
    ) -> None:
        self._requests, self._bus, self._clock = requests, bus, clock
        self._log = LimitedLog(log)
        self._time = AnsweringTime()

    def receive(self, msg: Msg) -> None:
        """A question; it is not answered where answers take too much of the router's time."""
        if not is_service_reply(msg.reply):
            self._requests.guard.drop(CHANNEL, msg)
            return
        began_at = self._clock()
        if not self._time.is_left(began_at):
            self._log.warning(CHANNEL, "many", "question dropped: too many of them")
            return
        try:
            if len(msg.data) > QUESTION_BYTES_MAX:
                raise WireError(f"a question of {len(msg.data)} bytes")
            question = decode_question(msg.data)
            asked = (question.request, question.slowest, question.recent, question.routing)
            if sum(one is not None for one in asked) != 1:
                raise WireError(
                    "a question names a request, a number of slowest or latest ones, or routing"
                )
        except WireError as error:
            self._log.warning(CHANNEL, "unreadable", "question dropped: %.300s", error)
            return
        ended, session = self._requests.ended, self._requests.session
        if question.request is not None:
            answer = ended.find(question.request, (*session, *session.from_peers))
        elif question.slowest is not None:
            answer = ended.slowest(question.slowest)
        elif question.recent is not None:
            answer = ended.recent(question.recent, self._requests.held_by_tenant())
        else:
            orders = self._requests.leases.orders
            routing = replace(
                self._requests.routing.answer(), drained=orders.drained, orders_lost=orders.is_lost
            )
            answer = replace(ended.nothing(), routing=routing)
        self._bus.publish(msg.reply, encode_answer(answer))
        self._time.spend(self._clock() - began_at)
