"""Why a given engine does not serve yet, in the words that its agent logs.

The demo looks at the engine itself, with the agent's own eyes: a heartbeat has no room for
reasons, and reading them off the agent's log would make its wording an interface.
"""

import asyncio

from agents.adapters.engine import Engine
from agents.adapters.kinds import KINDS
from agents.core.events import EngineFailed, EngineRead
from mesh.demo.options import EngineKind, GivenEngine


async def why_silent(given: GivenEngine, kind: EngineKind) -> str:
    """What is wrong with an engine as one of that kind, and what to do. Takes 2 s at most."""
    look = await _look(given, kind)
    if isinstance(look, EngineRead):
        return "it answers since just now"
    if kind is not EngineKind.OPENAI and isinstance(
        await _look(given, EngineKind.OPENAI), EngineRead
    ):
        return f"{look.detail}; if that server has no metrics, use --engine-kind openai"
    return look.detail


async def _look(given: GivenEngine, kind: EngineKind) -> EngineRead | EngineFailed:
    engine = Engine(
        api_url=given.url,
        metrics_url=given.metrics_url or f"{given.url}/metrics",
        kind=KINDS[kind],
        clock=asyncio.get_running_loop().time,
        key=None if given.key is None else given.key.get_secret_value(),
        models=given.models,
        asks_batch_max=False,
    )
    try:
        return await engine.look()
    finally:
        engine.close()
