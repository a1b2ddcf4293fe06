"""The headers of work and ingress messages, as live routers write them (mesh.runtime.work)."""

from collections.abc import Mapping

from mesh.core.effects import Dispatch
from mesh.core.requests.request import Request
from schemas import exchange, subjects
from schemas.http import CHAT
from schemas.ids import ModelId, RegionId, RequestId, RouterId

MODEL = ModelId("twin")
_MODEL_TOKEN = subjects.encode_model(MODEL)


def request_headers(request_id: RequestId, attempt: int, remaining_s: float) -> dict[str, str]:
    """What both kinds of message say of a request."""
    return deadline_header(remaining_s) | {
        exchange.H_REQUEST: request_id,
        exchange.H_MODEL: _MODEL_TOKEN,
        exchange.H_PATH: CHAT,
        exchange.H_ATTEMPT: str(attempt),
    }


def way_headers(origin: RegionId, waited_s: float, held_s: float) -> dict[str, str]:
    """What a peer wants to know of the request's way so far."""
    return {
        exchange.H_WAITED_MS: str(round(waited_s * 1000)),
        exchange.H_HELD_MS: str(round(held_s * 1000)),
        exchange.H_HOPS: "1",
        exchange.H_ORIGIN: origin,
    }


def onward_headers(request: Request, home: RegionId, held_s: float, now: float) -> dict[str, str]:
    """What changes in those of a peer's request that is sent on from `home`."""
    path = (*request.path, home)
    return deadline_header(request.deadline - now) | {
        exchange.H_WAITED_MS: str(round((now - request.arrived_at) * 1000)),
        exchange.H_HELD_MS: str(round(held_s * 1000)),
        exchange.H_HOPS: str(len(path)),
        exchange.H_REGIONS: ",".join(path),
    }


def path_of(headers: Mapping[str, str]) -> tuple[RegionId, ...]:
    """The regions that a peer's request has passed, its origin first."""
    said = headers.get(exchange.H_REGIONS, headers[exchange.H_ORIGIN])
    return tuple(map(RegionId, said.split(",")))


def deadline_header(remaining_s: float) -> dict[str, str]:
    """How long there is still use for an answer."""
    return {exchange.H_DEADLINE_MS: str(max(1, round(remaining_s * 1000)))}


def handoff_headers(home: RegionId, router: RouterId, effect: Dispatch) -> dict[str, str]:
    """What work messages say of the hand-off."""
    headers = {
        exchange.H_FROM: router,
        exchange.H_HANDOFF: str(effect.handoff),
        exchange.H_PREFILL_TOKENS: str(effect.prefill_tokens),
    }
    if effect.may_queue:
        headers[exchange.H_MAY_QUEUE] = "1"
    if effect.region is not None:
        headers[exchange.H_OWNER] = home
    if effect.term is not None:
        headers[exchange.H_TERM] = str(effect.term)
    return headers
