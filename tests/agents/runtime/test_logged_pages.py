"""What the log says of an engine whose pages break and come back."""

import logging
import time
from typing import Any

from agents.config import AgentConfig
from agents.core.events import PAGES_GOOD, PagesSeen
from agents.runtime.agent import WITHOUT_METRICS, WITHOUT_MODELS, Agent

MODELS = PagesSeen("models: HTTP 503")
METRICS = PagesSeen("metrics: HTTP 503", is_blind=True)


def test_each_page_that_breaks_is_logged_once_with_what_follows(caplog) -> None:
    caplog.set_level(logging.INFO, "agents.runtime.agent")
    unused: Any = None
    addresses = {"engine_url": "http://127.0.0.1:1", "nats_url": "nats://127.0.0.1:1"}
    config = AgentConfig(region="us", replica="g0", engine_kind="vllm", **addresses)
    agent = Agent(config, unused, unused, unused, time.monotonic, unused)
    other = PagesSeen("models: HTTP 500")
    for seen in (PAGES_GOOD, MODELS, other, METRICS, METRICS, MODELS, PAGES_GOOD, PAGES_GOOD):
        agent._log_pages(seen)
    assert [record.getMessage() for record in caplog.records] == [
        f"us/g0: a page of the engine fails: {MODELS.problem}; {WITHOUT_MODELS}",
        f"us/g0: a page of the engine fails: {METRICS.problem}; {WITHOUT_METRICS}",
        f"us/g0: a page of the engine fails: {MODELS.problem}; {WITHOUT_MODELS}",
        "us/g0: the pages of the engine can be read again",
    ]
