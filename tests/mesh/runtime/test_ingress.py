"""A peer's message as a request: read whole, or refused with a word, whatever it holds."""

import contextlib
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from infra.bus import BusAddress
from mesh.adapters.bus import RouterBus, header_bytes
from mesh.adapters.ended_requests import EndedRequests
from mesh.adapters.metrics import RouterMetrics
from mesh.core.model import effects as fx
from mesh.core.model.prompt import PromptReader, PromptText
from mesh.core.model.served_names import KEPT_RESPONSE, beat_by_all_names, kept_name
from mesh.core.model.settings import RouterSettings
from mesh.http.read_request import BodyBudget
from mesh.runtime.config import RouterConfig
from mesh.runtime.control_plane import ReplyGuard
from mesh.runtime.peer_requests import PeerRequests, read_ingress
from mesh.runtime.request_observer import RequestObserver
from mesh.session.headers import WAITED_S_MAX, IngressInvalid
from mesh.session.record import Home, Identifiers
from mesh.session.session import Session
from mesh.session.usage_book import UsageBook
from schemas import exchange, subjects, wire
from schemas.decision import Decision, Placement
from schemas.exchange import LARGE_BYTES, Priority
from schemas.http import COMPLETIONS, RESPONSES
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.response_ids import response_id
from tests.mesh.core.build import beat, core, digest

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
    return read_ingress(message(data, **changed), 7, PromptReader("key").read, 100.0)


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


def test_a_call_about_a_response_is_for_the_replica_that_keeps_it_whatever_its_model_and_body():
    call = f"GET /v1/responses/{response_id('us', 'g0', bytes(16))}"
    about = {exchange.H_PATH: RESPONSES, exchange.H_CALL: call, exchange.H_KEEPER: "g0"}
    named = about | {exchange.H_MODEL: subjects.encode_model(KEPT_RESPONSE)}
    for data in (b"", b"no JSON", BODY):
        record = foreign(data, **named)
        assert record.request.model == kept_name("us", "g0")
        assert record.received[exchange.H_CALL] == call
        assert not record.request.prompt.hashes and record.request.answer_tokens == 0
    for model in (read(b"", **about).model, read(b"", **(named | {exchange.H_KEEPER: None})).model):
        assert model not in beat_by_all_names(replace(beat("g0"), paths=(RESPONSES,))).models
    with pytest.raises(IngressInvalid, match=exchange.H_CALL):
        read(b"", **(named | {exchange.H_CALL: "GET /metrics"}))
    with pytest.raises(IngressInvalid):  # as an older router reads it
        read(b"", **(named | {exchange.H_CALL: None}))


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
    assert foreign(**wishes, **ours, **{"X-Else": "1"}).received == GOOD | wishes


def test_the_salt_is_read_from_the_body_as_at_home():
    assert read().prompt.hashes and read(SALTED).prompt.hashes
    assert not set(read().prompt.hashes) & set(read(SALTED).prompt.hashes)


def test_the_tenant_is_the_asking_router_s_word_and_no_text_but_a_name():
    told = [read(**{exchange.H_TENANT: name}).prompt.hashes for name in ("acme", "beta")]
    assert not set(read().prompt.hashes) & {*told[0], *told[1]}
    assert not set(told[0]) & set(told[1])
    text = PromptText(b"x" * 1000)
    assert told[0] == PromptReader("key").read("tiny", text, "", "acme").hashes
    assert read(**{exchange.H_TENANT: f"key:{'0' * 32}"}).tenant == f"key:{'0' * 32}"
    for name in ("Acme", "a b", "x" * 33, "key:", "key:A b", "key:key:a"):
        with pytest.raises(IngressInvalid, match=exchange.H_TENANT):
            read(**{exchange.H_TENANT: name})


def test_whose_it_is_arrives_as_it_was_sent_and_is_nobody_s_from_an_older_router():
    assert (read().tenant, read().key_id) == ("", "")
    request = read(**{exchange.H_TENANT: "acme", exchange.H_KEY_ID: "k-7"})
    assert (request.tenant, request.key_id) == ("acme", "k-7")
    with pytest.raises(IngressInvalid, match=exchange.H_KEY_ID):
        read(**{exchange.H_KEY_ID: "sk-Secret"})


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
    assert foreign(traceparent=parent, tracestate=state).received == GOOD | {"traceparent": parent}


def test_a_large_body_is_not_read_but_its_sketch_is():
    text = b"x" * (LARGE_BYTES - 14)
    assert read(b'{"prompt": "' + text + b'"}').prompt.tokens
    with pytest.raises(IngressInvalid, match="in parts"):
        read(b'{"prompt": "' + text + b'x"}')
    sketch = wire.encode(exchange.Sketch(9000, (1, 2)))
    assert read(sketch, **{exchange.H_BODY_BYTES: "2000000"}).prompt.tokens == 9000


def test_a_request_that_the_bus_does_not_take_is_refused():
    router = Router(limit_bytes=1_000_000)
    assert router.hear()
    router.fits = lambda subject: subject == INBOX
    router.perform(fx.Dispatch(1, 1, ReplicaId("us-0"), 1, INBOX))
    assert router.refusals() == ["full"]
    assert router.bodies.taken_bytes == 0


class Router(RouterBus):
    """A router's messages and session, and what it publishes."""

    payload_bytes_max = 1_000_000

    def __init__(self, limit_bytes):
        super().__init__(RegionId("us"), RouterId("r1"), (), BusAddress("nats://127.0.0.1:1"))
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
        self.ended = EndedRequests(config.region, config.router, lambda: 100.0)
        self.session = Session(
            Home(config.region, config.router),
            decide=lambda event, now: [event] if isinstance(event, fx.Effect) else [],
            clock=lambda: 100.0,
            bus=self,
            ids=Identifiers(str, count(1)),
            observer=RequestObserver(
                *(config, self.metrics, prompts, lambda: 100.0, self.ended, self.bodies),
                UsageBook("us", "r1", 1, ("us",)),
            ),
        )
        self.from_peers = PeerRequests(self.session, guard, self.bodies, prompts.read, self.metrics)
        self.metrics.peer_requests_held.set_function(lambda: self.session.forwarded)

    def publish(self, subject, payload, reply="", headers=None):
        if not self.fits(subject):
            return False
        self.said.append((subject, payload))
        self.reply, self.headers = reply, headers
        return True

    def fits(self, subject):
        return True

    def hear(self, data=BODY):
        """Whether a peer's request is being placed."""
        before = self.session.forwarded
        self.from_peers.receive(message(data))
        return self.session.forwarded > before

    def perform(self, effect):
        """As if the core had said so."""
        self.session.feed(effect)

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
    router = Router(limit_bytes=2 * each)
    assert router.hear() and router.hear()
    assert router.bodies.taken_bytes == 2 * each
    assert router.sample("mesh_peer_requests_held") == 2.0
    assert not router.hear(), "no room for a third"
    assert router.sample("mesh_ingress_refusals_total", reason="full") == 1.0
    router.perform(fx.RefusePeer(1, INBOX, "own_work", digest("us")))
    router.perform(fx.Dispatch(2, 1, ReplicaId("us-0"), 1, INBOX))
    assert (router.bodies.taken_bytes, router.sample("mesh_peer_requests_held")) == (0, 0.0)
    assert not router.hear(b"no JSON")
    assert router.refusals() == ["full", "own_work", "bad_work"]
    assert router.bodies.taken_bytes == 0


@pytest.mark.parametrize("hops", ["1", "2", "4"])
def test_what_an_older_router_forwarded_again_is_taken(hops):
    told = read(**{exchange.H_HOPS: hops, "Mesh-Regions": "eu,ap"})
    assert (told.hops, told.origin) == (int(hops), "eu")


@pytest.mark.parametrize(("hops", "origin"), [("5", "eu"), ("1", "us"), ("1", "a.b"), ("1", "")])
def test_a_request_that_comes_back_or_went_too_far_is_refused(hops, origin):
    with pytest.raises(IngressInvalid):
        read(**{exchange.H_HOPS: hops, exchange.H_ORIGIN: origin})


def test_each_second_in_the_hold_queue_is_counted_once():
    """A request that is held, placed, refused, held and placed again."""
    router = Router(limit_bytes=10_000)
    assert router.hear()
    placed = [("hold", 0.0), ("local", 2.0), ("hold", 0.0), ("local", 5.0), ("local", 5.0)]
    for placement, held_s in placed:
        decision = Decision(
            request="q-1",
            region="us",
            policy="mesh",
            placement=Placement(placement),
            reason="test",
            held_s=held_s,
        )
        router.perform(fx.Decided(1, decision))
    assert router.sample("mesh_hold_seconds_sum") == 5.0
    assert router.sample("mesh_hold_seconds_count") == 3.0
