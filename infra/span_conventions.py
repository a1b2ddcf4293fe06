"""Names of spans and attributes by OpenTelemetry's semantic conventions.

HTTP (stable), messaging, NATS and GenAI (in development, as of 1.41):
https://opentelemetry.io/docs/specs/semconv/. What they have no name for begins with `mesh.`.
"""

from collections.abc import Mapping

from schemas import subjects
from schemas.http import CHAT, COMPLETIONS
from schemas.response_calls import RESPONSE

Attribute = str | int | float | bool
Attributes = dict[str, Attribute]

OPERATION, PROVIDER, MODEL = "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"
STREAM, FIRST_CHUNK_S = "gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"
METHOD, ROUTE, STATUS = "http.request.method", "http.route", "http.response.status_code"
URL_PATH, URL_SCHEME = "url.path", "url.scheme"
ADDRESS, PORT = "server.address", "server.port"
ERROR_TYPE = "error.type"
PORT_DIGITS_MAX = 5

MESH = "mesh"  # the provider, where the engine is not known
WORK_TEMPLATE = subjects.work("{region}", "{replica}")
INGRESS_TEMPLATE = subjects.ingress("{region}")
INGRESS_WITHIN_TEMPLATE = subjects.ingress_within("{region}", "{label}")
PUBLISH, PROCESS = "publish", "process"
_TYPES = {PUBLISH: "send", PROCESS: "process"}
_OPERATIONS: Mapping[str, str] = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    RESPONSE: "responses",
}
SERVER_ERROR = 500


def operation(path: str) -> str:
    """What a request of that path asks of a model, e.g. `chat`."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2]


def asked_of_model(path: str, model: str, provider: str) -> Attributes:
    """What every span of a model's work has; the span's name is made of the first and the last."""
    return {OPERATION: operation(path), PROVIDER: provider, MODEL: model}


def tokens(prompt: int, cached: int, completion: int) -> Attributes:
    """Token counts of an answer. Those below 0 are not known, and left out."""
    counts = {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.usage.output_tokens": completion,
    }
    return {name: count for name, count in counts.items() if count >= 0}


def message(action: str, subject: str, template: str) -> Attributes:
    """Of a span that publishes or processes one message; `{action} {template}` names it.

    `subject`: empty where it is not known."""
    about: Attributes = {
        "messaging.system": "nats",
        "messaging.operation.name": action,
        "messaging.operation.type": _TYPES[action],
        "messaging.destination.template": template,
    }
    if subject:
        about["messaging.destination.name"] = subject
    return about


def server(host: str) -> Attributes:
    """Of an HTTP request with this Host header; empty where it has none, or none that is ASCII."""
    if not host.isascii():
        return {}
    name, colon, port = host.rpartition(":")
    is_port = port.isdecimal() and len(port) <= PORT_DIGITS_MAX
    if colon and is_port and not name.endswith(":"):
        return {ADDRESS: name, PORT: int(port)}
    return {ADDRESS: host} if host else {}
