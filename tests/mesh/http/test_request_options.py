"""Wishes of a client: what headers and body may say, and what is refused by name."""

import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.adapters.refused import RequestRefused
from mesh.http.read_request import (
    DEFAULT_OPTIONS,
    RequestOptions,
    parsed_request,
    read_fields,
    read_options,
)
from schemas.exchange import SESSION_PATTERN, SLO_MS_MAX, Priority
from schemas.http import (
    CHAT,
    H_DEBUG,
    H_PRIORITY,
    H_RESIDENCY,
    H_SESSION,
    H_SLO_TTFT_MS,
    MESSAGES,
    SESSION_FIELD,
    SESSION_HEADERS,
    Fault,
)
from schemas.ids import RequestId


def test_a_request_without_options():
    assert (
        read_options({}, {"model": "m"})
        == DEFAULT_OPTIONS
        == RequestOptions(Priority.NORMAL, None, None, "")
    )


@pytest.mark.parametrize("priority", Priority)
def test_every_priority_is_read(priority):
    assert read_options({H_PRIORITY: priority.value}, {}).priority is priority


@pytest.mark.parametrize(("given", "seconds"), [("1", 0.001), ("250", 0.25), ("3600000", 3600.0)])
def test_an_objective_is_seconds_inside(given, seconds):
    assert read_options({H_SLO_TTFT_MS: given}, {}).slo_ttft_s == seconds


@pytest.mark.parametrize("given", ["", "HIGH", "urgent", " high", "1"])
def test_an_unknown_priority_is_refused_with_those_there_are(given):
    with pytest.raises(RequestRefused, match="high, normal or low") as caught:
        read_options({H_PRIORITY: given}, {})
    assert (caught.value.fault, caught.value.param) == (Fault.INVALID, H_PRIORITY)


@pytest.mark.parametrize(
    "given", ["", "0", "-1", "1.5", "1e3", "soon", "inf", "3600001", "9" * 5000, "\u0661"]
)
def test_an_objective_that_is_none_is_refused(given):
    with pytest.raises(RequestRefused, match=f"from 1 to {SLO_MS_MAX}") as caught:
        read_options({H_SLO_TTFT_MS: given}, {})
    assert (caught.value.fault, caught.value.param) == (Fault.INVALID, H_SLO_TTFT_MS)


@pytest.mark.parametrize(("given", "debug"), [("1", True), ("0", False)])
def test_a_receipt_is_asked_for_with_a_1(given, debug):
    assert read_options({H_DEBUG: given}, {}).debug is debug


@pytest.mark.parametrize("given", ["", "true", "yes", "2", "01", " 1"])
def test_another_way_to_ask_for_a_receipt_is_refused_and_told_the_right_one(given):
    with pytest.raises(RequestRefused, match=f"{H_DEBUG} must be 1") as caught:
        read_options({H_DEBUG: given}, {})
    assert (caught.value.fault, caught.value.param) == (Fault.INVALID, H_DEBUG)


def test_the_header_names_the_session_before_the_body_does():
    assert read_options({H_SESSION: "a"}, {"user": "b"}).session == "a"
    assert read_options({}, {"user": "b"}).session == "b"
    assert read_options({H_SESSION: ""}, {"user": "b"}).session == "b"


def test_a_session_has_the_first_name_that_clients_gave_it():
    """What Codex, OpenCode and Claude Code send by themselves; `user` may have several sessions."""
    headers = {name: str(number) for number, name in enumerate(SESSION_HEADERS)}
    fields = {SESSION_FIELD: "key", "user": "me"}
    names = []
    assert read_options({H_SESSION: "own", **headers}, fields).session == "own"
    names.append(read_options(headers, fields).session)
    fields.pop(SESSION_FIELD)
    for name in SESSION_HEADERS:
        names.append(read_options(headers, fields).session)
        del headers[name]
    names.append(read_options(headers, fields).session)
    assert names == ["key", "0", "1", "2", "3", "4", "me"]
    assert read_options({SESSION_HEADERS[0]: ""}, {SESSION_FIELD: ""}).session is None


@pytest.mark.parametrize(
    ("path", "headers", "more"),
    [
        (CHAT, {}, {SESSION_FIELD: "s" * 9000}),
        *((MESSAGES, {name: "s" * 9000}, {}) for name in SESSION_HEADERS),
    ],
)
def test_a_name_of_any_length_is_read_of_a_whole_request_and_kept_short(path, headers, more):
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **more}
    data = orjson.dumps(body)
    request = parsed_request(path, headers, data, read_fields(path, data), RequestId("r"))
    assert request.options.session == read_options({H_SESSION: "s" * 9000}, {}).session
    assert len(request.options.session) == 32


@pytest.mark.parametrize("odd", [None, 7, "", ["x"], {"id": 1}])
def test_fields_that_are_no_text_are_left_to_the_engine(odd):
    assert read_options({}, {"user": odd, "cache_salt": odd, SESSION_FIELD: odd}) == DEFAULT_OPTIONS


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_session_fits_a_header_and_different_ones_stay_different(one, other):
    sessions = [read_options({}, {"user": text}).session for text in (one, other, one)]
    assert all(re.fullmatch(SESSION_PATTERN, session) for session in sessions)
    assert sessions[0] == sessions[2]
    assert (sessions[0] == sessions[1]) == (one == other)


def test_the_salt_is_the_body_s():
    assert read_options({}, {"cache_salt": "tenant-1"}).salt == "tenant-1"


def test_the_labels_that_it_wants_are_read_in_one_order():
    assert read_options({H_RESIDENCY: "eu, de"}, {}).residency == ("de", "eu")


@pytest.mark.parametrize("given", ["", "EU", "eu,,de", "*", "eu.de", "x" * 2000])
def test_labels_that_are_none_are_refused(given):
    with pytest.raises(RequestRefused, match=H_RESIDENCY) as caught:
        read_options({H_RESIDENCY: given}, {})
    assert (caught.value.fault, caught.value.param) == (Fault.INVALID, H_RESIDENCY)


def test_a_salt_too_long_to_keep_is_known_by_its_hash():
    """Chains of the last tenants are kept by salt: of 32 MiB each, they would be gigabytes."""
    one, other = ("a" * 10_000_000 + end for end in "bc")
    salts = [read_options({}, {"cache_salt": salt}).salt for salt in (one, other, one)]
    assert salts[0] == salts[2] != salts[1]
    assert max(map(len, salts)) <= 256
