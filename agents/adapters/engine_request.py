"""What an engine is sent for one request: the client's body, and what this engine is to have
besides."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agents.adapters.engine import EngineClient
from agents.core.effects import StartRelay
from agents.core.kv_stages import stage_body, stage_request_id, whole_body
from agents.core.usage import with_response_id, with_usage_requested
from schemas.exchange import H_ADD_USAGE, H_TENANT
from schemas.http import RESPONSES
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.kv_transfer import TransferKind
from schemas.request_headers import for_engine
from schemas.response_ids import SECRET_BYTES, response_id

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ReplicaSite:
    """The replica that answers. `transfer`: of KV caches between engines, where its engine has a
    part in pairs."""

    region: RegionId
    replica: ReplicaId
    engine_kind: str = "openai"
    transfer: TransferKind | None = None


class EngineRequest(NamedTuple):
    """A request of HTTP. `adds_usage`: it asks for token counts that no client asked for."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    adds_usage: bool = False


def engine_request(
    start: StartRelay,
    engine: EngineClient,
    site: ReplicaSite,
    adapter: ModelId | None,
    trace: Mapping[str, str],
) -> EngineRequest:
    """`adapter`: the one that it is for; `trace`: headers. Raises StageInvalid."""
    work = start.work
    headers = {"Content-Type": JSON, **trace, **for_engine(start.headers)}
    if work.request_id:
        headers["X-Request-Id"] = work.request_id
    if (call := work.call) is not None:
        named, body = engine.addressed(headers, b"", adapter)
        return EngineRequest(call.method, call.target, named, body)
    body = start.body
    if site.transfer is not None and work.stage is not None:
        if (request_id := stage_request_id(site.transfer, work.stage)) is not None:
            headers["X-Request-Id"] = request_id
        body = stage_body(body, site.transfer, work.stage)
    elif site.transfer is not None:
        body = whole_body(body, site.transfer)
    adds_usage = engine.asks_usage and H_ADD_USAGE in start.headers
    if adds_usage:
        body = with_usage_requested(body)
    if work.path == RESPONSES and engine.takes_response_ids:
        tenant = start.headers.get(H_TENANT, "")  # where its response is kept
        secret = os.urandom(SECRET_BYTES)
        body = with_response_id(body, response_id(site.region, site.replica, secret, tenant))
    named, body = engine.addressed(headers, body, adapter)
    return EngineRequest("POST", work.path, named, body, adds_usage)
