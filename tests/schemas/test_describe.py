from dataclasses import dataclass

from docs.describe import components, field_texts, json_schema
from schemas.decision import Candidate, Decision
from schemas.http import ErrorBody, ErrorDetail
from schemas.state import Heartbeat


@dataclass(frozen=True)
class Sample:
    """A sample."""

    size: int
    """What it is,
    in two lines."""
    unexplained: str = "x"


def test_the_text_under_a_field_is_its_description():
    assert field_texts(Sample) == {"size": "What it is, in two lines."}
    schema = json_schema(Sample)
    assert schema["properties"]["size"]["description"] == "What it is, in two lines."
    assert "description" not in schema["properties"]["unexplained"]
    assert schema["required"] == ["size"]


def test_the_classes_inside_are_described_too():
    inner = json_schema(Decision)["$defs"]["Candidate"]["properties"]
    assert inner["pending"]["description"] == field_texts(Candidate)["pending"]


def test_a_reader_must_not_reject_fields_it_does_not_know():
    assert "additionalProperties" not in json_schema(Heartbeat)


def test_components_hold_every_class_once_under_its_name():
    found = components([ErrorBody])
    assert set(found) == {ErrorBody.__name__, ErrorDetail.__name__}
    assert found["ErrorBody"]["properties"]["error"]["$ref"] == "#/components/schemas/ErrorDetail"
