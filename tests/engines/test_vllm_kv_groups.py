"""The mesh follows the KV events of a real vLLM whose layers are of two kinds: `make test-engines`.

Every other layer sees a window alone, as in gpt-oss and Gemma.
"""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from agents.core.kv_events import BlocksStored, GroupKind, parse_batch
from tests.engines.kv_events_contract import (
    Followed,
    KvEventsContract,
    followed,
    predicted_and_cached,
)
from tests.engines.vllm_server import BLOCK_TOKENS, START_WITHIN_S, Vllm

WINDOW_TOKENS = 4 * BLOCK_TOKENS
BLOCKS = 160  # of both kinds
BATCH_TOKENS = 512  # in more of them the window's blocks would not fit beside the others
LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW_TOKENS,
}
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engines,
    pytest.mark.timeout(3 * START_WITHIN_S),
]


class WindowedVllm(Vllm):
    more = (
        *("--num-gpu-blocks-override", str(BLOCKS), "--hf-overrides", json.dumps(LAYERS)),
        *("--max-num-batched-tokens", str(BATCH_TOKENS)),
    )
    publishes_kv_events = True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Followed]:
    async with followed(WindowedVllm, tmp_path_factory.mktemp("kv")) as mesh:
        yield mesh


class TestWindowedVllmKvEvents(KvEventsContract):
    async def test_each_stored_block_has_its_groups_kind_and_window(self, mesh):
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.connect(mesh.engines["us-0"].kv_events)
            socket.subscribe(b"")
            found: dict[int, tuple[GroupKind, int]] = {}
            topic = 100
            while len(found) < 2:  # the first may be stored before the socket is connected
                topic += 1
                await predicted_and_cached(mesh, topic)
                while await socket.poll(1000):
                    *_, payload = await socket.recv_multipart()
                    for event in parse_batch(payload):
                        if isinstance(event, BlocksStored):
                            found[event.group] = event.kind, event.window
        kinds = {(GroupKind.FULL, 0), (GroupKind.WINDOW, WINDOW_TOKENS)}
        assert set(found.values()) == kinds
