"""The messages that carry a request: headers, payload, and the body in parts."""

from collections.abc import Iterator

from mesh.adapters.ticket import Ticket
from mesh.adapters.wishes import Wishes
from mesh.core.effects import Dispatch
from mesh.core.prompt import Prompt
from schemas import exchange, subjects, wire
from schemas.exchange import Priority
from schemas.ids import RegionId, RouterId

SKETCH_BLOCKS_MAX = 2048  # 512 KiB of prompt text; enough to tell where its prefix lives


def request_headers(
    ticket: Ticket, attempt: int, hops: int, origin: RegionId, now: float
) -> dict[str, str]:
    """The headers that work and ingress messages share."""
    remaining_ms = max(1, round((ticket.deadline - now) * 1000))
    return _wishes(ticket.ask.wishes) | {
        exchange.H_REQUEST: ticket.ask.request_id,
        exchange.H_MODEL: subjects.encode_model(ticket.ask.model),
        exchange.H_PATH: ticket.ask.path,
        exchange.H_ATTEMPT: str(attempt),
        exchange.H_DEADLINE_MS: str(remaining_ms),
        exchange.H_HOPS: str(hops),
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
