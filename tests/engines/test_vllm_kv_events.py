"""The mesh follows the KV events of a real vLLM: `make test-engines`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines.kv_events_contract import Followed, KvEventsContract, followed
from tests.engines.vllm_server import START_WITHIN_S, Vllm

BLOCKS = 160  # 5,120 tokens
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(3 * START_WITHIN_S),
]


class SmallVllm(Vllm):
    more = ("--num-gpu-blocks-override", str(BLOCKS))
    publishes_kv_events = True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Followed]:
    async with followed(SmallVllm, tmp_path_factory.mktemp("kv")) as mesh:
        yield mesh


class TestVllmKvEvents(KvEventsContract):
    pass
