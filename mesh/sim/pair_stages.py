"""What a replica of the twin does with a request of which its engine computes one stage.

With nixl the prefill engine's answer names the KV cache that it keeps, by the inbox of the stage;
with sglang the room does, which both stages are told: `mesh.sim.kv_transfer` brings them together.
"""

from collections.abc import Callable

import orjson

from agents.core.events import TokenUsage
from agents.core.kv_stages import KvStage
from agents.sim.kv_cache import BLOCK_TOKENS
from mesh.sim.engine import ReplicaEngine
from mesh.sim.kv_transfer import KvTransfers
from mesh.sim.running_answer import RunningAnswer

NOTHING = b"null"


class PairStages:
    """One replica's."""

    def __init__(
        self,
        engine: ReplicaEngine,
        transfers: KvTransfers,
        *,
        is_running: Callable[[RunningAnswer], bool],
        submit: Callable[[RunningAnswer], None],
        failed: Callable[[RunningAnswer], None],
        answer: Callable[[RunningAnswer, bytes, TokenUsage], None],
    ) -> None:
        """`submit` gives a request to the engine; `failed` answers with the engine's error, and
        `answer` to a prefill stage."""
        self._engine = engine
        self._transfers = transfers
        self._is_running = is_running
        self._submit = submit
        self._failed = failed
        self._answer = answer

    def fetch(self, running: RunningAnswer) -> None:
        """A decode stage: its request goes to the engine when the prompt's KV cache is here."""
        stage, tokens = running.stage, running.request.node.prompt_tokens
        assert stage is not None, "a decode stage"
        name = _room(stage)
        waits = name is not None
        if name is None and stage.params:
            name = orjson.loads(stage.params)["remote_request_id"]
        if name is None:  # the prefill engine had nothing to hand out
            self._submit(running)
            return

        def came(is_complete: bool) -> None:
            if not self._is_running(running):
                return
            if is_complete:
                self._engine.receive(_prompt_blocks(running))
                self._submit(running)
            else:
                self._failed(running)

        self._transfers.want(name, tokens, came, waits=waits)

    def hand_out(self, running: RunningAnswer, cached_tokens: int) -> None:
        """A prefill stage is computed: keep its KV cache for the decode engine, and answer."""
        assert running.stage is not None, "a prefill stage"
        usage = TokenUsage(running.request.node.prompt_tokens, cached_tokens, 1)
        blocks, room = _prompt_blocks(running), _room(running.stage)
        if room is None:
            self._transfers.offer(running.inbox, self._engine, blocks)
            self._answer(running, _named(running.inbox), usage)
            return

        def fetched(is_complete: bool) -> None:
            if is_complete:
                self._answer(running, NOTHING, usage)
            elif self._is_running(running):
                self._failed(running)

        self._transfers.offer(room, self._engine, blocks, fetched)


def _prompt_blocks(running: RunningAnswer) -> list[int]:
    return list(running.request.keys.blocks[: running.request.node.prompt_tokens // BLOCK_TOKENS])


def _room(stage: KvStage) -> str | None:
    """Where the engines of an sglang pair meet; None of other pairs."""
    return None if stage.prefill_address is None else f"room {stage.room}"


def _named(cache: str) -> bytes:
    """What a prefill engine answers with nixl."""
    return orjson.dumps({"do_remote_prefill": True, "remote_request_id": cache})
