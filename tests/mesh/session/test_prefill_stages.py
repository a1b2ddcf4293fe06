"""The prefill stage of an attempt on a pair at the session: messages, and what counts of them."""

from dataclasses import replace
from itertools import count

import orjson
import pytest

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.request import Served
from mesh.session.prefill_stages import params_text
from mesh.session.record import OpenRequest, Trace
from schemas import exchange
from schemas.exchange import Outcome, Refusal
from schemas.ids import ReplicaId
from schemas.kv_transfer import PARAMS_BYTES_MAX, TransferKind
from tests.mesh.core.build import foreign
from tests.mesh.session.test_session import END, Router

PAIR = fx.KvPair(TransferKind.NIXL)
FIRST = fx.DispatchPrefill(fx.Dispatch(1, 1, ReplicaId("p"), 4, None, 900), PAIR)
SECOND = fx.Dispatch(1, 1, ReplicaId("d"), 5, None, 1, True, pair=PAIR)
HEAD = exchange.Head(200, "application/json", "us", "p")
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.8", "name": "é"}


def started(**effects: list) -> tuple[Router, OpenRequest, str]:
    """A router that has sent the prefill stage; its client's record, and the stage's inbox."""
    router = Router(RequestArrived=[FIRST], **effects)
    router.session._secret = map(str, count()).__next__
    record = router.admitted()
    [(_, stage, _, replica, inbox, headers)] = router.sent
    assert (replica, stage.body, stage.stage_of) == ("p", record.body, record)
    assert headers[exchange.H_STAGE] == "prefill" and headers[exchange.H_PREFILL_TOKENS] == "900"
    assert record.answer is None, "nothing answers the client yet"
    return router, record, inbox


def answered(router: Router, inbox: str, *messages: object) -> ev.Event:
    for message in messages:
        assert router.session.answers.receive(inbox, message)
    return router.events[-1]


def test_what_the_prefill_engine_hands_out_goes_to_the_decode_replica_alone():
    router, record, inbox = started(PrefillEnded=[SECOND])
    event = answered(router, inbox, HEAD, orjson.dumps(PARAMS), END)
    assert event == ev.PrefillEnded(1, 1, Served(9, 4, 2))
    _, sent, _, replica, second, headers = router.sent[-1]
    assert (sent, replica, second != inbox) == (record, "d", True)
    assert orjson.loads(headers[exchange.H_KV_PARAMS]) == PARAMS
    assert headers[exchange.H_KV_PARAMS].isascii(), "as headers are"
    assert headers[exchange.H_STAGE] == "decode"
    assert record.answer.inbox == second and not record.answer.buffered_bytes
    assert not router.session.answers.receive(inbox, END), "the stage's inbox is closed"


class Noting(Trace):
    """Writes down what the session reports."""

    is_traced = True

    def __init__(self) -> None:
        self.noted = []

    def dispatched(self, effect, headers) -> None:
        headers["Traceparent"] = "decode"
        self.noted.append(effect.replica)

    def prefill_dispatched(self, effect, headers) -> None:
        headers["Traceparent"] = "prefill"
        self.noted.append(effect.replica)

    def prefill_ended(self, attempt, event) -> None:
        self.noted.append(event)


def test_both_stages_are_traced_with_contexts_of_their_own():
    router = Router(RequestArrived=[FIRST], PrefillEnded=[SECOND])
    spans = Noting()
    record = router.admitted(spans=spans)
    inbox = router.sent[0][4]
    event = answered(router, inbox, HEAD, orjson.dumps(PARAMS), END)
    assert spans.noted == ["p", event, "d"] and record.spans is spans
    assert [sent[-1]["Traceparent"] for sent in router.sent] == ["prefill", "decode"]


def test_a_cancelled_stage_is_traced_as_such():
    router = Router(RequestArrived=[FIRST, fx.CancelPrefill(1, 1, ReplicaId("p"))])
    spans = Noting()
    router.admitted(spans=spans)
    assert spans.noted == ["p", None]


def test_both_stages_have_one_room_that_no_other_attempt_has():
    at_once = replace(SECOND, pair=fx.KvPair(TransferKind.SGLANG, "10.0.0.8:8998"))
    first = fx.DispatchPrefill(FIRST.work, at_once.pair)
    router = Router(RequestArrived=[first, at_once])
    router.admitted()
    headers = [sent[-1] for sent in router.sent]
    assert [one[exchange.H_STAGE] for one in headers] == ["prefill", "decode"]
    assert {one[exchange.H_KV_PREFILL] for one in headers} == {"10.0.0.8:8998"}
    assert len({one[exchange.H_KV_ROOM] for one in headers}) == 1
    assert exchange.H_KV_PARAMS not in headers[1]


@pytest.mark.parametrize("answer", [b"", b"[]", b"7", b'{"a":', b'{"a":"%b"}' % (b"x" * 2**18)])
def test_an_answer_that_is_no_small_object_fails_the_stage(answer):
    router, record, inbox = started()
    messages = (HEAD, answer, END) if answer else (HEAD, END)
    event = answered(router, inbox, *messages)
    assert isinstance(event, ev.AttemptFailed) and event.prefill
    assert record.kv_params == ""
    assert router.observer.calls == [("attempt_failed", event.detail)]


def test_parameters_have_a_limit_as_a_header_and_null_is_nothing():
    def of(size: int) -> bytes:
        return orjson.dumps({"a": "x" * (size - len('{"a":""}'))})

    assert len(params_text(of(PARAMS_BYTES_MAX))) == PARAMS_BYTES_MAX
    assert params_text(of(PARAMS_BYTES_MAX + 1)) is None
    longer = orjson.dumps({"a": "é" * (PARAMS_BYTES_MAX // 4)})
    assert len(longer) < PARAMS_BYTES_MAX and params_text(longer) is None, "it grows as ASCII"
    assert params_text(b"null") == ""


def test_the_object_is_nested_no_deeper_than_agents_can_write():
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    assert params_text(nested(253)) == nested(253).decode()
    for levels in (254, 1000, 2000):
        assert params_text(nested(levels)) is None


def test_an_engines_client_error_is_left_to_the_decode_engine():
    router, _, inbox = started()
    head = replace(HEAD, status=400)
    assert answered(router, inbox, head, b'{"error": 1}', END) == ev.PrefillEnded(1, 1)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_another_error_is_kept_in_case_no_other_engine_does_better(status):
    router, record, inbox = started()
    event = answered(router, inbox, replace(HEAD, status=status), b"busy", END)
    assert (event.status, event.prefill) == (status, True)
    assert (record.engine_error.status, record.engine_error.body) == (status, b"busy")


def test_a_refusal_a_loss_and_nobody_there_are_the_stages():
    refused = exchange.Refused(Refusal.FULL, "us", "p", 3, 1)
    lost = exchange.End(Outcome.ENGINE_LOST, "reset", -1, -1, -1, -1.0)
    for message, kind in ((refused, ev.AttemptRefused), (lost, ev.AttemptFailed)):
        router, _, inbox = started()
        event = answered(router, inbox, message)
        assert isinstance(event, kind) and event.prefill
    router, _, inbox = started()
    assert router.session.answers.no_subscriber(inbox)
    assert router.events[-1].prefill and router.events[-1].replica == "p"


def test_a_cancelled_stage_is_cancelled_at_its_replica_once():
    router, _, inbox = started(ClientGone=[fx.CancelPrefill(1, 1, ReplicaId("p"))])
    router.session.feed(ev.ClientGone(1))
    router.session.feed(ev.ClientGone(1))
    cancels = [sent for sent in router.sent if sent[0] == "send_cancel"]
    assert cancels == [("send_cancel", "us", "p", inbox)]
    assert not router.session.answers.receive(inbox, HEAD), "what comes later is a stray"


def test_a_bus_that_takes_nothing_fails_the_stage():
    router = Router(RequestArrived=[FIRST])
    router.takes = False
    router.admitted()
    assert router.events[-1] == ev.AttemptFailed(
        1, 1, "the bus does not take it", prefill=True, blameless=True
    )


def test_a_peers_prefill_stage_answers_here_and_its_decode_stage_there():
    second = replace(SECOND, answer_inbox="_INBOX.eu.r1.x")
    router = Router(RequestArrived=[FIRST], PrefillEnded=[second])
    received = {exchange.H_REQUEST: "r", exchange.H_PATH: "/v1/chat/completions"}
    record = OpenRequest(request=foreign(1), body=b"{}", received=received)
    router.session.admit_forwarded(record)
    [(_, _, _, _, inbox, headers)] = router.sent
    assert inbox.startswith("_INBOX.us.r1.") and headers[exchange.H_REQUEST] == "r"
    answered(router, inbox, HEAD, orjson.dumps(PARAMS), END)
    (placed, to, message), work = router.sent[-2:]
    assert (placed, to, message.replica) == ("answer_peer", "_INBOX.eu.r1.x", "d")
    assert work[4] == "_INBOX.eu.r1.x" and work[5][exchange.H_KV_PARAMS]
    assert not router.session.from_peers and not router.session._prefills
