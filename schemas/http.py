"""The HTTP face as data: routes, headers, request and answer shapes, errors.

The router serves what is defined here and `docs.openapi` documents it. Requests are OpenAI's.
The router reads the few fields that it needs and passes the body on as it came, so the engine
decides what other fields mean; answers are the engine's bytes. Only errors, the model list and
the probes are the router's own words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import ConfigDict, Field

from schemas.exchange import BODY_BYTES_MAX
from schemas.failed_response import NOTHING_SENT, Sent, response_failed
from schemas.ids import ValidModelId, ValidRegionId
from schemas.numbers import Count, Seconds
from schemas.state import Health, Ratio

H_REQUEST_ID = "x-request-id"
OWN_PREFIX = "x-mesh-"  # what begins so is known, or refused
H_DEBUG = "x-mesh-debug"
H_TIMEOUT_S = "x-mesh-timeout-s"
H_PRIORITY = "x-mesh-priority"
H_SLO_TTFT_MS = "x-mesh-slo-ttft-ms"
H_SESSION = "x-mesh-session"
# What names a conversation where H_SESSION does not, the first that is given: the body's field of
# OpenAI's API and of Codex, headers of Codex, OpenCode and Claude Code, and at last the body's
# `user`, who may have several.
SESSION_FIELD = "prompt_cache_key"
SESSION_HEADERS = (
    *("session-id", "thread-id", "x-session-affinity", "x-session-id"),
    "x-claude-code-session-id",
)
H_RESIDENCY = "x-mesh-residency"
H_AUTHORIZATION = "authorization"
H_API_KEY = "x-api-key"  # Anthropic's clients send their key so
H_REGION = "x-mesh-region"
H_CLIENT_LOCATION = "x-mesh-client-location"
NEAR = "near"  # a query with the same content
H_DECISION = "x-mesh-decision"
H_RETRY_AFTER = "retry-after"
H_LIMIT_REQUESTS = "x-ratelimit-limit-requests"
H_LIMIT_TOKENS = "x-ratelimit-limit-tokens"
H_REMAINING_REQUESTS = "x-ratelimit-remaining-requests"
H_REMAINING_TOKENS = "x-ratelimit-remaining-tokens"
H_RESET_REQUESTS = "x-ratelimit-reset-requests"
H_RESET_TOKENS = "x-ratelimit-reset-tokens"
H_WWW_AUTHENTICATE = "www-authenticate"
H_EXPECT = "expect"
H_ORIGIN = "origin"
H_ALLOW_ORIGIN = "access-control-allow-origin"
H_REQUEST_METHOD = "access-control-request-method"
H_REQUEST_HEADERS = "access-control-request-headers"
H_BUFFERING = "x-accel-buffering"  # `no`: an nginx in between passes each event at once
H_ALLOW = "allow"  # of a 405 (RFC 9110, 15.5.6)
H_RANGE = "range"
H_IF_RANGE = "if-range"
H_ETAG = "etag"
H_ACCEPT_RANGES = "accept-ranges"
H_CONTENT_RANGE = "content-range"
H_SHOULD_RETRY = "x-should-retry"  # OpenAI's and Anthropic's clients obey it
H_RETRY_COUNT = "x-stainless-retry-count"  # of OpenAI's clients: how often this was sent before
H_IDEMPOTENCY_KEY = "idempotency-key"
IDEMPOTENCY_KEY_CHARS_MAX = 255

# Of a request, those that the router acts on: more than one line of any is a 400.
ONCE_ONLY = (
    H_RESIDENCY,
    H_AUTHORIZATION,
    H_API_KEY,
    H_PRIORITY,
    H_SLO_TTFT_MS,
    H_TIMEOUT_S,
    H_SESSION,
    H_DEBUG,
    H_CLIENT_LOCATION,
)

DONE_LINES = (b"data: [DONE]", b"data:[DONE]")  # the last event of a stream, without its end
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"  # Anthropic's
COUNT_TOKENS = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
# Of OpenAI's API, not served, and looking like that of one response; Anthropic's has none such.
UNSERVED = ("/v1/responses/compact", "/v1/responses/input_tokens")
STREAMED_PATHS = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))  # as events, where asked to
RERANK = "/v1/rerank"
SCORE = "/v1/score"
CLASSIFY = "/classify"
POOLING = "/pooling"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
MODELS = "/v1/models"
MODEL = "/v1/models/{model}"
FILES = "/v1/files"
FILE = "/v1/files/{file_id}"
FILE_CONTENT = "/v1/files/{file_id}/content"
BATCHES = "/v1/batches"
BATCH = "/v1/batches/{batch_id}"
BATCH_CANCEL = "/v1/batches/{batch_id}/cancel"
REGIONS = "/v1/regions"
HEALTH = "/health"
READY = "/ready"
METRICS = "/metrics"

JSON_LINES = "application/jsonl"
OWNER = "mesh"  # of models whose engines name none


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion, as OpenAI defines it. Every other field passes to the engine untouched."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    messages: tuple[dict[str, Any], ...]
    stream: bool | None = None
    user: Any = None
    """Names the session where the header `x-mesh-session` does not."""
    cache_salt: Any = None
    """vLLM's: prompts share prefixes only with those of the same salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A text completion, as OpenAI defines it. Every other field passes to the engine untouched."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    prompt: str | tuple[str | int | tuple[int, ...], ...]
    stream: bool | None = None
    user: Any = None
    """Names the session where the header `x-mesh-session` does not."""
    cache_salt: Any = None
    """vLLM's: prompts share prefixes only with those of the same salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Texts, or prompts of token ids, as OpenAI defines it. Every other field passes to the engine
    untouched."""

    __pydantic_config__ = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    input: str | tuple[str | int | tuple[int, ...], ...]
    user: Any = None
    """Names the session where the header `x-mesh-session` does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The engine's answer, byte for byte: a vector for each input."""

    __pydantic_config__ = ConfigDict(extra="allow")

    data: tuple[dict[str, Any], ...]
    usage: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The engine's answer, byte for byte; OpenAI's objects where the engine's API is OpenAI's."""

    __pydantic_config__ = ConfigDict(extra="allow")

    choices: tuple[dict[str, Any], ...]
    usage: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model that some ready replica of the mesh serves, and what its engine reports of it."""

    id: str
    object: Literal["model"] = "model"
    created: Count = 0
    owned_by: str = OWNER
    root: str | None = None
    """What was loaded: a name or a path."""
    parent: str | None = None
    """The model that an adapter was made for."""
    max_model_len: Count | None = None
    """Most tokens of prompt and answer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """Every model that can be asked for here."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """Degrees on the globe."""

    lat: Annotated[float, Field(ge=-90, le=90)]
    lon: Annotated[float, Field(ge=-180, le=180)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the asked router places requests."""

    policy: str
    """In force, with its options."""
    ordered: tuple[str, ...]
    """Keys of `[routing]` that hold by an operator's order, not by mesh.toml."""
    refused: str | None
    """Why it does not follow the last order; null if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region as the asked router sees it. Null is what it does not know."""

    name: ValidRegionId
    home: bool
    """Whether it is the asked router's own."""
    health: Health
    """Green: its digests arrive as they should. Yellow: some are missing. Red: none arrive, or, of
    the own region, the bus is away."""
    heard_s: Seconds | None
    """Seconds since the last digest of any of its routers; null at home and before the first."""
    rtt_s: Seconds | None
    """Round trip over the bus: median of the last pings, smoothed; 0 at home."""
    jitter_s: Seconds | None
    """Mean change from one round trip to the next (RFC 3550), in seconds."""
    loss_ratio: Ratio | None
    """Part of the last pings that did not come back."""
    accepting: bool
    """Whether any of its routers takes requests."""
    replicas_ready: Count
    replicas_free: Count
    """Ready and not full."""
    queue: Count
    """Requests held there."""
    models: tuple[ValidModelId, ...]
    """What its ready replicas serve."""
    endpoint: str | None
    """Base URL for clients, as mesh.toml names it."""
    location: Location | None
    """Where it is, by mesh.toml."""
    routing: Routing | None
    """Of the own region: how this router places requests; null of peers."""
    distance_km: Annotated[float, Field(ge=0)] | None
    """Great circle to the location asked about; null if none was, or the region has none."""
    rtt_estimate_s: Seconds | None
    """The round trip over that distance, by light in cables: for an order, not for a promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionList:
    """Every region, the nearest first."""

    object: Literal["list"] = "list"
    data: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Requests can be placed; well, or not well yet."""

    status: Literal["ready"] = "ready"
    warm: bool
    """Whether this router knows what the replicas of its region hold, or is the only router."""
    warm_for_s: float | None = None
    """Seconds since then."""
    warmed_by: str | None = None
    """The router of this region that sent it that state; null for one that was alone."""
    problem: str | None = None
    """What should be mended though requests are placed; null if nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetail:
    """What went wrong and what to do about it."""

    message: str
    type: str
    param: str | None = None
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An error in OpenAI's shape, so that OpenAI's clients raise the right exception."""

    error: ErrorDetail


class FaultKind(NamedTuple):
    """How one kind of error looks to a client."""

    status: int
    type: str
    code: str
    about: str
    retry_after: bool = False
    in_vain: bool = False
    """Whether the same request would be refused again, though its status alone (408, 409, 429, 5xx)
    has clients repeat it: they are told not to."""


BAD, LIMITED, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"
FORBIDDEN = "permission_error"


class Fault(Enum):
    """Every error that the router itself answers with. Engines' own errors pass as they come."""

    INVALID = FaultKind(400, BAD, "invalid_request", "This is not a request: the message says why.")
    RESIDENCY = FaultKind(
        403,
        FORBIDDEN,
        "residency",
        "No region that can be asked from here carries a wanted label, or the labels, the key's "
        "and the region's have none in common. The request went nowhere, and never will.",
    )
    MODEL_UNKNOWN = FaultKind(
        404, BAD, "model_not_found", "No replica serves the model; names the known ones."
    )
    PATH_UNSERVED = FaultKind(
        404, BAD, "path_not_served", "Replicas serve the model, and none answers this path."
    )
    PATH_UNKNOWN = FaultKind(404, BAD, "path_not_found", "No such path.")
    METHOD_WRONG = FaultKind(405, BAD, "method_not_allowed", "Wrong method for the path.")
    STATE_GONE = FaultKind(
        400,
        BAD,
        "previous_response_not_found",
        "No replica keeps the response or conversation that it builds on. Send the whole input.",
    )
    RESPONSE_UNKNOWN = FaultKind(404, BAD, "response_not_found", "No replica keeps it.")
    REQUEST_TIMEOUT = FaultKind(
        408, BAD, "request_timeout", "The request's headers or body arrive too slowly."
    )
    BODY_TOO_LARGE = FaultKind(
        413, BAD, "body_too_large", f"The body has more than {BODY_BYTES_MAX} bytes."
    )
    ENCODING = FaultKind(
        415, BAD, "unsupported_encoding", "The body's `content-encoding` is not one that is taken."
    )
    UPGRADE = FaultKind(
        426, BAD, "upgrade_required", "Websockets are not served: ask again over plain HTTP/1.1."
    )
    EXPECTATION = FaultKind(
        417, BAD, "expectation_failed", "The header `expect` knows `100-continue` only."
    )
    KEY_MISSING = FaultKind(
        401,
        BAD,
        "api_key_missing",
        "It needs an API key: wherever mesh.toml requires one; where it lists some, for files and "
        "batches, which belong to the holder of a key.",
    )
    KEY_WRONG = FaultKind(
        401, BAD, "invalid_api_key", "Keys are required, and this one is unknown, or over."
    )
    KEY_FORBIDDEN = FaultKind(
        403, FORBIDDEN, "key_not_allowed", "The key is right, and not for this: the message says."
    )
    KEYS_UNREAD = FaultKind(
        503,
        BROKEN,
        "api_keys_unread",
        "Keys are required, and the router has not read those of its bus yet.",
        retry_after=True,
    )
    KEYS_WRONG = FaultKind(
        429,
        LIMITED,
        "too_many_wrong_keys",
        "Too many wrong keys came from this address. Right ones are served all the same.",
        retry_after=True,
        in_vain=True,
    )
    NO_BATCH = FaultKind(
        404, BAD, "batch_not_configured", "This region has no batch runners; says what to set."
    )
    FILE_UNKNOWN = FaultKind(
        404, BAD, "file_not_found", "No file of this id, or none of this API key's tenant."
    )
    BATCH_UNKNOWN = FaultKind(
        404, BAD, "batch_not_found", "No batch of this id, or none of this API key's tenant."
    )
    BATCH_OVER = FaultKind(
        409, BAD, "batch_over", "A batch that has ended can't be cancelled.", in_vain=True
    )
    FILE_TOO_LARGE = FaultKind(
        413, BAD, "file_too_large", "The file is larger than `file_mib_max` of mesh.toml."
    )
    RANGE_WRONG = FaultKind(416, BAD, "range_not_satisfiable", "The file ends before that range.")
    BATCHES_FULL = FaultKind(
        429,
        LIMITED,
        "too_many_batches",
        "As many batches are under way as `jobs_max` of mesh.toml allows, or their store is full.",
        retry_after=True,
    )
    TRANSFERS_FULL = FaultKind(
        429,
        LIMITED,
        "too_many_transfers",
        "As many uploads, downloads or lists are under way in this router as may be.",
        retry_after=True,
    )
    STORE_AWAY = FaultKind(
        503,
        BROKEN,
        "store_unavailable",
        "The region's store of files and batches does not answer.",
        retry_after=True,
    )
    STORE_FULL = FaultKind(
        507,
        BROKEN,
        "store_full",
        "There is no room for the file; what is stored is kept.",
        in_vain=True,
    )
    HEADERS_TOO_LARGE = FaultKind(431, BAD, "headers_too_large", "Too many header bytes.")
    SATURATED = FaultKind(
        429,
        LIMITED,
        "saturated",
        "Every replica is full and the hold queue is, too, or it moves too slowly.",
        retry_after=True,
    )
    TOO_LATE = FaultKind(
        429,
        LIMITED,
        "objective_missed",
        "There is no room in time for the request's `x-mesh-slo-ttft-ms`, or for the objective of "
        "its model.",
        retry_after=True,
        in_vain=True,
    )
    RATE_LIMITED = FaultKind(
        429,
        LIMITED,
        "rate_limit_exceeded",
        "The key, or its tenant, has used up one of its limits; says which.",
        retry_after=True,
    )
    INTERNAL = FaultKind(500, BROKEN, "internal_error", "A fault of the router's own.")
    ENGINE_FAILED = FaultKind(
        502, BROKEN, "engine_failed", "Engines failed to answer on every attempt."
    )
    NO_REPLICA = FaultKind(
        503,
        BROKEN,
        "no_replica",
        "No replica that serves the model, and carries a wanted label, is ready at present.",
        retry_after=True,
    )
    OVERLOADED = FaultKind(
        503,
        BROKEN,
        "overloaded",
        "The router has no room for more connections, or can start no process for a large body; "
        "in `/ready`, for more bytes of requests.",
        retry_after=True,
    )
    DRAINING = FaultKind(503, BROKEN, "draining", "The router is shutting down.", retry_after=True)
    DEADLINE = FaultKind(
        504, BROKEN, "deadline_exceeded", "The request's time is up.", in_vain=True
    )


COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
ERROR_TEXT_CHARS_MAX = 2000


class ErrorForm(Enum):
    """Whose shape an error has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"  # OpenAI's, and an event of its own at the end of a stream


ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(
    fault: Fault, message: str, param: str | None = None, form: ErrorForm = ErrorForm.OPENAI
) -> bytes:
    """The JSON of an error. `message` says what to do; `param` names the field at fault."""
    kind = fault.value
    if form is ErrorForm.ANTHROPIC:
        return orjson.dumps(anthropic_error(kind.status, message))
    detail = ErrorDetail(message=message, type=kind.type, param=param, code=kind.code)
    return orjson.dumps(ErrorBody(error=detail))


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """An error in Anthropic's shape, so that Anthropic's clients raise the right exception."""
    other = "invalid_request_error" if status < 500 else "api_error"
    detail = {"type": ANTHROPIC_TYPES.get(status, other), "message": message}
    return {"type": "error", "error": detail}


def error_event(
    fault: Fault,
    message: str,
    form: ErrorForm = ErrorForm.OPENAI,
    sent: Sent = NOTHING_SENT,
) -> bytes:
    """The event that ends a stream which broke after its first token; no `[DONE]` follows it.

    `sent`: what the client was sent; an event of Responses goes on from there.
    """
    if form is ErrorForm.RESPONSES:
        return response_failed(sent, orjson.loads(error_body(fault, message))["error"])
    name = b"event: error\n" if form is ErrorForm.ANTHROPIC else b""
    return name + b"data: " + error_body(fault, message, form=form) + b"\n\n"


def engine_error_event(
    status: int, body: bytes, form: ErrorForm = ErrorForm.OPENAI, sent: Sent = NOTHING_SENT
) -> bytes:
    """An engine's answer of that status, where the client was promised a stream before it came: the
    engine's words, in the shape of an error of the API."""
    try:
        said = orjson.loads(body)
    except ValueError:
        said = None
    fields = said if isinstance(said, dict) else {}
    error = fields.get("error", fields)
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        words = error if isinstance(error, str) else fields.get("detail")
        text = words if isinstance(words, str) else body.decode("utf-8", "replace")
        message = f"the engine answered {status}: {text[:ERROR_TEXT_CHARS_MAX]}"
        error = {"message": message, "type": BAD if status < 500 else BROKEN, "code": status}
    if form is ErrorForm.RESPONSES:
        return response_failed(sent, error)
    if form is ErrorForm.OPENAI:
        return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
    if fields.get("type") != "error":
        fields = anthropic_error(status, error["message"])
    return b"event: error\ndata: " + orjson.dumps(fields) + b"\n\n"


def keep_alive_event(form: ErrorForm = ErrorForm.OPENAI) -> bytes:
    """What keeps a silent stream alive: readers of events pass over comments (WHATWG HTML, 9.2.6),
    those of Messages over the API's own `ping`."""
    return PING if form is ErrorForm.ANTHROPIC else COMMENT


def error_headers(fault: Fault, retry_after_s: int = 1) -> Mapping[str, str]:
    """The headers that go with an error's status."""
    found = {H_RETRY_AFTER: str(max(1, retry_after_s))} if fault.value.retry_after else {}
    return found | {H_SHOULD_RETRY: "false"} if fault.value.in_vain else found
