"""What names a data-parallel rank and an adapter to each kind of engine; a rank's own series."""

import logging
import time

import orjson
import pytest

from agents.adapters import adapter_loads
from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_kinds import KINDS, MetricsPage, read_sglang, read_vllm
from agents.adapters.engine_request import ReplicaSite
from agents.adapters.outbox import FrameWriter
from agents.adapters.relay import Relay
from agents.core.effects import LoadAdapter, StartRelay
from agents.core.events import NOTHING_KNOWN
from agents.core.work_message import WorkRequest
from schemas.exchange import H_KEEPER, Frame, Outcome, Refusal, Refused, unpack_frame
from schemas.http import MESSAGES, RESPONSES
from schemas.wire import decode_as
from tests.agents.scripted_engine import Conversation, plain, running

VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_running{engine="10",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 200.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1.0
"""
SGLANG_PAGE = """\
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="4"} 5.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 0.0
sglang:num_queue_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="4"} 2.0
sglang:token_usage{dp_rank="1",engine_type="unified",model_name="m",tp_rank="4"} 0.75
sglang:num_used_tokens{dp_rank="1",engine_type="unified",model_name="m",tp_rank="4"} 900.0
sglang:max_total_num_tokens{dp_rank="1",engine_type="unified",model_name="m",tp_rank="4"} 1200.0
sglang:prompt_tokens_total{model_name="m"} 8128902.0
"""


def client_of(url: str, kind: str = "vllm", **options) -> EngineClient:
    return EngineClient(
        api_url=url,
        metrics_url=url + "/metrics",
        kind=KINDS[kind],
        clock=time.monotonic,
        options=EngineOptions(asks_usage=False, **options),
    )


def test_a_rank_of_vllm_reads_its_own_series() -> None:
    one = read_vllm(MetricsPage(VLLM_PAGE, ("engine", "1")))
    assert (one.running, one.waiting, one.kv_used_ratio) == (5, 2, 0.75)
    assert (one.kv_capacity_tokens, one.progress) == (8000, (200.0, 0.75))
    assert read_vllm(MetricsPage(VLLM_PAGE)).running == 15


def test_a_rank_of_sglang_reads_its_own_series_and_no_sum_over_ranks() -> None:
    one = read_sglang(MetricsPage(SGLANG_PAGE, ("dp_rank", "1")))
    assert (one.running, one.waiting, one.kv_used_ratio) == (5, 2, 0.75)
    assert (one.kv_capacity_tokens, one.progress) == (1200, (900.0,))


@pytest.mark.parametrize(("read", "label"), [(read_vllm, "engine"), (read_sglang, "dp_rank")])
@pytest.mark.parametrize("page", [VLLM_PAGE, SGLANG_PAGE, ""])
def test_a_rank_without_series_is_unknown_and_not_idle(read, label, page) -> None:
    assert read(MetricsPage(page, (label, "2"))) == NOTHING_KNOWN


async def test_a_missing_rank_is_logged_once_and_again_after_it_was_there(caplog) -> None:
    async with running(hello) as engine:
        client = client_of(engine.url, rank=1)
        try:
            for page in ("", "", VLLM_PAGE, ""):
                engine.metrics = page
                await client.scrape()
        finally:
            client.close()
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(lines) == 2 and all('engine="1"' in line for line in lines)


def test_the_settings_of_sglang_have_a_rank_s_own_batch() -> None:
    states = [{"effective_max_running_requests_per_dp": size} for size in (8, 4)]
    page = orjson.dumps({"internal_states": states, "max_running_requests": 12})
    batch_max = KINDS["sglang"].batch_max
    assert (batch_max(page), batch_max(page, 1), batch_max(page, 2)) == (12, 4, None)


async def hello(talk: Conversation) -> None:
    await talk.send(plain(200, b'{"text":"hello"}'))


class Answered:
    """One relay to a scripted engine: what the engine got, and the frames that came of it."""

    def __init__(self, path="/v1/completions", headers=None, *, is_confirmed=False) -> None:
        """`is_confirmed`: the agent has just found out that the engine answers that path."""
        self.path, self.headers, self.is_confirmed = path, headers or {}, is_confirmed

    async def of(self, script, kind, body=b'{"model":"sql"}', rank=None, adapter="sql"):
        self.got = []
        self.frames: list[tuple[Frame, bytes]] = []

        async def kept(talk: Conversation) -> None:
            self.got.append(talk.request)
            await script(talk)

        async with running(kept) as engine:
            engine.also_serves = (self.path,)
            client = client_of(engine.url, kind, rank=rank)
            if self.is_confirmed:
                assert client.lacks(self.path)
                await client.scrape()
            work = WorkRequest("", self.path, "q-1", 10.0, None)
            relay = Relay(
                StartRelay("_INBOX.us.r1.1", work, self.headers, body),
                engine=client,
                frames=FrameWriter(self._post, time.monotonic),
                clock=time.monotonic,
                began=self._began,
                adapter=adapter,
                site=ReplicaSite("us", "g0"),
            )
            try:
                self.ended = await relay.run()
            finally:
                client.close()
        return self

    def _post(self, frame: bytes, urgent: bool) -> None:
        view = unpack_frame(frame)
        self.frames.append((view.kind, bytes(view.payload)))

    async def _began(self, event) -> None:
        pass


async def test_vllm_is_told_the_rank_in_a_header_and_the_adapter_by_its_model() -> None:
    [got] = (await Answered().of(hello, "vllm", rank=3)).got
    assert got.headers["x-data-parallel-rank"] == "3"
    assert got.body == b'{"model":"sql"}'


async def test_sglang_is_told_both_in_the_body_whatever_the_client_says() -> None:
    body = b' {"model":"sql", "lora_path":"other", "data_parallel_rank":7} '
    [got] = (await Answered().of(hello, "sglang", body, rank=3)).got
    assert orjson.loads(got.body) == {
        "model": "sql", "lora_path": "sql", "data_parallel_rank": 3
    }  # fmt: skip
    assert "x-data-parallel-rank" not in got.headers


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_request_for_a_model_without_a_rank_is_untouched(kind) -> None:
    [got] = (await Answered().of(hello, kind, b'{"model":"m"}', adapter=None)).got
    assert got.body == b'{"model":"m"}' and "x-data-parallel-rank" not in got.headers


@pytest.mark.parametrize("body", [b"[1]", b"no JSON", b""])
async def test_a_body_that_is_no_object_gets_no_field(body) -> None:
    [got] = (await Answered().of(hello, "sglang", body, rank=0)).got
    assert got.body == body


async def test_an_adapter_that_was_unloaded_is_no_answer_but_a_refusal() -> None:
    async def gone(talk: Conversation) -> None:
        await talk.send(plain(404, b'{"error":{"message":"The model `sql` does not exist."}}'))

    answered = await Answered().of(gone, "vllm")
    [(kind, payload)] = answered.frames
    assert kind is Frame.REFUSED
    assert decode_as(Refused, payload).reason == Refusal.WRONG_MODEL
    assert answered.ended.outcome is Outcome.ENGINE_LOST
    about_a_model = await Answered().of(gone, "vllm", adapter=None)
    assert [kind for kind, _ in about_a_model.frames] == [Frame.HEAD, Frame.DATA, Frame.END]


@pytest.mark.parametrize("is_confirmed", [False, True])
async def test_a_404_for_an_adapter_on_an_optional_path_is_its_answer_where_the_path_is_known(
    is_confirmed,
) -> None:
    async def only_its_model(talk: Conversation) -> None:
        await talk.send(plain(404 if b"sql" in talk.request.body else 200, b'{"error":{}}'))

    made = Answered(MESSAGES, is_confirmed=is_confirmed)
    answered = await made.of(only_its_model, "vllm")
    expected = [Frame.HEAD, Frame.DATA, Frame.END] if is_confirmed else [Frame.REFUSED]
    assert [kind for kind, _ in answered.frames] == expected


async def test_an_adapter_s_response_that_the_engine_does_not_keep_is_a_404() -> None:
    async def unknown(talk: Conversation) -> None:
        await talk.send(plain(404, b'{"error":{"message":"Response with id r not found."}}'))

    answered = await Answered(RESPONSES, {H_KEEPER: "g0"}).of(unknown, "vllm")
    assert [kind for kind, _ in answered.frames] == [Frame.HEAD, Frame.DATA, Frame.END]


class Loads:
    """An engine that is told to load adapters, by a script."""

    def __init__(self, status: int = 200) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.status = status

    async def __call__(self, talk: Conversation) -> None:
        self.calls.append((talk.request.path, orjson.loads(talk.request.body)))
        await talk.send(plain(self.status, b"words of its own"))


async def performed(script: Loads, kind: str, *listed: str, instead_of=None):
    async with running(script) as engine:
        engine.models = ["m", *listed]
        engine.parents = dict.fromkeys(listed, "m")
        client = client_of(engine.url, kind)
        try:
            effect = LoadAdapter("sql", "/adapters/sql", instead_of)
            return await adapter_loads.perform(client, effect, time.monotonic)
        finally:
            client.close()


@pytest.mark.parametrize(("kind", "prefix"), [("vllm", "/v1"), ("sglang", "")])
async def test_an_adapter_is_loaded_after_another_made_room(kind, prefix) -> None:
    loads = Loads()
    ended = await performed(loads, kind, instead_of="old")
    assert ended.good and ended.adapter == "sql" and ended.load_s >= 0.0
    assert loads.calls == [
        (f"{prefix}/unload_lora_adapter", {"lora_name": "old"}),
        (f"{prefix}/load_lora_adapter", {"lora_name": "sql", "lora_path": "/adapters/sql"}),
    ]


async def test_an_error_is_a_failure_unless_the_engine_lists_the_adapter(caplog) -> None:
    assert not (await performed(Loads(400), "vllm")).good
    assert "adapter sql is not loaded: HTTP 400" in caplog.text
    assert (await performed(Loads(400), "vllm", "sql")).good, "it was loaded already"


async def test_nothing_is_loaded_when_the_other_one_could_not_be_unloaded() -> None:
    loads = Loads(500)
    assert not (await performed(loads, "vllm", "old", instead_of="old")).good
    assert [path for path, _ in loads.calls] == ["/v1/unload_lora_adapter"]
    assert not (await performed(Loads(500), "vllm", instead_of="old")).good


async def test_an_engine_that_is_away_is_a_failure() -> None:
    client = client_of("http://127.0.0.1:9")
    try:
        ended = await adapter_loads.perform(client, LoadAdapter("sql", "/x"), time.monotonic)
    finally:
        client.close()
    assert not ended.good


async def test_optional_paths_are_not_found_out_again_when_adapters_come_and_go() -> None:
    async def vectors(talk: Conversation) -> None:
        await talk.send(plain(200, b'{"data":[]}'))

    async with running(vectors) as engine:
        engine.embeds = True
        client = client_of(engine.url)
        try:
            first = await client.scrape()
            asked = len(engine.requests)
            for adapters in (["sql"], ["sql", "law"], []):
                engine.models = ["org/llama", *adapters]
                engine.parents = dict.fromkeys(adapters, "org/llama")
                client.refresh_models()
                found = await client.scrape()
                assert found.adapters == set(adapters) and found.paths == first.paths
                assert client.base_models == ("org/llama",)
            assert "/v1/embeddings" in first.paths and len(engine.requests) == asked
        finally:
            client.close()
