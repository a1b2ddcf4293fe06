"""What this version sends, the last release reads, and the reverse: every message of the bus.

The last release's `schemas` run in a process of their own, straight from the kept wheel. JSON
messages are made from their own schemas, so a field that is added later is tried here at once.
"""

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import schemas
from schemas import wire
from schemas.wire import WireError
from tests.schemas.strategies import wire_messages
from tests.schemas.test_golden import holds
from tests.upgrade import codec
from tests.upgrade.fleet import WHEEL

ITEMS_MAX = 3
TEXT_MAX = 20


class LastRelease:
    """Its codec, as a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.spoken: dict[str, Any] = self._answer()

    def again(self, kind: str, data: bytes) -> bytes:
        """What it makes of a message; fails if it can't read it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {data.hex()}\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert "error" not in answer, (answer, data)
        return bytes.fromhex(answer["data"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastRelease]:
    process = subprocess.Popen(
        [sys.executable, codec.__file__],
        cwd=tmp_path_factory.mktemp("last"),
        env={**os.environ, "PYTHONPATH": str(WHEEL)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        found = LastRelease(process)
        assert found.spoken["file"].startswith(str(WHEEL))
        yield found
    finally:
        process.kill()
        process.communicate()


@given(message=wire_messages())
@settings(max_examples=300)
def test_wire_messages_are_read_by_both(last: LastRelease, message: Any):
    assume(type(message).__name__ in {name for name, _ in last.spoken["tags"].values()})
    sent = wire.encode(message)
    returned = last.again("wire", sent)
    fields, known = msgpack.unpackb(sent), msgpack.unpackb(returned)
    assert known == fields[: len(known)]
    read = wire.encode(wire.decode(returned))
    assert msgpack.unpackb(read)[: len(known)] == known


@pytest.mark.parametrize("kind", codec.JSON_MESSAGES)
def test_json_messages_are_read_by_both(last: LastRelease, kind: str):
    home, name, _ = codec.JSON_MESSAGES[kind]
    schema = TypeAdapter(getattr(codec.module(home), name)).json_schema()

    @given(value=values(schema, schema.get("$defs", {})))
    @settings(max_examples=100)
    def reads(value: Any) -> None:
        try:
            sent = codec.again(kind, json.dumps(value).encode())
        except WireError:  # of rules that a schema has no words for
            assume(False)
        later = json.loads(sent) | {"of_a_later_version": [1]}
        returned = last.again(kind, json.dumps(later).encode())
        assert holds(json.loads(sent), json.loads(returned))
        read = codec.again(kind, returned)
        assert holds(json.loads(read), json.loads(returned))

    reads()


# The last release does not know them: they are tried from the next one on.
NEW = {"claims", "keys", "page"}


def test_every_message_in_json_is_tried():
    decoders = {
        name.removeprefix("decode_")
        for module in pkgutil.iter_modules(schemas.__path__)
        for name, _ in inspect.getmembers(codec.module(module.name), inspect.isfunction)
        if name.startswith("decode_")
    }
    assert decoders - {"json", "as", "model"} - NEW == set(codec.JSON_MESSAGES)


RETIRED = ("schemas.exchange.H_WARM",)  # of warm-ups: what it said must never mean anything else


@pytest.mark.parametrize("what", ["subjects", "frames", "tags", "headers"])
def test_nothing_of_the_last_release_has_another_name_or_is_gone(last: LastRelease, what: str):
    now, before = json.loads(json.dumps(codec.spoken()[what])), last.spoken[what]
    gone = {name: before[name] for name in RETIRED if name in before}
    kept = {name: spoken for name, spoken in before.items() if name not in gone}
    assert {name: now.get(name) for name in kept} == kept
    assert not set(gone) & set(now)
    assert all(spoken not in now.values() for spoken in gone.values())
    assert len(before) > 5


def values(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Anything that a JSON schema as pydantic writes it allows, small."""
    if "$ref" in schema:
        return values(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return st.one_of([values(one, defs) for one in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "type" not in schema:
        return _ANYTHING
    return _BY_TYPE[schema["type"]](schema, defs)


def _integers(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.integers(schema.get("minimum", 0), schema.get("maximum", 2**53))


def _numbers(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.floats(
        schema.get("minimum", 0.0),
        schema.get("maximum", 1e9),
        exclude_min="exclusiveMinimum" in schema,
    )


def _strings(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    if pattern := schema.get("pattern"):
        return st.from_regex(re.compile(pattern.removesuffix("$") + r"\Z", re.ASCII)).filter(
            lambda text: len(text) <= schema.get("maxLength", 64)
        )
    longest = min(TEXT_MAX, schema.get("maxLength", TEXT_MAX))
    return st.text(
        st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=longest
    )


def _arrays(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.lists(values(schema["items"], defs), max_size=ITEMS_MAX)


def _objects(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        [(pattern, one)] = schema.get("patternProperties", {None: None}).items()
        named = {"pattern": pattern} if pattern else schema.get("propertyNames", {})
        one = one or schema["additionalProperties"]
        return st.dictionaries(_strings(named, defs), values(one, defs), max_size=ITEMS_MAX)
    fields = {name: values(one, defs) for name, one in schema["properties"].items()}
    required = set(schema.get("required", ()))
    return st.fixed_dictionaries(
        {name: one for name, one in fields.items() if name in required},
        optional={name: one for name, one in fields.items() if name not in required},
    )


_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), _strings({}, {})),
    lambda inner: st.one_of(
        st.lists(inner, max_size=ITEMS_MAX),
        st.dictionaries(_strings({}, {}), inner, max_size=ITEMS_MAX),
    ),
    max_leaves=ITEMS_MAX,
)
_BY_TYPE = {
    "integer": _integers,
    "number": _numbers,
    "string": _strings,
    "boolean": lambda schema, defs: st.booleans(),
    "null": lambda schema, defs: st.none(),
    "array": _arrays,
    "object": _objects,
}
