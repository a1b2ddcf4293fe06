import json
from functools import cache

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from docs.openapi import LIMIT_HEADERS, document
from schemas.http import Fault, Model, ModelList, error_body
from schemas.routes import ROUTES

made = cache(document)


def validator(name):
    schema = {"$ref": f"#/components/schemas/{name}", "components": made()["components"]}
    return jsonschema.Draft202012Validator(schema)


def test_the_document_is_openapi_3_1():
    assert list(OpenAPIV31SpecValidator(made()).iter_errors()) == []


def test_every_route_is_there():
    paths = made()["paths"]
    documented = {(method.upper(), path) for path, row in paths.items() for method in row}
    assert documented == {(route.method, route.path) for route in ROUTES}


@pytest.mark.parametrize("fault", Fault)
def test_an_error_is_as_documented(fault):
    validator("ErrorBody").validate(json.loads(error_body(fault, "why")))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_fault_of_a_route_is_documented_with_its_code(route):
    responses = made()["paths"][route.path][route.method.lower()]["responses"]
    for fault in route.faults:
        documented = responses[str(fault.value.status)]
        assert f"`{fault.value.code}`" in documented["description"]
        assert ("retry-after" in documented["headers"]) == any(
            other.value.retry_after for other in route.faults
            if other.value.status == fault.value.status
        )  # fmt: skip
        if fault is Fault.RATE_LIMITED:
            good = responses["200"]
            assert set(LIMIT_HEADERS) <= set(documented["headers"]) & set(good["headers"])


@pytest.mark.parametrize(
    ("body", "good"),
    [
        ({"model": "m", "messages": [{"role": "user", "content": "hi"}]}, True),
        ({"model": "m", "messages": [], "stream": True, "top_p": 0.5}, True),
        ({"model": "m"}, False),
        ({"model": "", "messages": []}, False),
        ({"model": "m", "messages": "hi"}, False),
        ({"model": "m", "messages": [], "stream": "yes"}, False),
        ([], False),
    ],
)
def test_the_chat_request_accepts_the_good_and_refuses_the_bad(body, good):
    assert validator("ChatRequest").is_valid(body) is good


@pytest.mark.parametrize(
    ("prompt", "good"),
    [("hi", True), (["a", "b"], True), ([1, 2, 3], True), ([[1, 2], [3]], True), (5, False)],
)
def test_the_completion_request_accepts_the_good_and_refuses_the_bad(prompt, good):
    body = {"model": "m", "prompt": prompt}
    assert validator("CompletionRequest").is_valid(body) is good


def test_the_model_list_is_what_openais_clients_read():
    listed = {"object": "list", "data": [{"id": "m", "object": "model", "created": 0,
                                          "owned_by": "mesh"}]}  # fmt: skip
    validator("ModelList").validate(listed)
    assert ModelList(data=(Model(id="m"),)).data[0].object == "model"
