"""The reasons that a person reads when a given engine does not serve."""

import pytest

from mesh.demo.local_mesh import engine_problem, recognised_kind
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


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ({"/metrics": b"sglang:num_queue_reqs 0\n"}, GivenEngineKind.SGLANG),
        (
            {"/metrics": b"# HELP llamacpp:requests\nllamacpp:requests 0\n"},
            GivenEngineKind.LLAMACPP,
        ),
        ({"/metrics": b"", "/server_info": b'{"version": "0.5.23"}'}, GivenEngineKind.SGLANG),
        ({"/metrics": b"", "/props": b'{"build_info": "b1"}'}, GivenEngineKind.LLAMACPP),
        (  # as TensorRT-LLM shows itself
            {
                "/metrics": b"[]",
                "/version": b'{"version": "1.0.0"}',
                "/v1/models": b'{"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}',
            },
            GivenEngineKind.OPENAI,
        ),
        (
            {"/metrics": b"other 1\n", "/props": b'{"error": "no such path"}'},
            GivenEngineKind.OPENAI,
        ),
    ],
)
async def test_the_kind_of_an_engine_is_what_it_shows(pages, kind) -> None:
    async with running(nobody_asks) as engine:
        engine.raw_pages |= {path: plain(200, page) for path, page in pages.items()}
        assert await recognised_kind(GivenEngine("us", engine.url)) is kind


async def test_an_engine_that_does_not_answer_yet_is_taken_for_vllm_with_a_word(caplog) -> None:
    async with running(nobody_asks) as engine:
        engine.raw_pages["/v1/models"] = plain(503, b"loading")
        assert await recognised_kind(GivenEngine("us", engine.url)) is GivenEngineKind.VLLM
    [record] = caplog.records
    assert "does not answer yet: its agent takes it for vllm (--engine-kind)" in record.getMessage()
