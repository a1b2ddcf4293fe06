"""Writes the documents in `schemas` anew from the code: `make schemas`.

The code is the source and the documents are its readable form, because a document that is
written by hand agrees with the code on the day it is written. A test compares the two.
"""

import json
from pathlib import Path
from typing import Any

import yaml

import schemas
from docs import asyncapi, openapi
from docs.describe import json_schema
from schemas.control import RegionControl
from schemas.decision import Decision
from schemas.explain import RequestQuestion, RouterRequests
from schemas.keys import RegionKeys
from schemas.limits import LimitClaims
from schemas.state import Digest, Heartbeat, Lease, OfflineState
from schemas.usage import UsagePage

HERE = Path(schemas.__file__).parent
JSON_SCHEMAS: dict[str, type[Any]] = {
    "json/heartbeat.v1.json": Heartbeat,
    "json/digest.v1.json": Digest,
    "json/decision.v1.json": Decision,
    "json/lease.v1.json": Lease,
    "json/control.v1.json": RegionControl,
    "json/keys.v1.json": RegionKeys,
    "json/offline.v1.json": OfflineState,
    "json/request-question.v1.json": RequestQuestion,
    "json/router-requests.v1.json": RouterRequests,
    "json/usage.v1.json": UsagePage,
    "json/limits.v1.json": LimitClaims,
}
NOTE = "# Made by `make schemas` from the code; edit that.\n"


def documents() -> dict[str, str]:
    """Path below schemas/ → its content."""
    texts = {path: json_text(json_schema(cls)) for path, cls in JSON_SCHEMAS.items()}
    texts["asyncapi.yaml"] = NOTE + _yaml_text(asyncapi.document())
    texts["openapi.yaml"] = NOTE + _yaml_text(openapi.document())
    return texts


def json_text(document: dict[str, Any]) -> str:
    """A JSON document as it is kept in files."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write(folder: Path = HERE) -> None:
    """Write every document into `folder`."""
    for path, text in documents().items():
        target = folder / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")


class _Plain(yaml.SafeDumper):
    """No anchors: a reader should not have to look elsewhere in the file."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml_text(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, width=100, allow_unicode=True)


if __name__ == "__main__":
    write()
