"""Calls about a response, as text: every one comes back, and nothing else is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.response_calls import (
    CALL_CHARS_MAX,
    METHODS,
    QUERY_CHARS_MAX,
    QUERY_PATTERN,
    RESPONSE,
    RESPONSE_CANCEL,
    RESPONSE_INPUT,
    ResponseCall,
    is_query,
    parse_call,
)
from schemas.response_ids import CHARS_MAX, response_id

ID = response_id("us", "us-0", bytes(16))
LONGEST = response_id("r" * 32, "g" * 32, bytes(16), "acme")
ALL = [(method, path) for path, methods in METHODS.items() for method in methods]


@given(
    st.sampled_from(ALL),
    st.sampled_from([ID, LONGEST]),
    st.from_regex(QUERY_PATTERN, fullmatch=True).filter(lambda text: len(text) < QUERY_CHARS_MAX),
)
def test_a_call_comes_back(of, name, query):
    call = ResponseCall(*of, name, query)
    assert parse_call(call.text) == call


def test_its_target_is_what_the_engine_is_asked():
    assert ResponseCall("GET", RESPONSE, ID).target == f"/v1/responses/{ID}"
    listing = ResponseCall("GET", RESPONSE_INPUT, ID, "limit=3")
    assert listing.target == f"/v1/responses/{ID}/input_items?limit=3"
    assert ResponseCall("POST", RESPONSE_CANCEL, ID).text == f"POST /v1/responses/{ID}/cancel"


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"POST /v1/responses/{ID}",
        f"GET /v1/responses/{ID}/cancel",
        f"DELETE /v1/responses/{ID}/input_items",
        f"GET /v1/responses/{ID}/",
        f"GET /v1/responses/{ID}/../../metrics",
        f"GET /v1/responses/{ID}\r\nX-Evil: 1",
        f"GET /v1/responses/{ID}\n",
        f"GET /v1/responses/{ID} HTTP/1.1",
        f"GET /v1/responses/{ID}?a b",
        f"GET /v1/responses/{ID}?a#b",
        f"GET /v1/responses/{ID}?é",
        f"GET  /v1/responses/{ID}",
        "GET /v1/responses/resp_1",
        "GET /v1/responses/",
        "GET /metrics",
        "POST /v1/load_lora_adapter",
        "get /v1/responses/" + ID,
    ],
)
def test_nothing_else_is_a_call(text):
    with pytest.raises(ValueError, match="no call about a response"):
        parse_call(text)


def test_ids_and_queries_have_limits():
    assert len(LONGEST) <= CHARS_MAX
    assert is_query("a" * QUERY_CHARS_MAX) and not is_query("a" * (QUERY_CHARS_MAX + 1))
    longest = ResponseCall("GET", RESPONSE_INPUT, LONGEST, "a" * QUERY_CHARS_MAX)
    assert parse_call(longest.text) == longest
    with pytest.raises(ValueError):
        parse_call(longest.text + "a" * (CALL_CHARS_MAX - len(longest.text) + 1))
    with pytest.raises(ValueError):
        parse_call(f"GET /v1/responses/{response_id('r' * 33, 'g', bytes(16))}")
