"""Answers people who ask over the bus about requests of this router (`schemas.explain`)."""

import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from infra.process import LimitedLog
from mesh.adapters.bus import RouterBus
from mesh.runtime.control_plane import ReplyGuard
from mesh.runtime.request_manager import RequestManager
from schemas.explain import QUESTION_BYTES_MAX, decode_question, encode_answer
from schemas.replies import is_service_reply
from schemas.wire import WireError

log = logging.getLogger(__name__)

# A question reads through all kept requests: less than a millisecond each.
QUESTIONS_PER_S = 20
CHANNEL = "requests"


class RequestQuestions:
    """One router's."""

    def __init__(
        self,
        requests: RequestManager,
        bus: RouterBus,
        guard: ReplyGuard,
        clock: Callable[[], float],
    ) -> None:
        self._requests, self._bus, self._guard, self._clock = requests, bus, guard, clock
        self._log = LimitedLog(log)
        self._second, self._asked = 0, 0

    def receive(self, msg: Msg) -> None:
        """A question; beyond QUESTIONS_PER_S it is not answered."""
        if not is_service_reply(msg.reply):
            self._guard.drop(CHANNEL, msg)
            return
        second = int(self._clock())
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        if self._asked > QUESTIONS_PER_S:
            self._log.warning(CHANNEL, "many", "more than %d questions a second", QUESTIONS_PER_S)
            return
        try:
            if len(msg.data) > QUESTION_BYTES_MAX:
                raise WireError(f"a question of {len(msg.data)} bytes")
            question = decode_question(msg.data)
            asked = (question.request, question.slowest, question.recent)
            if sum(one is not None for one in asked) != 1:
                raise WireError("a question names a request, or a number of slowest or latest ones")
        except WireError as error:
            self._log.warning(CHANNEL, "unreadable", "question dropped: %.300s", error)
            return
        ended, session = self._requests.ended, self._requests.session
        if question.request is not None:
            answer = ended.find(question.request, (*session, *session.from_peers))
        elif question.slowest is not None:
            answer = ended.slowest(question.slowest)
        else:
            assert question.recent is not None
            answer = ended.recent(question.recent)
        self._bus.publish(msg.reply, encode_answer(answer))
