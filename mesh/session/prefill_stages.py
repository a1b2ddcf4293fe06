"""The prefill stages of attempts on pairs: sent to their replicas, answered to inboxes of our own.

A stage is a request like any other, on a copy of the record that it is a stage of: its agent takes
or refuses it, asks for a large body's parts, and answers. The answer is small: the object that the
prefill engine hands out for the decode engine (`kv_transfer_params`), or nothing where the engines
find each other by what both requests carry. Nothing of it goes to a client, and of what comes only
an object within PARAMS_BYTES_MAX goes on, to the agent that decodes.

An engine's client error in this stage is the request's fault, and the decode engine finds it too:
its answer is the one that the client gets, so the stage counts as over.
"""

from copy import copy
from hashlib import blake2b
from json import dumps

import orjson

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.session.answer import AnswerReceiver
from mesh.session.record import NO_TRACE, OpenRequest, nobody_waits
from schemas import exchange
from schemas.http_statuses import CLIENT_ERRORS, TOO_MANY
from schemas.kv_transfer import PARAMS_BYTES_MAX, ROOM_MAX, KvRole


def opened(whole: OpenRequest, answer: AnswerReceiver) -> OpenRequest:
    """The record of a request's prefill stage, which is answered there."""
    stage = copy(whole)
    stage.stage_of = whole
    stage.answer, stage.direct_writer, stage.changed = answer, None, nobody_waits
    stage.spans, stage.kept_bytes, stage.steps = NO_TRACE, 0, ()
    stage.adds_usage = False
    return stage


def room_of(secret: str) -> int:
    """A number that both stages of an attempt share, from a token that nobody can guess."""
    return int.from_bytes(blake2b(secret.encode(), digest_size=8).digest()) & ROOM_MAX


def stage_headers(role: KvRole, pair: fx.KvPair, record: OpenRequest) -> dict[str, str]:
    """What a stage's work message has beside a whole request's."""
    headers = {exchange.H_STAGE: role.value, exchange.H_KV_ROOM: str(record.kv_room)}
    if pair.prefill_address is not None:
        headers[exchange.H_KV_PREFILL] = pair.prefill_address
    if pair.decode_address is not None:
        headers[exchange.H_KV_DECODE] = pair.decode_address
    if role is KvRole.DECODE and record.kv_params:
        headers[exchange.H_KV_PARAMS] = record.kv_params
    return headers


def outcome(stage: OpenRequest, answer: AnswerReceiver, event: ev.Event) -> ev.Event:
    """How a stage ended, for the core; its parameters are kept for the decode stage."""
    key, attempt = answer.key, answer.attempt
    if isinstance(event, ev.AttemptRefused):
        return ev.AttemptRefused(
            key, attempt, event.reason, event.region, event.replica, event.pending, event.running,
            prefill=True,
        )  # fmt: skip
    if isinstance(event, ev.AttemptFailed):
        return ev.AttemptFailed(
            key, attempt, event.detail, event.status, prefill=True, blameless=event.blameless
        )
    whole, head = stage.stage_of, answer.head
    if head is None or whole is None:
        return ev.AttemptFailed(key, attempt, "the prefill stage was lost", prefill=True)
    if head.status in CLIENT_ERRORS and head.status != TOO_MANY:
        return ev.PrefillEnded(key, attempt)
    params = params_text(answer.take())
    if params is None:
        detail = "the prefill replica's answer is no object that a decode engine could use"
        return ev.AttemptFailed(key, attempt, detail, prefill=True)
    whole.kv_params = params
    served = event.served if isinstance(event, ev.AnswerEnded) else None
    return ev.PrefillEnded(key, attempt, served)


def params_text(answer: bytes) -> str | None:
    """The object as a header's value, empty for `null`; None for none, or one too large or deep."""
    if len(answer) > PARAMS_BYTES_MAX:
        return None
    try:
        found = orjson.loads(answer)
        orjson.dumps([found])  # TypeError: nested deeper than an agent writes it into a body
    except (orjson.JSONDecodeError, TypeError):
        return None
    if found is None:
        return ""
    text = dumps(found, separators=(",", ":")) if isinstance(found, dict) else None
    return None if text is None or len(text) > PARAMS_BYTES_MAX else text
