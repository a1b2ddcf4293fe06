"""A peer's message as a request: read whole, or refused with a word, whatever it holds."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from infra.bus import BusAddress
from mesh.adapters.body_budget import BodyBudget
from mesh.adapters.bus import header_bytes
from mesh.adapters.large_bodies import LARGE_BYTES
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.reply_guard import ReplyGuard
from mesh.core import effects as fx
from mesh.core.prefixes.prompt import PromptText
from mesh.core.settings import RouterSettings
from mesh.runtime.config import RouterConfig
from mesh.runtime.ingress import WAITED_S_MAX, Ingress, IngressInvalid, read_ingress
from mesh.runtime.prompts import PromptReader
from schemas import exchange, subjects, wire
from schemas.exchange import Priority
from schemas.http import COMPLETIONS
from schemas.ids import RegionId, ReplicaId, RouterId
from tests.mesh.core.build import core, digest

INBOX = subjects.inbox("eu", "r1", "1-1-1")
GOOD = {
    exchange.H_REQUEST: "q-1",
    exchange.H_MODEL: subjects.encode_model("tiny"),
    exchange.H_PATH: COMPLETIONS,
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "2500",
    exchange.H_HOPS: "1",
    exchange.H_ORIGIN: "eu",
}
BODY = b'{"prompt": "' + b"x" * 1000 + b'"}'
SALTED = b'{"cache_salt": "a", "prompt": "' + b"x" * 1000 + b'"}'


def message(data=BODY, **changed):
    headers = {name: value for name, value in (GOOD | changed).items() if value is not None}
    return Msg(None, subject=subjects.ingress("us"), reply=INBOX, data=data, headers=headers)


def foreign(data=BODY, **changed):
    return read_ingress(message(data, **changed), 7, PromptReader("key"), 100.0)


def read(data=BODY, **changed):
    return foreign(data, **changed).request


def test_an_older_router_s_message_wishes_nothing():
    request = read()
    assert (request.deadline, request.hops, request.origin) == (102.5, 1, "eu")
    assert (request.priority, request.slo_ttft_s, request.session) == (Priority.NORMAL, None, None)


def test_wishes_arrive_as_they_were_sent():
    request = read(
        **{
            exchange.H_PRIORITY: "high",
            exchange.H_SLO_TTFT_MS: "250",
            exchange.H_SESSION: "chat-1",
        }
    )
    assert (request.priority, request.slo_ttft_s, request.session) == ("high", 0.25, "chat-1")


def test_a_peer_s_request_has_passed_a_region():
    with pytest.raises(IngressInvalid, match="hops"):
        read(**{exchange.H_HOPS: "0"})


def test_what_it_has_waited_counts_up_to_a_minute():
    assert read(**{exchange.H_WAITED_MS: "1500"}).arrived_at == 98.5
    assert read(**{exchange.H_WAITED_MS: "999999999"}).arrived_at == 100.0 - WAITED_S_MAX
    assert read(**{exchange.H_WAITED_MS: "1500"}).held_before_s == 1.5, "an older router says it so"
    both = read(**{exchange.H_WAITED_MS: "9500", exchange.H_HELD_MS: "500"})
    assert (both.arrived_at, both.held_before_s) == (90.5, 0.5)
    assert read(**{exchange.H_HELD_MS: "999999999"}).held_before_s == WAITED_S_MAX


def test_only_what_a_peer_may_say_is_passed_on():
    wishes = {exchange.H_PRIORITY: "high", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    ours = {exchange.H_MAY_QUEUE: "1", exchange.H_FROM: "r9", exchange.H_PREFILL_TOKENS: "0"}
    assert foreign(**wishes, **ours, **{"X-Else": "1"}).headers == GOOD | wishes


def test_the_salt_is_read_from_the_body_as_at_home():
    assert read().prompt.hashes and read(SALTED).prompt.hashes
    assert not set(read().prompt.hashes) & set(read(SALTED).prompt.hashes)


def test_the_tenant_is_the_asking_router_s_word_and_no_text_but_a_name():
    told = [read(**{exchange.H_TENANT: name}).prompt.hashes for name in ("acme", "beta")]
    assert not set(read().prompt.hashes) & {*told[0], *told[1]}
    assert not set(told[0]) & set(told[1])
    text = PromptText(b"x" * 1000)
    assert told[0] == PromptReader("key").read("tiny", text, "", "acme").hashes
    for name in ("Acme", "a b", "x" * 33):
        with pytest.raises(IngressInvalid, match=exchange.H_TENANT):
            read(**{exchange.H_TENANT: name})


@pytest.mark.parametrize("name", [exchange.H_DEADLINE_MS, exchange.H_HOPS, exchange.H_SLO_TTFT_MS])
@pytest.mark.parametrize("text", ["", "-1", "1.5", "nan", "9" * 40, "9" * 400, "9" * 5000, "²"])
def test_a_number_that_nobody_can_reckon_with_is_refused(name, text):
    with pytest.raises(IngressInvalid, match=name):
        read(**{name: text})


@pytest.mark.parametrize("name", [name for name in GOOD if name != exchange.H_ATTEMPT])
def test_what_is_missing_is_named(name):
    with pytest.raises(IngressInvalid, match=name):
        read(**{name: None})


@given(
    st.dictionaries(st.sampled_from([*GOOD, exchange.H_PRIORITY, exchange.H_SESSION]), st.text())
)
def test_no_header_breaks_the_reader(changed):
    with contextlib.suppress(IngressInvalid):
        read(**changed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (exchange.H_MODEL, "=41" * 2000),
        (exchange.H_REQUEST, "x" * 129),
        (exchange.H_ATTEMPT, "1" * 600),
        (exchange.H_PATH, "/" + "x" * 600),
        (exchange.H_RESIDENCY, "a" * 2000),
        (exchange.H_SESSION, "\udcff"),
    ],
)
def test_a_header_that_is_too_long_or_has_another_form_is_refused(name, text):
    before = subjects.decode_model.cache_info().misses
    with pytest.raises(IngressInvalid, match=f"header {name} of {len(text)} characters"):
        read(**{name: text})
    assert subjects.decode_model.cache_info().misses == before


@pytest.mark.parametrize("state", ["a=" + "x" * 511, "a=\udcff", "a=\xe9"])
def test_a_trace_state_that_is_too_long_or_no_ascii_is_left_behind(state):
    parent = f"00-{'1' * 32}-{'2' * 16}-00"
    assert foreign(traceparent=parent, tracestate=state).headers == GOOD | {"traceparent": parent}


def test_a_large_body_is_not_read_but_its_sketch_is():
    text = b"x" * (LARGE_BYTES - 14)
    assert read(b'{"prompt": "' + text + b'"}').prompt.tokens
    with pytest.raises(IngressInvalid, match="in parts"):
        read(b'{"prompt": "' + text + b'x"}')
    sketch = wire.encode(exchange.Sketch(9000, (1, 2)))
    assert read(sketch, **{exchange.H_BODY_BYTES: "2000000"}).prompt.tokens == 9000


def test_a_request_that_the_bus_does_not_take_is_refused():
    for number, act in enumerate(
        (
            lambda desk: desk.ingress.dispatch(
                fx.Dispatch(1, 1, ReplicaId("us-0"), 1, INBOX), INBOX, 100.0
            ),
            lambda desk: desk.ingress.send_on(fx.Forward(1, 1, RegionId("ap"), INBOX), INBOX, 0.0),
        )
    ):
        desk = Desk(limit_bytes=1_000_000)
        assert desk.hear(1), number
        desk.fits = lambda subject: subject == INBOX
        act(desk)
        assert desk.refusals() == ["full"]
        assert desk.bodies.taken_bytes == 0


class Desk:
    """The peers' side of a desk, and what it publishes."""

    def __init__(self, limit_bytes):
        self.bodies = BodyBudget(limit_bytes)
        self.metrics = RouterMetrics(core(), CollectorRegistry())
        self.said = []
        config = RouterConfig(
            region=RegionId("us"),
            router=RouterId("r1"),
            peers=(RegionId("eu"),),
            http_host="127.0.0.1",
            http_port=0,
            bus=BusAddress("nats://127.0.0.1:1"),
            settings=RouterSettings(),
            hash_key="key",
            epoch=1,
            seed=1,
            drain_s=1.0,
        )
        guard = ReplyGuard(config.region, config.peers, self.metrics, lambda: 0.0)
        prompts = PromptReader("key")
        self.ingress = Ingress(config, self, self.metrics, prompts, self.bodies, guard)

    def publish(self, subject, payload, reply="", headers=None):
        if not self.fits(subject):
            return False
        self.said.append((subject, payload))
        self.reply, self.headers = reply, headers
        return True

    def fits(self, subject):
        return True

    def hear(self, key, data=BODY):
        return self.ingress.read(message(data), key, 100.0)

    def sample(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels)

    def refusals(self):
        return [
            wire.decode_as(exchange.Refused, exchange.unpack_frame(payload).payload).reason
            for _, payload in self.said
            if payload[0] == exchange.Frame.REFUSED
        ]


def test_bodies_of_guests_are_counted_with_all_others_while_they_wait():
    each = len(BODY) + header_bytes(GOOD)
    desk = Desk(limit_bytes=2 * each)
    assert desk.hear(1) and desk.hear(2)
    assert desk.bodies.taken_bytes == 2 * each
    assert desk.sample("mesh_guests_waiting") == 2.0
    assert desk.hear(3) is None, "no room for a third"
    assert desk.sample("mesh_ingress_refusals_total", reason="full") == 1.0
    desk.ingress.refuse(fx.RefusePeer(1, INBOX, "own_work", digest("us")))
    desk.ingress.dispatch(fx.Dispatch(2, 1, ReplicaId("us-0"), 1, INBOX), INBOX, 100.0)
    assert (desk.bodies.taken_bytes, desk.sample("mesh_guests_waiting")) == (0, 0.0)
    assert desk.hear(4, b"no JSON") is None
    assert desk.refusals() == ["full", "own_work", "bad_work"]
    assert desk.bodies.taken_bytes == 0


def test_the_way_of_a_request_is_told_by_those_who_sent_it_on():
    assert read().path == ("eu",)
    told = read(**{exchange.H_HOPS: "2", exchange.H_REGIONS: "eu,ap"})
    assert (told.path, told.hops, told.origin) == (("eu", "ap"), 2, "eu")


@pytest.mark.parametrize(
    ("hops", "regions"),
    [
        ("2", None),
        ("1", "eu,ap"),
        ("2", "ap,eu"),  # its origin is eu
        ("2", "eu,us"),  # it has been here
        ("2", "eu,eu"),
        ("2", "eu,"),
        ("2", "eu,a.b"),
        ("5", "eu,a,b,c,d"),
        ("4", "eu,a,b,c,d,e,f,g"),
        ("1", ""),
    ],
)
def test_a_way_that_comes_back_or_is_none_is_refused(hops, regions):
    with pytest.raises(IngressInvalid):
        read(**{exchange.H_HOPS: hops, exchange.H_REGIONS: regions})


@pytest.mark.parametrize("in_parts", [False, True])
def test_what_is_sent_on_says_the_whole_way_and_what_it_has_waited(in_parts):
    desk = Desk(limit_bytes=1_000_000)
    more, data = {exchange.H_WAITED_MS: "40", exchange.H_HELD_MS: "30"}, BODY
    if in_parts:
        more |= {exchange.H_BODY_BYTES: "2000000"}
        data = wire.encode(exchange.Sketch(9000, (1, 2)))
    asked = desk.ingress.read(message(data, **more), 1, 100.0)
    desk.ingress.send_on(fx.Forward(1, 1, RegionId("ap"), INBOX, 0.23), INBOX, 100.5)
    [(subject, payload)] = desk.said
    assert (subject, payload) == (subjects.ingress("ap"), data)
    on = Msg(None, subject=subject, reply=desk.reply, data=payload, headers=desk.headers)
    there = read_ingress(on, 8, PromptReader("key"), 7.0).request
    assert (there.path, there.hops, there.origin) == (("eu", "us"), 2, "eu")
    assert (there.arrived_at, there.deadline) == (7.0 - 0.54, 9.0)
    assert there.held_before_s == 0.23
    assert (there.answer_inbox, there.prompt) == (INBOX, asked.prompt)
    assert desk.bodies.taken_bytes == 0
    assert desk.sample("mesh_ingress_total", origin="eu", result="sent_on") == 1.0
