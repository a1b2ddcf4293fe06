"""The headers of raw messages: what each bus header means and what it may hold.

Work, ingress and body messages carry a client's bytes untouched, so NATS headers
describe them. The names are constants in `schemas.exchange`; here each gets its meaning and its
form, for the AsyncAPI document and for readers of the bus.
"""

import re
from dataclasses import dataclass, replace
from functools import cache

from schemas import exchange
from schemas.ids import MODEL_CHARS_MAX, NAME_PATTERN, OWNER_PATTERN, REQUEST_ID_PATTERN
from schemas.kv_transfer import (
    ADDRESS_CHARS_MAX,
    ADDRESS_PATTERN,
    PARAMS_BYTES_MAX,
    ROOM_PATTERN,
    KvRole,
)
from schemas.request_headers import ENGINE_HEADERS
from schemas.residency import TEXT_CHARS_MAX
from schemas.response_calls import CALL_CHARS_MAX, CALL_PATTERN
from schemas.subjects import INBOX_ROOT

_NAME = NAME_PATTERN.removeprefix("^").removesuffix("$")
COUNT_PATTERN = r"^[0-9]+$"
MODEL_TOKEN_PATTERN = r"^([A-Za-z0-9_-]|=[0-9A-F]{2})+$"
LABELS_PATTERN = r"^[a-z0-9-]{1,32}(,[a-z0-9-]{1,32})*$"
INBOX_PATTERN = rf"^{INBOX_ROOT}\.[^.]+\.[^.]+\.[^.]+$"


@dataclass(frozen=True, slots=True)
class Header:
    """One header. Header values are ASCII text: a count is decimal digits.

    `chars_max`: what is longer is refused, before its pattern is looked at.
    """

    name: str
    pattern: str
    about: str
    required: bool = True
    chars_max: int = 512

    def fits(self, text: str) -> bool:
        """Whether it may be the header's value."""
        return len(text) <= self.chars_max and bool(_compiled(self.pattern).fullmatch(text))


_compiled = cache(re.compile)


def _optional(*headers: Header) -> tuple[Header, ...]:
    return tuple(replace(header, required=False) for header in headers)


TRACE = _optional(
    Header(
        "traceparent",
        r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
        "W3C trace context of the span that sent this.",
    ),
    Header("tracestate", r"^[\t -~]*$", "W3C trace state."),
)

REQUEST = (
    Header(exchange.H_REQUEST, REQUEST_ID_PATTERN, "Request id."),
    Header(
        exchange.H_MODEL,
        MODEL_TOKEN_PATTERN,
        "Model name; every byte outside A-Z a-z 0-9 _ - is written =XX.",
        chars_max=3 * 4 * MODEL_CHARS_MAX,  # UTF-8 takes four bytes at most
    ),
    Header(exchange.H_PATH, r"^/.+$", "HTTP path at the engine."),
    Header(exchange.H_ATTEMPT, COUNT_PATTERN, "Placement attempt, 1 for the first."),
    Header(exchange.H_DEADLINE_MS, COUNT_PATTERN, "Milliseconds left when sent."),
    *_optional(
        Header(
            exchange.H_BODY_BYTES,
            COUNT_PATTERN,
            "Size of a body that is to be fetched in parts; the message's own payload is not the "
            "body.",
        ),
        Header(
            exchange.H_WINDOW,
            r"^[0-9]{4,6}$",
            "Over a link: so many bytes of the answer may be sent before the first credit; later "
            "as many as were credited, up to 262144.",
        ),
        Header(
            exchange.H_PRIORITY,
            rf"^({'|'.join(exchange.Priority)})$",
            "Which requests go first; normal when missing.",
        ),
        Header(
            exchange.H_SLO_TTFT_MS,
            COUNT_PATTERN,
            "Milliseconds from its arrival after which its client has no use for a first token.",
        ),
        Header(
            exchange.H_SESSION,
            exchange.SESSION_PATTERN,
            "Whose conversation it is part of, as its client names it; a hash where that is long.",
        ),
        Header(
            exchange.H_RESIDENCY,
            LABELS_PATTERN,
            "Labels, one of which the place that computes it must carry; anywhere when missing.",
            chars_max=TEXT_CHARS_MAX,
        ),
        Header(
            exchange.H_ADD_USAGE,
            r"^1$",
            "It asks for a stream without token counts: the agent may ask for them in "
            "`stream_options`, and takes their event out of the answer.",
        ),
        Header(
            exchange.H_KEEPER,
            NAME_PATTERN,
            "The replica, of the region that is asked, which keeps the response that it goes on "
            "with.",
        ),
        Header(
            exchange.H_CALL,
            CALL_PATTERN,
            "What is asked about a response that the keeper keeps: method and target. Then there "
            "is no body, and the model is not read.",
            chars_max=CALL_CHARS_MAX,
        ),
        Header(
            exchange.H_CONTINUES,
            r"^1$",
            "What another engine said of its answer is its last message, which is to be gone on "
            "with: for an agent whose kind of engine can.",
        ),
        Header(
            exchange.H_OFFLINE,
            r"^1$",
            "A line of a batch job: computed with what online requests leave, and given back when "
            "they need it.",
        ),
        *(
            Header(each.on_bus, each.pattern, each.about, chars_max=each.chars_max)
            for each in ENGINE_HEADERS.values()
        ),
    ),
)

# Of requests that come from another region, and to it.
FORWARDED = (
    *_optional(
        Header(
            exchange.H_WAITED_MS,
            COUNT_PATTERN,
            "Milliseconds since it arrived at its client's router; 0 when missing.",
        ),
        Header(
            exchange.H_HELD_MS,
            COUNT_PATTERN,
            "Milliseconds of these that it was held in queues, not being tried; all when missing.",
        ),
    ),
    Header(exchange.H_HOPS, COUNT_PATTERN, "Regions passed so far: 1, or more from older routers."),
    Header(exchange.H_ORIGIN, NAME_PATTERN, "Region whose client asks."),
    *_optional(
        Header(
            exchange.H_TENANT,
            OWNER_PATTERN,
            "The tenant whose API key its client gave, or the mark of a key on no list: its prompt "
            "shares prefixes with no other's.",
        ),
        Header(exchange.H_KEY_ID, NAME_PATTERN, "The id of that key."),
    ),
)

# Channel name → headers of its messages.
HEADERS: dict[str, tuple[Header, ...]] = {
    "work": (
        *REQUEST,
        *_optional(*FORWARDED),
        Header(exchange.H_FROM, NAME_PATTERN, "The router that handed off."),
        Header(
            exchange.H_HANDOFF,
            COUNT_PATTERN,
            "Its running number: the heartbeat's `taken` has the last one.",
        ),
        Header(
            exchange.H_PREFILL_TOKENS,
            COUNT_PATTERN,
            "Prompt tokens to be computed, by the router's estimate of what is cached.",
        ),
        *_optional(
            Header(
                exchange.H_TERM,
                COUNT_PATTERN,
                "Term of the lease by which its region owns the replica; an agent that knows of a "
                "higher one refuses an adopter's work.",
            ),
            Header(
                exchange.H_OWNER,
                NAME_PATTERN,
                "The router's region, where it is not the replica's own: it has adopted the "
                "replica.",
            ),
            Header(
                exchange.H_MAY_QUEUE,
                r"^1$",
                "Take it though other work is pending, up to the agent's cap.",
            ),
            Header(
                exchange.H_STAGE,
                rf"^({'|'.join(KvRole)})$",
                "The stage of the request that the engine computes; all of it when missing.",
            ),
            Header(
                exchange.H_KV_PARAMS,
                r"^\{[ -~]*\}$",
                "Of a decode stage after a prefill stage: the object that the prefill engine "
                "answered, as JSON.",
                chars_max=PARAMS_BYTES_MAX,
            ),
            Header(
                exchange.H_KV_ROOM,
                ROOM_PATTERN,
                "A random number that both stages of one attempt have.",
            ),
            Header(
                exchange.H_KV_PREFILL,
                ADDRESS_PATTERN,
                "Where the prefill engine's KV cache is fetched.",
                chars_max=ADDRESS_CHARS_MAX,
            ),
            Header(
                exchange.H_KV_DECODE,
                ADDRESS_PATTERN,
                "Where the decode engine's KV cache is written.",
                chars_max=ADDRESS_CHARS_MAX,
            ),
        ),
        *TRACE,
    ),
    "ingress": (*REQUEST, *FORWARDED, *TRACE),
    "offline": (*REQUEST, *FORWARDED, *TRACE),
    "body": (
        Header(exchange.H_BODY_INBOX, INBOX_PATTERN, "Answer inbox of the request it belongs to."),
        Header(exchange.H_BODY_OFFSET, COUNT_PATTERN, "Byte position of this part in the body."),
    ),
}
