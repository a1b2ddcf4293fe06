"""JSON Schemas of our dataclasses, with the texts under their fields.

pydantic can read those texts itself, but then every router and agent would parse its own source
at start; here only the build of the documents does.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

DIALECT = "https://json-schema.org/draft/2020-12/schema"
COMPONENT = "#/components/schemas/{model}"


class Untitled(GenerateJsonSchema):
    """Titles made from field names ("Batch Max") say nothing that the name does not."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """A self-contained JSON Schema of a dataclass; reading is lenient, so extra fields pass."""
    schema = TypeAdapter(cls).json_schema(schema_generator=Untitled)
    for name, part in {**schema.get("$defs", {}), cls.__name__: schema}.items():
        _describe(part, _dataclasses_of(cls).get(name))
    return {"$schema": DIALECT, **schema}


def components(classes: Iterable[type[Any]]) -> dict[str, Any]:
    """The schemas of several dataclasses by name, with references as OpenAPI writes them."""
    wanted = list(classes)
    _, found = TypeAdapter.json_schemas(
        [(cls.__name__, "validation", TypeAdapter(cls)) for cls in wanted],
        ref_template=COMPONENT,
        schema_generator=Untitled,
    )
    schemas: dict[str, Any] = found["$defs"]
    known = {name: kind for cls in wanted for name, kind in _dataclasses_of(cls).items()}
    for name, part in schemas.items():
        _describe(part, known.get(name))
    return dict(sorted(schemas.items()))


def field_texts(cls: type[Any]) -> dict[str, str]:
    """Field name → the text under it in the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    texts = {}
    for statement, after in pairwise(body):
        text = _text(after)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and text:
            texts[statement.target.id] = " ".join(text.split())
    return texts


def _text(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _describe(schema: dict[str, Any], cls: type[Any] | None) -> None:
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    if cls is not None:
        for name, text in field_texts(cls).items():
            schema["properties"][name]["description"] = text


def _dataclasses_of(cls: type[Any]) -> dict[str, type[Any]]:
    """The dataclasses of the module of `cls`: the only ones its fields use."""
    members = vars(inspect.getmodule(cls)).items()
    return {name: kind for name, kind in members if isinstance(kind, type) and is_dataclass(kind)}
