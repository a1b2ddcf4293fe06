import json

import pytest

from schemas import http
from schemas.engine_routes import ENGINE_PATHS
from schemas.engine_shapes import EngineAnswer
from schemas.http import Fault, error_body, error_event, error_headers
from schemas.response_calls import METHODS
from schemas.routes import ROUTES


@pytest.mark.parametrize("fault", Fault)
def test_an_error_has_openais_shape(fault):
    error = json.loads(error_body(fault, "name the remedy", param="model"))["error"]
    assert error == {
        "message": "name the remedy",
        "type": fault.value.type,
        "param": "model",
        "code": fault.value.code,
    }


def test_an_error_event_is_one_whole_event():
    event = error_event(Fault.ENGINE_FAILED, "line one\nline two")
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2, "a line break in the message must not end the event"


@pytest.mark.parametrize("fault", Fault)
def test_only_errors_that_may_pass_have_a_retry_after(fault):
    headers = error_headers(fault, retry_after_s=0)
    assert headers.get("retry-after") == ("1" if fault.value.status in (429, 503) else None)


def test_who_goes_by_the_status_is_told_what_no_repeat_mends():
    told = {fault for fault in Fault if error_headers(fault).get("x-should-retry") == "false"}
    lasting = Fault.KEYS_WRONG, Fault.BATCH_OVER, Fault.STORE_FULL, Fault.TOO_LATE, Fault.DEADLINE
    assert told == set(lasting)
    assert {fault.value.status for fault in told} <= {409, 429, 504, 507}


def test_a_code_names_one_fault():
    codes = [fault.value.code for fault in Fault]
    assert len(set(codes)) == len(codes)


def test_a_path_has_one_row():
    places = [(route.method, route.path) for route in ROUTES]
    assert len(set(places)) == len(places)
    answers = http.Answer, http.Embeddings, EngineAnswer
    asked = {route.path for route in ROUTES if route.answer in answers}
    assert asked == ENGINE_PATHS | METHODS.keys()
    calls = {route.path: set() for route in ROUTES if route.path in METHODS}
    for route in ROUTES:
        calls.get(route.path, set()).add(route.method)
    assert calls == {path: set(methods) for path, methods in METHODS.items()}
