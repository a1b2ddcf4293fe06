import inspect
import json
import sys
from functools import cache

import jsonschema
import pytest
from hypothesis import given

from docs.documents import HERE, JSON_SCHEMAS, documents, write
from schemas.decision import encode_decision
from schemas.state import encode_state
from tests.schemas.strategies import DECISIONS, DIGESTS, HEARTBEATS

made = cache(documents)
WRITTEN = {path: json.loads((HERE / path).read_text()) for path in JSON_SCHEMAS}


def test_what_is_committed_is_what_the_code_makes():
    for path, text in made().items():
        assert (HERE / path).read_text() == text, f"schemas/{path}: run make schemas"


@pytest.mark.parametrize("indent", ["", "    "])
def test_no_document_depends_on_the_indentation_of_docstrings(monkeypatch, indent):
    """Python 3.13 takes it away when it compiles, those before leave it."""
    described = {
        thing
        for name, module in sys.modules.items()
        if name.startswith("schemas.")
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__ == name and thing.__doc__
    }
    assert any("\n" in thing.__doc__ for thing in described)
    for thing in described:
        text = inspect.cleandoc(thing.__doc__)
        monkeypatch.setattr(thing, "__doc__", text.replace("\n", f"\n{indent}"))
    for path, text in documents().items():
        assert text == (HERE / path).read_text(), f"schemas/{path}"


def test_nothing_else_is_committed():
    kept = {str(path.relative_to(HERE)) for path in [*HERE.glob("*.yaml"), *HERE.glob("json/*")]}
    elsewhere = {"json/mesh-toml.v1.json"}  # written by infra, which knows the model
    assert kept - elsewhere == set(made())


def test_writing_writes_every_document(tmp_path):
    write(tmp_path)
    written = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.*")}
    assert written == made()


def test_every_json_schema_is_valid():
    for schema in WRITTEN.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@given(HEARTBEATS)
def test_what_agents_send_fits_the_heartbeat_schema(heartbeat):
    check("json/heartbeat.v1.json", encode_state(heartbeat))


@given(DIGESTS)
def test_what_routers_send_fits_the_digest_schema(digest):
    check("json/digest.v1.json", encode_state(digest))


@given(DECISIONS)
def test_what_clients_get_fits_the_decision_schema(decision):
    check("json/decision.v1.json", encode_decision(decision))


VALIDATORS = {path: jsonschema.Draft202012Validator(schema) for path, schema in WRITTEN.items()}


def check(path, data):
    VALIDATORS[path].validate(json.loads(data))
