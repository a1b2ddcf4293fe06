"""The messages that carry a request: headers, payload, and the body in parts."""

from collections.abc import Iterator

from mesh.adapters.ticket import Ticket
from mesh.adapters.wishes import Wishes
from mesh.core.effects import Dispatch
from mesh.core.prefixes.prompt import Prompt
from mesh.core.requests.request import Request
from schemas import exchange, subjects, wire
from schemas.exchange import Priority
from schemas.ids import RegionId, RouterId
from schemas.residency import Ground, Labels, labels_text

SKETCH_BLOCKS_MAX = 2048  # 512 KiB of prompt text; enough to tell where its prefix lives


def request_headers(ticket: Ticket, attempt: int, now: float) -> dict[str, str]:
    """The headers that work and ingress messages share."""
    remaining_ms = max(1, round((ticket.deadline - now) * 1000))
    return (
        _wishes(ticket.ask.wishes)
        | _residency(ticket.ask.residency)
        | ({exchange.H_WARM: "1"} if ticket.ask.warm else {})
        | {
            exchange.H_REQUEST: ticket.ask.request_id,
            exchange.H_MODEL: subjects.encode_model(ticket.ask.model),
            exchange.H_PATH: ticket.ask.path,
            exchange.H_ATTEMPT: str(attempt),
            exchange.H_DEADLINE_MS: str(remaining_ms),
        }
    )


def way_headers(ticket: Ticket, origin: RegionId, held_s: float, now: float) -> dict[str, str]:
    """What a peer wants to know of the request's way so far; no agent does."""
    return ({exchange.H_TENANT: ticket.ask.tenant} if ticket.ask.tenant else {}) | {
        exchange.H_WAITED_MS: str(max(0, round((now - ticket.arrived_at) * 1000))),
        exchange.H_HELD_MS: str(round(held_s * 1000)),
        exchange.H_HOPS: "1",
        exchange.H_ORIGIN: origin,
    }


def _wishes(wishes: Wishes) -> dict[str, str]:
    """What its client wishes, for whoever places or serves it; nothing for nothing."""
    headers = {}
    if wishes.priority is not Priority.NORMAL:
        headers[exchange.H_PRIORITY] = wishes.priority.value
    if wishes.slo_ttft_s is not None:
        headers[exchange.H_SLO_TTFT_MS] = str(round(wishes.slo_ttft_s * 1000))
    if wishes.session is not None:
        headers[exchange.H_SESSION] = wishes.session
    return headers


def _residency(labels: Labels) -> dict[str, str]:
    return {exchange.H_RESIDENCY: labels_text(labels)} if labels else {}


def onward_headers(request: Request, home: RegionId, held_s: float, now: float) -> dict[str, str]:
    """What changes in the headers of a peer's request that is sent on from `home`."""
    path = (*request.path, home)
    return {
        exchange.H_DEADLINE_MS: str(max(1, round((request.deadline - now) * 1000))),
        exchange.H_WAITED_MS: str(max(0, round((now - request.arrived_at) * 1000))),
        exchange.H_HELD_MS: str(round(held_s * 1000)),
        exchange.H_HOPS: str(len(path)),
        exchange.H_REGIONS: ",".join(path),
    }


def ingress_subject(ground: Ground, home: RegionId, peer: RegionId, labels: Labels) -> str:
    """Where a router of `home` asks a peer: under a label that it carries, if any is wanted.

    Raises ValueError if there is none: the core chose somebody that it may not.
    """
    if not labels:
        return subjects.ingress(peer)
    carried = sorted(set(ground.sent(home, peer)).intersection(labels))
    if not carried:
        raise ValueError(f"region {peer} carries none of {labels_text(labels)}")
    return subjects.ingress_within(peer, carried[0])


def handoff_headers(home: RegionId, router: RouterId, effect: Dispatch) -> dict[str, str]:
    """The headers by which heartbeats tell routers what has been taken and what it costs.

    And by which agents know whose it is: `home` is the router's own region.
    """
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


def sketch(prompt: Prompt) -> bytes:
    """What stands in for a body too large for one ingress message."""
    return wire.encode(exchange.Sketch(prompt.tokens, prompt.hashes[:SKETCH_BLOCKS_MAX]))


def body_parts(body: bytes, inbox: str, part_bytes: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    """The body cut into messages of at most `part_bytes`, each with its headers."""
    for offset in range(0, len(body), part_bytes):
        headers = {exchange.H_BODY_INBOX: inbox, exchange.H_BODY_OFFSET: str(offset)}
        yield body[offset : offset + part_bytes], headers
