import json
from functools import cache
from pathlib import Path

import jsonschema
import msgpack
import pytest
from hypothesis import given

from docs import asyncapi
from docs.asyncapi import FRAMES, array_schema, message_names
from docs.documents import HERE
from schemas import wire
from schemas.catalog import CHANNELS, Role, channel
from schemas.exchange import Frame
from tests.schemas.strategies import wire_messages

document = cache(asyncapi.document)
OFFICIAL = Path(__file__).parents[1] / "data" / "asyncapi" / "3.0.0.json"


def follow(ref):
    node = document()
    for part in ref.removeprefix("#/").split("/"):
        node = node[part]
    return node


def references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_official_schema_accepts_the_document():
    validator = jsonschema.Draft7Validator(json.loads(OFFICIAL.read_text()))
    assert [error.message[:500] for error in validator.iter_errors(document())] == []


def test_the_official_schema_rejects_a_wrong_document():
    wrong = asyncapi.document()
    wrong["operations"]["agent.send.heartbeat"]["action"] = "shout"
    validator = jsonschema.Draft7Validator(json.loads(OFFICIAL.read_text()))
    assert not validator.is_valid(wrong)


def test_every_reference_leads_somewhere():
    for ref in references(document()):
        assert follow(ref) if ref.startswith("#/") else (HERE / ref).is_file(), ref


def test_every_row_and_role_of_the_catalog_is_there():
    made = document()
    assert {name: row["address"] for name, row in made["channels"].items()} == {
        row.name: row.template for row in CHANNELS
    }
    expected = {f"{role}.send.{row.name}" for row in CHANNELS for role in row.publish}
    expected |= {f"{role}.receive.{row.name}" for row in CHANNELS for role in row.subscribe}
    assert set(made["operations"]) == expected
    assert {key.split(".")[0] for key in expected} == set(Role)


def test_every_wire_message_has_its_array():
    described = {
        (items[0]["const"], items[1]["const"])
        for message in document()["components"]["messages"].values()
        if (items := message.get("payload", {}).get("items"))
    }
    assert described == {(tag, cls.VERSION) for tag, cls in wire.registered().items()}


def test_every_frame_kind_is_described_and_the_catalog_agrees():
    assert set(FRAMES) == set(Frame)
    assert {cls for cls in FRAMES.values() if cls} == set(channel("inbox").messages)


@given(wire_messages())
def test_what_is_sent_fits_the_document(message):
    array = msgpack.unpackb(wire.encode(message))
    jsonschema.Draft7Validator(array_schema(type(message))).validate(array)


@pytest.mark.parametrize("row", CHANNELS, ids=lambda row: row.name)
def test_every_message_of_a_channel_exists(row):
    assert set(message_names(row)) <= set(document()["components"]["messages"])
    assert message_names(row)


def test_every_parameter_of_every_subject_is_documented():
    for row in document()["channels"].values():
        assert set(row["parameters"]) == {
            part.split("}")[0] for part in row["address"].split("{")[1:]
        }
    known = {"region", "replica", "router", "stream", "label", "asker", "day", "page"}
    assert set(asyncapi.PARAMETERS) == known
