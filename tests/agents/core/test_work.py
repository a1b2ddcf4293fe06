"""Headers of work: what is readable, and what each mistake is called."""

import pytest

from agents.core.routers import HandoffNumber
from agents.core.work_message import BadWork, WorkRequest, parse_handoff, parse_work
from schemas.exchange import WINDOW_BYTES, WINDOW_BYTES_MIN
from schemas.http import RESPONSES
from schemas.response_calls import RESPONSE, ResponseCall
from schemas.response_ids import response_id

ID = response_id("us", "g0", bytes(16))
GOOD = {"Mesh-Model": "org=2Fllama", "Mesh-Path": "/v1/completions", "Mesh-Request": "r-1"}


def test_readable_work() -> None:
    assert parse_work({**GOOD, "Mesh-Deadline-Ms": "1500"}, b"{}") == WorkRequest(
        model="org/llama", path="/v1/completions", request_id="r-1", deadline_s=1.5, body_bytes=None
    )


@pytest.mark.parametrize(
    ("headers", "deadline_s"),
    [
        ({}, 600.0),
        ({"Mesh-Deadline-Ms": "0"}, 0.0),
        ({"Mesh-Deadline-Ms": "-20"}, 0.0),
        ({"Mesh-Deadline-Ms": "999999999"}, 3600.0),
    ],
)
def test_deadlines_are_bounded(headers, deadline_s) -> None:
    assert parse_work({**GOOD, **headers}, b"{}").deadline_s == deadline_s


@pytest.mark.parametrize(
    ("headers", "body", "complaint"),
    [
        ({"Mesh-Path": "/v1/load_lora_adapter?x=1"}, b"{}", "Mesh-Path"),
        ({"Mesh-Path": "/v1/completions/../x"}, b"{}", "Mesh-Path"),
        ({"Mesh-Model": ""}, b"{}", "Mesh-Model"),
        ({"Mesh-Model": "a/b"}, b"{}", "Mesh-Model"),
        ({"Mesh-Model": "ü"}, b"{}", "Mesh-Model"),
        ({"Mesh-Deadline-Ms": "soon"}, b"{}", "Mesh-Deadline-Ms"),
        ({"Mesh-Deadline-Ms": "9" * 5000}, b"{}", "Mesh-Deadline-Ms"),
        ({"Mesh-Body-Bytes": "0"}, b"", "Mesh-Body-Bytes"),
        ({"Mesh-Body-Bytes": str(32 * 1024 * 1024 + 1)}, b"", "Mesh-Body-Bytes"),
        ({"Mesh-Body-Bytes": "٣"}, b"", "Mesh-Body-Bytes"),
        ({"Mesh-Residency": "EU"}, b"{}", "Mesh-Residency"),
        ({"Mesh-Residency": ""}, b"{}", "Mesh-Residency"),
        ({}, b"", "empty body"),
        ({"Mesh-Call": "GET /metrics"}, b"", "Mesh-Call"),
        ({"Mesh-Call": f"GET /v1/responses/{ID}/../x"}, b"", "Mesh-Call"),
        ({"Mesh-Call": f"GET /v1/responses/{ID}", "Mesh-Stage": "prefill"}, b"", "Mesh-Stage"),
    ],
)
def test_unreadable_work_names_the_header(headers, body, complaint) -> None:
    with pytest.raises(BadWork, match=complaint):
        parse_work({**GOOD, **headers}, body)


def test_a_call_about_a_response_has_neither_a_body_nor_a_model() -> None:
    call = ResponseCall("GET", RESPONSE, ID, "include=x")
    headers = {**GOOD, "Mesh-Path": RESPONSES, "Mesh-Call": call.text}
    for body, more in ((b"", {}), (b'{"input":"x"}', {}), (b"", {"Mesh-Body-Bytes": "9"})):
        work = parse_work(headers | more, body)
        assert (work.call, work.path, work.model, work.body_bytes) == (call, RESPONSE, "", None)
        assert work.is_odd and not work.generates


def test_a_wild_request_id_is_left_out() -> None:
    assert parse_work({**GOOD, "Mesh-Request": "a\r\nEvil: 1"}, b"{}").request_id == ""


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Mesh-From": "r1", "Mesh-Handoff": "7"}, HandoffNumber("r1", 7)),
        ({"Mesh-From": "r1"}, None),
        ({"Mesh-From": "R 1", "Mesh-Handoff": "7"}, None),
        ({"Mesh-From": "r1", "Mesh-Handoff": "-7"}, None),
        ({}, None),
    ],
)
def test_handoffs(headers, expected) -> None:
    assert parse_handoff(headers) == expected


@pytest.mark.parametrize(
    ("headers", "first_window"),
    [
        ({}, WINDOW_BYTES),
        ({"Mesh-Window": "16384"}, 16384),
        ({"Mesh-Window": "0"}, WINDOW_BYTES_MIN),
        ({"Mesh-Window": "999999999"}, WINDOW_BYTES),
        ({"Mesh-Window": "some"}, WINDOW_BYTES),
    ],
)
def test_the_first_window_is_what_the_router_says_within_bounds(headers, first_window) -> None:
    assert parse_work({**GOOD, **headers}, b"{}").first_window == first_window
