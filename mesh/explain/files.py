"""Requests in what routers have written down: access logs, as logfmt or JSON, and recordings.

A line of a log has the last decision alone, without its candidates; a recording has them all, by a
clock that began anywhere. Other lines between those of a log are passed over.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from mesh.core import recording
from mesh.core.recording import RecordingInvalid
from schemas.decision import Decision
from schemas.explain import LifeStep, RequestLife

_PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)')
_LIFE: TypeAdapter[RequestLife] = TypeAdapter(RequestLife)
_DECISION: TypeAdapter[Decision] = TypeAdapter(Decision)
COUNTS = {"tokens_in": "prompt_tokens", "tokens_cached": "cached_tokens"}
FOUND_MAX = 64


class FileUnusable(ValueError):
    """The file can't be read, or is no recording; the message says which and why."""


def in_log(path: Path, name: str) -> list[RequestLife]:
    """The requests of that id or trace in an access log. Raises FileUnusable."""
    found: deque[RequestLife] = deque(maxlen=FOUND_MAX)
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                fields = read_line(line) if name in line else None
                if fields is not None and name in (fields.get("id"), fields.get("trace")):
                    found.extend(_life(fields))
    except OSError as error:
        raise FileUnusable(f"can't read the log {path}: {error.strerror}") from error
    return list(found)


def read_line(line: str) -> dict[str, Any] | None:
    """What a line of an access log says, by name; None of a line that is none.

    systemd and containers may have written something before it.
    """
    try:
        start = line.find('{"ts":')
        fields = orjson.loads(line[start:]) if start >= 0 else _logfmt(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and {"ts", "id", "router"} <= fields.keys() else None


def _logfmt(line: str) -> dict[str, Any]:
    start = line.find("ts=")
    pairs = _PAIR.findall(line[start:] if start >= 0 else "")
    return {name: json.loads(text) if text.startswith('"') else text for name, text in pairs}


def _life(fields: dict[str, Any]) -> Iterator[RequestLife]:
    """None where a value is not what a router writes."""
    try:
        region, _, router = str(fields["router"]).partition("/")
        ended_at = datetime.fromisoformat(str(fields["ts"])).timestamp()
        arrived_at = ended_at - float(fields.get("duration_s", 0.0))
        ttft_s = fields.get("ttft_s")
        status = fields.get("status")
        if ttft_s is None and status is not None and int(status) < 400 and "placement" in fields:
            ttft_s = fields["duration_s"]  # an answer that was not streamed
        life = {
            "request": fields["id"],
            "trace": fields.get("trace"),
            "region": region,
            "router": router,
            "origin": fields.get("origin"),
            "method": fields.get("method"),
            "route": fields.get("route", ""),
            "status": status,
            "outcome": fields.get("outcome", ""),
            "model": fields.get("model"),
            "asked_model": fields.get("asked_model"),
            "is_copy": "shadow" in fields,
            "tenant": fields.get("tenant"),
            "served_by_region": fields.get("region"),
            "served_by_replica": fields.get("replica"),
            "prefill_replica": fields.get("prefill_replica"),
            "peer_held_s": fields.get("peer_held_s", 0.0),
            "prompt_tokens": fields.get("tokens_in"),
            "cached_tokens": fields.get("tokens_cached"),
            "output_tokens": fields.get("tokens_out"),
            "sent_bytes": fields.get("bytes", 0),
            "is_stream": "ttft_s" in fields,
            "fault": fields.get("error"),
            "detail": fields.get("detail"),
            "arrived_at": arrived_at,
            "started_at": None if ttft_s is None else arrived_at + float(ttft_s),
            "ended_at": ended_at,
        }
        found = _LIFE.validate_python(life)
        yield replace(found, steps=_steps(fields, found))
    except (ValidationError, ValueError, TypeError, KeyError):
        return


def _steps(fields: dict[str, Any], life: RequestLife) -> tuple[LifeStep, ...]:
    """The last decision; when it was made is not in the line, only how long it was held before."""
    if "placement" not in fields:
        return ()
    placement = fields["placement"]
    decision = _DECISION.validate_python(
        {
            "request": life.request,
            "region": life.region,
            "policy": "",  # the line has none
            "placement": placement,
            "replica": life.served_by_replica if placement == "local" else None,
            "prefill": life.prefill_replica,
            "peer": life.served_by_region if placement == "peer" else None,
            "hops": fields.get("hops", 0),
            "attempt": fields.get("attempts", 1),
            "held_s": fields.get("held_s", 0.0),
            "reason": fields.get("reason", ""),
        }
    )
    return (LifeStep(at=life.arrived_at + decision.held_s, what="decided", decision=decision),)


def in_recording(path: Path, name: str) -> list[RequestLife]:
    """The requests of that id in a router's recording. Raises FileUnusable."""
    found: dict[int, RecordedRequest] = {}
    try:
        with path.open("rb") as lines:
            header = recording.decode_header(lines.readline())
            for line in lines:
                _read_step(line, name, found)
    except OSError as error:
        raise FileUnusable(f"{path}: {error.strerror}") from error
    except RecordingInvalid as error:
        raise FileUnusable(f"{path}: {error}") from error
    return [one.life(header.region, header.router) for one in found.values()][-FOUND_MAX:]


class RecordedRequest:
    """What a recording's lines say of one request."""

    def __init__(self, request: dict[str, Any], now: float) -> None:
        self.request, self.arrived_at = request, now
        self.steps: list[LifeStep] = []
        self.dispatched_at = now
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.outcome = "open"
        self.about: dict[str, Any] = {}

    def event(self, kind: str, event: dict[str, Any], now: float) -> None:
        if kind == "AttemptRefused":
            region, replica, detail = event["region"], event["replica"], event["reason"]
            self.steps.append(
                LifeStep(at=now, what="refused", region=region, replica=replica, detail=detail)
            )
        elif kind == "AttemptFailed":
            self.steps.append(LifeStep(at=now, what="failed", detail=event["detail"][:256]))
        elif kind == "PrefillEnded" and self.started_at is None:
            self.about["prefill_s"] = now - self.dispatched_at
        elif kind == "PlacedByPeer":
            self.about["served_by_replica"] = event["replica"]
        elif kind == "AnswerStarted":
            self.started_at = now
        elif kind in ("AnswerEnded", "ClientGone") and self.ended_at is None:
            self.ended_at, self.outcome = now, "ok" if kind == "AnswerEnded" else "client_gone"

    def effect(self, kind: str, effect: dict[str, Any], now: float) -> None:
        if kind == "Decided":
            decision = _DECISION.validate_python(effect["decision"])
            self.steps.append(LifeStep(at=now, what="decided", decision=decision))
            if decision.placement == "local":
                served = {
                    "served_by_region": decision.region,
                    "served_by_replica": decision.replica,
                    "prefill_replica": decision.prefill,
                    "prefill_s": None,
                }
                self.dispatched_at = now
                self.about |= served
                if self.request.get("answer_inbox") is not None:
                    self.ended_at, self.outcome = now, "placed"
            elif decision.placement == "peer":
                self.about |= dict.fromkeys(("served_by_replica", "prefill_replica", "prefill_s"))
                self.about["served_by_region"] = decision.peer
        elif kind == "Fail":
            self.ended_at, self.outcome = now, "failed"
            self.about |= {"fault": effect["fault"], "detail": effect["message"][:256]}
        elif kind == "PassEngineError":
            self.ended_at, self.outcome = now, "failed"
        elif kind == "RefusePeer":
            self.ended_at, self.outcome = now, "refused"
            self.about["detail"] = effect["reason"]

    def life(self, region: str, router: str) -> RequestLife:
        if self.started_at is not None and self.ended_at is not None:
            self.ended_at = max(
                self.ended_at, self.started_at
            )  # of a short answer the end is first
        is_peers = self.request.get("answer_inbox") is not None
        return _LIFE.validate_python(
            {
                "request": self.request["request_id"],
                "region": region,
                "router": router,
                "origin": self.request["origin"] if is_peers else None,
                "route": "ingress" if is_peers else "recorded",
                "outcome": self.outcome,
                "model": self.request["model"],
                "arrived_at": self.arrived_at,
                "started_at": self.started_at,
                "ended_at": self.ended_at,
                "steps": self.steps,
                **self.about,
            }
        )


def _read_step(line: bytes, name: str, found: dict[int, RecordedRequest]) -> None:
    """One line of a recording. Lines about other requests are not taken apart."""
    is_named = name.encode() in line
    if not is_named and not any(b'"key":%d' % key in line for key in found):
        return
    try:
        fields = orjson.loads(line)
        now = float(fields["now"])
        [(kind, event)] = fields["event"].items()
        request = event.get("request")
        if kind == "RequestArrived" and request["request_id"] == name:
            found[request["key"]] = RecordedRequest(request, now)
        elif (one := found.get(event.get("key"))) is not None:
            one.event(kind, event, now)
        for tagged in fields["effects"]:
            [(kind, effect)] = tagged.items()
            if (one := found.get(effect.get("key"))) is not None:
                one.effect(kind, effect, now)
    except (KeyError, TypeError, ValueError, AttributeError):
        return  # the end of a recording, or a line that was cut off
