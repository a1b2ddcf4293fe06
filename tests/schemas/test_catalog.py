import inspect
import re

import pytest

from schemas import subjects, wire
from schemas.catalog import CHANNELS, Carrier, Encoding, Role, channel

# What takes subjects apart or is only a part of one.
NO_CHANNEL = {
    "inbox_prefix",
    "inboxes",
    "everything",
    "parse_inbox",
    "ingress_label",
    "owner",
    "encode_model",
    "decode_model",
}


def test_every_subject_builder_has_a_row():
    functions = {
        name: inspect.unwrap(made) for name, made in vars(subjects).items() if callable(made)
    }
    builders = {
        name
        for name, made in functions.items()
        if inspect.isfunction(made) and made.__module__ == subjects.__name__
    }
    assert {row.name for row in CHANNELS} == builders - NO_CHANNEL


def test_every_wire_message_travels_on_some_channel():
    carried = {cls for row in CHANNELS for cls in row.messages}
    assert set(wire.registered().values()) <= carried


@pytest.mark.parametrize("row", CHANNELS, ids=lambda row: row.name)
def test_a_row_is_what_its_builder_makes(row):
    names = re.findall(r"{(\w+)}", row.template)
    builder = getattr(subjects, row.name)
    assert row.subject(**{name: name.upper() for name in names}) == builder(*map(str.upper, names))


@pytest.mark.parametrize("row", CHANNELS, ids=lambda row: row.name)
def test_a_row_fits_together(row):
    assert row.publish and row.subscribe, "a publisher and a subscriber"
    assert row.queue is None or row.carrier is Carrier.REQUEST, "queue groups answer requests"
    assert bool(row.messages) or row.encoding is Encoding.RAW, "only raw bytes have no class"
    assert row.about.endswith(".")


def test_a_name_that_is_not_given_matches_any():
    assert channel("heartbeat").subject(region="us") == subjects.heartbeat("us", subjects.ANY)


def test_an_unknown_channel_is_a_key_error():
    with pytest.raises(KeyError):
        channel("gossip")


@pytest.mark.parametrize("role", Role)
def test_every_role_publishes_and_subscribes(role):
    said = {row.name for row in CHANNELS if role in row.publish}
    people = role in (Role.OBSERVER, Role.OPERATOR)
    assert said == {"requests"} if people else said - {"requests"}
    assert role is Role.PEER_AGENT or any(role in row.subscribe for row in CHANNELS)
