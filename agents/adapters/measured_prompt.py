"""One prompt to the engine, and how long it takes to its first token."""

from collections.abc import Callable

import orjson

from agents.adapters.engine import EngineClient
from agents.adapters.engine_call import JSON_BODY, UnexpectedAnswer, call_engine
from agents.adapters.http_client import HttpBroken
from agents.core.answer_stream import TAIL_BYTES
from agents.core.effects import MeasurePrompt
from agents.core.events import PromptMeasured
from agents.core.usage import read_usage
from schemas.http import COMPLETIONS
from schemas.http_statuses import SUCCESS


async def measured(
    engine: EngineClient, asked: MeasurePrompt, clock: Callable[[], float]
) -> PromptMeasured:
    """The engine's answer, which has one token: it comes when its first token does.

    Cancel it to close the connection, by which engines notice that nobody waits.
    """
    fields = {"model": asked.model, "prompt": asked.prompt, "max_tokens": 1}
    headers, body = engine.addressed(JSON_BODY, orjson.dumps(fields))
    sent_at = clock()
    try:
        status, page = await call_engine(
            engine.api, "POST", COMPLETIONS, asked.limit_s, body, headers
        )
    except TimeoutError:
        return PromptMeasured(problem=f"none within {asked.limit_s:g} s")
    except (OSError, HttpBroken, UnexpectedAnswer) as problem:
        return PromptMeasured(problem=str(problem) or type(problem).__name__)
    if status not in SUCCESS:
        return PromptMeasured(problem=f"HTTP {status}")
    return PromptMeasured(seconds=clock() - sent_at, usage=read_usage(page[-TAIL_BYTES:]))
