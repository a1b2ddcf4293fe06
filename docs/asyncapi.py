"""The AsyncAPI document of the bus, made from `schemas.catalog`.

Channels are the catalog's rows, operations its roles. AsyncAPI has no field for two things, which
are in descriptions: the five bytes before each frame's payload, and msgpack, whose arrays
are given as the JSON arrays that they would be.
"""

import inspect
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from schemas import exchange
from schemas.catalog import CHANNELS, Carrier, Channel, Encoding, Role
from schemas.control import RegionControl
from schemas.exchange import Frame
from schemas.explain import RequestQuestion, RouterRequests
from schemas.headers import HEADERS, Header
from schemas.keys import RegionKeys
from schemas.limits import LimitClaims
from schemas.state import Digest, Heartbeat, Lease, OfflineState
from schemas.usage import UsagePage

VERSION = "1.0.0"

PARAMETERS = {
    "region": "Region that owns the subject.",
    "replica": "Replica, unique in its region.",
    "router": "Router, unique in its region.",
    "label": "Residency label that the region carries.",
    "day": "As YYYY-MM-DD, by UTC.",
    "page": "Of accounts: the epoch of its writer in hexadecimal, and its number.",
    "asker": "Region of the router that asks.",
    "stream": "Number of one answer, chosen by the router that waits for it.",
}

# What people read has its own JSON Schema file; the others are described in place.
FILES: dict[type[Any], str] = {
    Heartbeat: "json/heartbeat.v1.json",
    Digest: "json/digest.v1.json",
    Lease: "json/lease.v1.json",
    RegionControl: "json/control.v1.json",
    RegionKeys: "json/keys.v1.json",
    OfflineState: "json/offline.v1.json",
    RequestQuestion: "json/request-question.v1.json",
    RouterRequests: "json/router-requests.v1.json",
    UsagePage: "json/usage.v1.json",
    LimitClaims: "json/limits.v1.json",
}

# Payload of each frame kind: the class of its name, and of WORKING who works; DATA is raw bytes.
FRAMES: dict[Frame, type[Any] | None] = {
    kind: getattr(exchange, kind.name.title().replace("_", ""), None) for kind in Frame
} | {Frame.WORKING: exchange.Placed}

ABOUT = (
    "Every subject's second token is the region that owns it: permissions and leaf-link "
    "allow-lists are written with that token. Each region has its own NATS server; regions are "
    "joined pairwise by leaf links. A message of content type application/msgpack is an array "
    "[tag, version, field, …]."
)

ABOUT_FRAME = (
    "Byte 0: frame kind {kind!r}. Bytes 1 to 4: number of the frame in this answer, big-endian, "
    "from 0. Then {rest}."
)

_BARE = {
    Frame.DATA: "the engine's bytes as they came",
    Frame.HELD: "nothing",
}

_JSON_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    str: {"type": "string"},
    float: {"type": "number"},
    tuple[int, ...]: {"type": "array", "items": {"type": "integer"}},
    tuple[str, ...]: {"type": "array", "items": {"type": "string"}},
}


def document() -> dict[str, Any]:
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "The bus of the mesh",
            "version": VERSION,
            "description": ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {row.name: _channel(row) for row in CHANNELS},
        "operations": {
            f"{role}.{action}.{row.name}": _operation(row, role, action)
            for row in CHANNELS
            for role in Role
            for action, roles in (("send", row.publish), ("receive", row.subscribe))
            if role in roles
        },
        "components": {"messages": _messages()},
    }


def message_names(row: Channel) -> list[str]:
    """The messages of a channel, by their names in the document."""
    if row.encoding is Encoding.FRAMES:
        return [f"frame{_camel(kind)}" for kind in FRAMES]
    if row.encoding is Encoding.RAW:
        return [row.name, *(cls.__name__ for cls in row.messages)]
    return [cls.__name__ for cls in row.messages]


def array_schema(cls: type[Any]) -> dict[str, Any]:
    """A wire message as the JSON array that its msgpack array would be."""
    hints = get_type_hints(cls)
    items: list[dict[str, Any]] = [
        {"const": cls.TAG, "title": "tag"},
        {"const": cls.VERSION, "title": "version"},
        *({**_JSON_TYPES[hints[field.name]], "title": field.name} for field in fields(cls)),
    ]
    required = 2 + sum(field.default is MISSING for field in fields(cls))
    return {"type": "array", "items": items, "minItems": required, "additionalItems": True}


def _channel(row: Channel) -> dict[str, Any]:
    carried = f"Carried by {row.carrier}"
    if row.queue:
        carried += f", queue group `{row.queue}`"
    return {
        "address": row.template,
        "title": row.name,
        "description": f"{row.about} {carried}.",
        "messages": {name: _ref("components", "messages", name) for name in message_names(row)},
        "parameters": {
            name: {"description": about}
            for name, about in PARAMETERS.items()
            if f"{{{name}}}" in row.template
        },
    }


def _operation(row: Channel, role: Role, action: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "action": action,
        "channel": _ref("channels", row.name),
        "messages": [_ref("channels", row.name, "messages", name) for name in message_names(row)],
    }
    if row.queue and action == "receive":
        operation["bindings"] = {"nats": {"queue": row.queue, "bindingVersion": "0.1.0"}}
    # A ping is answered with its bytes, and people's questions to an inbox that the server makes.
    if row.carrier is Carrier.REQUEST and row.name not in ("ping", "requests"):
        operation["reply"] = {"channel": _ref("channels", "inbox")}
    return operation


def _messages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in CHANNELS:
        for cls in () if row.encoding is Encoding.FRAMES else row.messages:
            found[cls.__name__] = _message(cls)
        if row.encoding is Encoding.RAW:
            found[row.name] = _raw_message(row)
    return found | {f"frame{_camel(kind)}": _frame(kind, cls) for kind, cls in FRAMES.items()}


def _message(cls: type[Any]) -> dict[str, Any]:
    file = FILES.get(cls)
    return {
        "title": cls.__name__,
        "contentType": Encoding.JSON.value if file else Encoding.MSGPACK.value,
        "description": _first_line(cls),
        "payload": {"$ref": file} if file else array_schema(cls),
    }


def _raw_message(row: Channel) -> dict[str, Any]:
    message: dict[str, Any] = {
        "title": row.name,
        "contentType": row.encoding.value,
        "description": "Bytes as they came.",
    }
    if row.name in HEADERS:
        message["headers"] = _headers(HEADERS[row.name])
    return message


def _headers(rows: tuple[Header, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            row.name: {
                "type": "string",
                "pattern": row.pattern,
                "maxLength": row.chars_max,
                "description": row.about,
            }
            for row in rows
        },
        "required": [row.name for row in rows if row.required],
    }


def _frame(kind: Frame, cls: type[Any] | None) -> dict[str, Any]:
    rest = f"the msgpack array of {cls.__name__}" if cls else _BARE[kind]
    message: dict[str, Any] = {
        "title": f"frame {kind.name}",
        "contentType": Encoding.FRAMES.value,
        "description": ABOUT_FRAME.format(kind=chr(kind), rest=rest),
    }
    if cls:
        message["description"] += f" {_first_line(cls)}"
        message["payload"] = array_schema(cls)
    return message


def _camel(kind: Frame) -> str:
    return kind.name.title().replace("_", "")


def _first_line(cls: type[Any]) -> str:
    # Python 3.13 takes a docstring's indentation away, those before leave it.
    return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _ref(*path: str) -> dict[str, str]:
    return {"$ref": "#/" + "/".join(path)}
