"""The reasons that a person reads when a given engine does not serve."""

import pytest

from mesh.demo.local_mesh import engine_problem
from mesh.demo.options import GivenEngine, GivenEngineKind
from tests.agents.scripted_engine import Conversation, plain, running
from tests.support.ports import free_ports

HINT = "if that server has no metrics, use --engine-kind openai"


async def nobody_asks(talk: Conversation) -> None:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize(
    "kind", [GivenEngineKind.VLLM, GivenEngineKind.SGLANG, GivenEngineKind.LLAMACPP]
)
async def test_a_server_without_metrics_differs_from_one_that_is_down(kind) -> None:
    async with running(nobody_asks) as engine:
        elsewhere = GivenEngine("us", engine.url, f"{engine.url}/elsewhere")
        said = await engine_problem(elsewhere, kind)
        assert said == f"{engine.url}/elsewhere answers HTTP 404; {HINT}"
        answers = await engine_problem(elsewhere, GivenEngineKind.OPENAI)
        assert answers.startswith("it answers, its agent is not ready yet")
        engine.scrape_response = lambda: plain(503, b"loading")
        assert await engine_problem(elsewhere, kind) == f"{engine.url}/v1/models answers HTTP 503"


async def test_where_nobody_listens_no_kind_is_recommended() -> None:
    [port] = free_ports(1)
    said = await engine_problem(GivenEngine("us", f"http://127.0.0.1:{port}"), GivenEngineKind.VLLM)
    assert str(port) in said
    assert HINT not in said
