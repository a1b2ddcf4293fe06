"""A decision lists its candidates only where somebody reads them."""

import logging
from pathlib import Path
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from infra.bus import BusAddress
from mesh.adapters.bus import RouterBus
from mesh.adapters.metrics import RouterMetrics
from mesh.adapters.recorder import RecordTo
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import PromptText
from mesh.core.model.settings import RouterSettings
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.http.read_request import BodyFields, ParsedRequest, RequestOptions
from mesh.runtime.config import RouterConfig
from mesh.runtime.request_manager import RequestManager
from schemas.decision import Decision
from schemas.http import CHAT
from schemas.ids import ModelId, RegionId, RequestId, RouterId
from tests.mesh.core.build import beat
from tests.mesh.runtime.test_ingress import BODY, message
from tests.support.spans import traced

US, EU, R1 = RegionId("us"), RegionId("eu"), RouterId("r1")
TINY = ModelId("tiny")
LOG = "mesh.runtime.request_observer"


class Manager:
    """A router's requests over a real core, off the bus: it decides, and nothing is sent."""

    def __init__(self, record: Path | None = None) -> None:
        config = RouterConfig(
            region=US,
            router=R1,
            peers=(EU,),
            http_host="",
            http_port=0,
            bus=BusAddress(""),
            settings=RouterSettings(),
            hash_key="key",
            epoch=1,
            seed=1,
            record=None if record is None else RecordTo(path=record),
        )
        self.core = RouterCore(
            RouterState(
                region=US, router=R1, epoch=1, settings=config.settings, dice=Random(1), peers=(EU,)
            )
        )
        self.core.handle(ev.HeartbeatSeen(beat("us-0", models=(TINY,))), 100.0)
        self.decisions: list[Decision] = []
        metrics = RouterMetrics(self.core, CollectorRegistry(), lambda: 100.0)
        self.requests = RequestManager(
            config,
            self.core,
            RouterBus(US, R1, (EU,), config.bus),
            metrics,
            lambda: 100.0,
            self.decide,
        )

    def decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """As the core does; only receipts are passed on."""
        receipts = [one for one in self.core.handle(event, now) if isinstance(one, fx.Decided)]
        self.decisions += [one.decision for one in receipts]
        return list(receipts)

    def ask(self, *, debug: bool = False) -> list[str]:
        """Who is listed for a client's request."""
        options = RequestOptions(debug=debug)
        fields = BodyFields(TINY, {}, PromptText(b"hello"))
        ask = ParsedRequest(RequestId("q"), CHAT, BODY, fields, TINY, None, options)
        self.requests.admit(ask, {}, None, lambda: None)
        return self.listed()

    def ask_for_peer(self) -> list[str]:
        """Who is listed for a peer's."""
        self.requests.from_peers.receive(message())
        return self.listed()

    def listed(self) -> list[str]:
        [decision] = self.decisions
        assert decision.replica == "us-0"
        return [one.name for one in decision.candidates]


BOTH = pytest.mark.parametrize("ask", [Manager.ask, Manager.ask_for_peer])


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.WARNING, LOG)


@BOTH
def test_nobody_reads_them(ask):
    assert ask(Manager()) == []


def test_the_client_reads_them():
    assert Manager().ask(debug=True) == ["us-0"]


@BOTH
def test_the_log_reads_them(ask, caplog):
    caplog.set_level(logging.DEBUG, LOG)
    assert ask(Manager()) == ["us-0"]
    assert "free 1/1" in caplog.text


@BOTH
def test_a_recording_has_them(ask, tmp_path):
    assert ask(Manager(record=tmp_path / "us.jsonl")) == ["us-0"]


@BOTH
def test_a_sampled_trace_has_them(ask):
    with traced():
        assert ask(Manager()) == ["us-0"]
    with traced(0.0):
        assert ask(Manager()) == []
