import re

import pytest
from hypothesis import given

from schemas import exchange, subjects
from schemas.catalog import CHANNELS, Encoding
from schemas.headers import HEADERS, TRACE
from schemas.request_headers import ENGINE_HEADERS
from tests.schemas.strategies import MODELS, NAMES

ROWS = {row.name: row for rows in HEADERS.values() for row in rows}


def test_every_header_that_the_exchange_names_is_described():
    named = {value for name, value in vars(exchange).items() if name.startswith("H_")}
    of_clients = {header.on_bus for header in ENGINE_HEADERS.values()}
    assert named == set(ROWS) - {row.name for row in TRACE} - of_clients


def test_only_raw_messages_have_headers():
    assert {row.name for row in CHANNELS if row.encoding is Encoding.RAW} >= set(HEADERS)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (exchange.H_REQUEST, "r-1", "a b"),
        (exchange.H_PATH, "/v1/completions", "v1"),
        (exchange.H_DEADLINE_MS, "30000", "-1"),
        (exchange.H_BODY_INBOX, subjects.inbox("us", "r1", 7), "mesh.us.ping"),
        ("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-x"),
    ],
)
def test_a_pattern_accepts_the_good_and_refuses_the_bad(name, good, bad):
    assert re.search(ROWS[name].pattern, good)
    assert not re.search(ROWS[name].pattern, bad)


@given(MODELS, NAMES)
def test_what_we_write_matches_its_pattern(model, name):
    assert re.search(ROWS[exchange.H_MODEL].pattern, subjects.encode_model(model))
    assert re.search(ROWS[exchange.H_FROM].pattern, name)
