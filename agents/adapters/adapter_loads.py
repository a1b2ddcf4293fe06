"""Loading a LoRA adapter at an engine by its own API, after another one made room for it.

vLLM (started with VLLM_ALLOW_RUNTIME_LORA_UPDATING) and SGLang take the same fields on paths that
differ. Both answer with an error where an adapter of that name is loaded already, each in its own
words, so the engine's list of models decides.
"""

import logging
from collections.abc import Callable

import orjson

from agents.adapters.engine import EngineClient
from agents.adapters.engine_call import UnexpectedAnswer, call_engine
from agents.adapters.http_client import HttpBroken
from agents.adapters.listed_models import MODELS_PATH
from agents.adapters.listed_models import served as read_models
from agents.core.effects import LoadAdapter
from agents.core.events import AdapterLoadEnded
from schemas.http_statuses import SUCCESS
from schemas.ids import ModelId

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0  # from a slow disk; requests for it wait as long
LIST_TIMEOUT_S = 5.0
SHOWN_BYTES = 200  # of an engine's error, in the log


async def perform(
    engine: EngineClient, effect: LoadAdapter, clock: Callable[[], float]
) -> AdapterLoadEnded:
    """Do it, and log how it ended; the engine's faults raise nothing."""
    began_at, problem = clock(), None
    if effect.instead_of is not None:
        problem = await _unload(engine, effect.instead_of)
    if problem is None:
        problem = await _load(engine, effect)
    load_s = clock() - began_at
    if problem is None:
        engine.loaded(effect.adapter)
        log.info("loaded adapter %s in %.2f s", effect.adapter, load_s)
    else:
        log.warning("adapter %s is not loaded: %s", effect.adapter, problem)
    return AdapterLoadEnded(effect.adapter, problem is None, load_s)


async def _load(engine: EngineClient, effect: LoadAdapter) -> str | None:
    """Why it could not; None if it is loaded."""
    fields = {"lora_name": effect.adapter, "lora_path": effect.path}
    problem = await _called(engine, engine.kind.load_path, fields)
    return None if problem is None or await _has(engine, effect.adapter) else problem


async def _unload(engine: EngineClient, adapter: ModelId) -> str | None:
    problem = await _called(engine, engine.kind.unload_path, {"lora_name": adapter})
    if problem is None or not await _has(engine, adapter):
        log.info("unloaded adapter %s to make room", adapter)
        return None
    return f"{adapter} could not be unloaded for it: {problem}"


async def _called(engine: EngineClient, path: str, fields: dict[str, str]) -> str | None:
    body = orjson.dumps(fields)
    try:
        status, page = await call_engine(engine.api, "POST", path, LOAD_TIMEOUT_S, body)
    except TimeoutError:
        return f"no answer on {path} within {LOAD_TIMEOUT_S:g} s"
    except (OSError, HttpBroken, UnexpectedAnswer) as error:
        return str(error) or type(error).__name__
    if status in SUCCESS:
        return None
    return f"HTTP {status} on {path}: {page[:SHOWN_BYTES].decode('utf-8', 'replace')}"


async def _has(engine: EngineClient, adapter: ModelId) -> bool:
    try:
        _, page = await call_engine(engine.api, "GET", MODELS_PATH, LIST_TIMEOUT_S)
        return adapter in read_models(page, engine.api.url).adapters
    except (OSError, HttpBroken, UnexpectedAnswer):
        return False
