"""The OpenAPI document of the HTTP face, made from `schemas.http`."""

from collections.abc import Sequence
from typing import Any

from docs.describe import COMPONENT, components
from schemas import http
from schemas.batch import Purpose
from schemas.batch_http import BATCHES_LISTED, BATCHES_MAX, FILES_MAX, FileUpload
from schemas.engine_routes import GENERATING_PATHS, error_form
from schemas.engine_shapes import AnthropicError, EngineAnswer
from schemas.exchange import BODY_BYTES_MAX, SLO_MS_MAX, Priority
from schemas.headers import LABELS_PATTERN
from schemas.http import Answer, ErrorForm, Fault
from schemas.ids import NAME_PATTERN, REQUEST_ID_PATTERN
from schemas.response_calls import METHODS
from schemas.routes import FORMS, ROUTES, Route

VERSION = "1.0.0"
JSON = "application/json"
EVENTS = "text/event-stream"
FORM = "multipart/form-data"
FORM_ABOUT = "The file may have `file_mib_max` MiB of mesh.toml's `[batch]`, 512 by default."

ABOUT = (
    "OpenAI's API in front of every replica of the mesh, the same in every region. Request bodies "
    "pass to the engine as they came, and answers come back byte for byte; an answer with a "
    "status that is not listed is the engine's own."
)

ABOUT_STREAM = (
    "OpenAI's server-sent events, as the engine sends them. A stream that breaks after its first "
    'token ends with one event `data: {"error": {…}}` and no `data: [DONE]`.'
)

REQUEST_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    http.H_REQUEST_ID: (
        "Names the request in answers, logs and traces. One is made when it is missing, and "
        "instead of one that does not match the pattern, which is no error: the answer's header "
        "of this name has the one that holds.",
        {"type": "string", "pattern": REQUEST_ID_PATTERN},
    ),
    http.H_DEBUG: (
        f"`1` asks for the decision receipt in {http.H_DECISION}.",
        {"type": "string", "enum": ["0", "1"], "default": "0"},
    ),
    http.H_TIMEOUT_S: (
        "Seconds after which the client waits no more for the answer.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    http.H_PRIORITY: (
        "Which requests go first when not all can.",
        {"type": "string", "enum": [each.value for each in Priority], "default": "normal"},
    ),
    http.H_SLO_TTFT_MS: (
        "Milliseconds after which a first token is of no use: a request that clearly can't make "
        "it is shed at once instead of held.",
        {"type": "integer", "minimum": 1, "maximum": SLO_MS_MAX},
    ),
    http.H_SESSION: (
        "Names the conversation that the request is part of. Without it the first of these does: "
        f"the body's `{http.SESSION_FIELD}`, "
        f"{', '.join(f'`{each}`' for each in http.SESSION_HEADERS)}, the body's `user`.",
        {"type": "string", "minLength": 1},
    ),
    http.H_RESIDENCY: (
        "Labels, comma-separated: the request goes only where one of them is carried, or nowhere. "
        "They narrow what the API key and the region allow, and never widen it. A second line of "
        "this header, as of any other that the router acts on, is a 400.",
        {"type": "string", "pattern": LABELS_PATTERN},
    ),
}

NEAR_ABOUT = (
    f"Where the client is, as `latitude,longitude` in degrees; the header {http.H_CLIENT_LOCATION} "
    "is used without it. Regions come by great-circle distance then."
)
NEAR_PARAMETERS: list[dict[str, Any]] = [
    {"name": name, "in": place, "description": NEAR_ABOUT,
     "schema": {"type": "string", "examples": ["52.5,13.4"]}}
    for name, place in ((http.NEAR, "query"), (http.H_CLIENT_LOCATION, "header"))
]  # fmt: skip

WHOLE = {"type": "string", "pattern": "^[0-9]+$"}
LIMIT_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    http.H_LIMIT_REQUESTS: (
        "Of the caller's limits on requests, the one of which the least is left; where it has any.",
        WHOLE,
    ),
    http.H_REMAINING_REQUESTS: ("What is left of it.", WHOLE),
    http.H_RESET_REQUESTS: ("Until all of it is there again, as `6m0s`.", {"type": "string"}),
    http.H_LIMIT_TOKENS: ("Likewise of limits on tokens.", WHOLE),
    http.H_REMAINING_TOKENS: ("What is left of it.", {"type": "string", "pattern": "^-?[0-9]+$"}),
    http.H_RESET_TOKENS: ("Until all of it is there again.", {"type": "string"}),
}
ANSWER_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    http.H_REQUEST_ID: (
        "Name of the request: the client's own where it matches the pattern, else a new one.",
        {"type": "string", "pattern": REQUEST_ID_PATTERN},
    ),
    http.H_REGION: (
        "Region whose replica answered; where none did, the region asked.",
        {"type": "string", "pattern": NAME_PATTERN},
    ),
    http.H_DECISION: (
        f"Why that replica: json/decision.v1.json, when {http.H_DEBUG} asked for it.",
        {"type": "string", "contentMediaType": JSON},
    ),
    http.H_RETRY_AFTER: ("Seconds to wait before the next try.", {"type": "integer", "minimum": 1}),
    http.H_SHOULD_RETRY: (
        "`false` where the same request would be refused again.",
        {"type": "string", "enum": ["false"]},
    ),
    **LIMIT_HEADERS,
}


# Headers of every answer, whatever its status.
ALWAYS = (http.H_REQUEST_ID, http.H_REGION)


RESIDENCY_ONLY = (http.H_REQUEST_ID, http.H_RESIDENCY)  # that a batch obeys
ORDERS = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
AFTER = {"type": "string"}
QUERIES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "retrieveResponse": {
        "include": ("What else the answer is to have; the engine's.", {"type": "string"}),
        "stream": ("Kept responses are not streamed again.", {"enum": [False]}),
    },
    "listInputItems": {
        "limit": ("Most items; the engine's.", {"type": "integer", "minimum": 1}),
        "order": ("By their place in the input; the engine's.", ORDERS),
        "after": ("Only items behind the one of this id; the engine's.", AFTER),
        "include": ("What else the items are to have; the engine's.", {"type": "string"}),
    },
    "listFiles": {
        "purpose": ("Only files of this purpose.", {"enum": [each.value for each in Purpose]}),
        "limit": ("Most files.", {"type": "integer", "minimum": 1, "maximum": FILES_MAX,
                                  "default": FILES_MAX}),
        "order": ("By the time they were made.", ORDERS),
        "after": ("Only files behind the one of this id.", AFTER),
    },
    "listBatches": {
        "limit": ("Most batches.", {"type": "integer", "minimum": 1, "maximum": BATCHES_MAX,
                                    "default": BATCHES_LISTED}),
        "after": ("Only batches older than the one of this id.", AFTER),
    },
}  # fmt: skip
PATH_PARAMETERS = {
    "model": "Model name; its slashes need no escape.",
    "response_id": "As createResponse gives it.",
    "file_id": "As uploads and lists give it.",
    "batch_id": "As createBatch and lists give it.",
}
RANGE_PARAMETERS: list[dict[str, Any]] = [
    {"name": http.H_RANGE, "in": "header", "schema": {"type": "string"},
     "description": "One range of bytes, like `bytes=1000-`; the answer to several is the whole."},
    {"name": http.H_IF_RANGE, "in": "header", "schema": {"type": "string"},
     "description": "The etag of the part that is there already: another file is sent whole."},
]  # fmt: skip
IDEMPOTENCY_PARAMETER: dict[str, Any] = {
    "name": http.H_IDEMPOTENCY_KEY, "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": http.IDEMPOTENCY_KEY_CHARS_MAX},
    "description": "Requests of one tenant with the same key make one file, or one batch.",
}  # fmt: skip
DOWNLOAD_HEADERS = {
    http.H_ETAG: {"description": "Names these bytes.", "schema": {"type": "string"}},
    http.H_ACCEPT_RANGES: {"description": "`bytes`.", "schema": {"type": "string"}},
}
CONTENT_RANGE = {
    "description": "Which bytes, and of how many.", "schema": {"type": "string"}
}  # fmt: skip


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "The HTTP face of the mesh",
            "version": VERSION,
            "description": ABOUT,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components(_shapes()),
            "parameters": {
                name: {"name": name, "in": "header", "description": about, "schema": schema}
                for name, (about, schema) in REQUEST_HEADERS.items()
            },
            "headers": {
                name: {"description": about, "schema": schema}
                for name, (about, schema) in ANSWER_HEADERS.items()
            },
        },
    }


def _shapes() -> list[type[Any]]:
    shapes = (shape for route in ROUTES for shape in (route.request, route.answer))
    named = (shape for shape in shapes if isinstance(shape, type))
    return list(dict.fromkeys((http.ErrorBody, AnthropicError, *named)))


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.about,
        "parameters": _parameters(route),
    }
    if route.request is not None:
        is_form = route.request in FORMS
        about = f"At most {BODY_BYTES_MAX} bytes."
        operation["requestBody"] = {
            "required": True,
            "description": FORM_ABOUT if route.request is FileUpload else about,
            "content": {FORM if is_form else JSON: {"schema": _shape(route.request)}},
        }
    operation["responses"] = {"200": _answer(route)} | _errors(route)
    if route.path == http.FILE_CONTENT:
        part = _answer(route)
        part["headers"] |= {http.H_CONTENT_RANGE: CONTENT_RANGE}
        operation["responses"]["206"] = part
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = [http.H_REQUEST_ID]
    is_work = route.request is not None or route.path in METHODS
    if is_work and route.request is not FileUpload:
        names = list(RESIDENCY_ONLY if route.path == http.BATCHES else REQUEST_HEADERS)
    found: list[dict[str, Any]] = [_ref("parameters", name) for name in names]
    for name, about in PATH_PARAMETERS.items():
        if f"{{{name}}}" in route.path:
            found.append({"name": name, "in": "path", "required": True, "description": about,
                          "schema": {"type": "string"}})  # fmt: skip
    for name, (about, schema) in QUERIES.get(route.name, {}).items():
        found.append({"name": name, "in": "query", "description": about, "schema": schema})
    if route.name in ("createFile", "createBatch"):
        found.append(IDEMPOTENCY_PARAMETER)
    if route.path == http.FILE_CONTENT:
        found += RANGE_PARAMETERS
    if route.path == http.REGIONS:
        found += NEAR_PARAMETERS
    return found


def _answer(route: Route) -> dict[str, Any]:
    if not isinstance(route.answer, type):
        more = DOWNLOAD_HEADERS if route.path == http.FILE_CONTENT else {}
        return {
            "description": route.about,
            "headers": _headers(ALWAYS) | more,
            "content": {route.answer: {"schema": {"type": "string"}}},
        }
    content: dict[str, Any] = {JSON: {"schema": _shape(route.answer)}}
    headers = list(ALWAYS)
    if Fault.RATE_LIMITED in route.faults:
        headers += LIMIT_HEADERS
    if route.answer is Answer or (route.answer is EngineAnswer and _generates(route.path)):
        content[EVENTS] = {"schema": {"type": "string", "description": ABOUT_STREAM}}
        headers.append(http.H_DECISION)
    return {"description": route.about, "headers": _headers(headers), "content": content}


def _errors(route: Route) -> dict[str, Any]:
    form = error_form(route.path)
    shape: type[Any] = AnthropicError if form is ErrorForm.ANTHROPIC else http.ErrorBody
    statuses = sorted({fault.value.status for fault in route.faults})
    return {str(status): _error([f for f in route.faults if f.value.status == status], shape)
            for status in statuses}  # fmt: skip


def _error(faults: list[Fault], shape: type[Any]) -> dict[str, Any]:
    headers = list(ALWAYS)
    if any(fault.value.retry_after for fault in faults):
        headers.append(http.H_RETRY_AFTER)
    if any(fault.value.in_vain for fault in faults):
        headers.append(http.H_SHOULD_RETRY)
    if Fault.RATE_LIMITED in faults:
        headers += LIMIT_HEADERS
    return {
        "description": " ".join(f"`{fault.value.code}`: {fault.value.about}" for fault in faults),
        "headers": _headers(headers),
        "content": {JSON: {"schema": _shape(shape)}},
    }


def _generates(path: str) -> bool:
    return path in GENERATING_PATHS


def _headers(names: Sequence[str]) -> dict[str, Any]:
    return {name: _ref("headers", name) for name in names}


def _shape(cls: type[Any]) -> dict[str, str]:
    return {"$ref": COMPONENT.format(model=cls.__name__)}


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}
