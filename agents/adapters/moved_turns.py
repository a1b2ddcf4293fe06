"""Whether an engine moves system turns among the messages of `/v1/messages` to the first one.

vLLM and SGLang do that for models whose template refuses them where they stand, which its
`/tokenize` shows: it renders the same template. The first vLLM that took such turns, 0.23, moved
them for all models.
"""

from typing import Any

import orjson

from agents.adapters.engine_call import UnexpectedAnswer, call_engine
from agents.adapters.http_client import HttpBroken, HttpClient
from schemas.http import TOKENIZE
from schemas.http_statuses import INVALID, NOT_THIS_PATH, OK, UNPROCESSABLE
from schemas.ids import ModelId

ALWAYS = "0.23."
_TURNS = [{"role": role, "content": "1"} for role in ("system", "user") * 2]


async def moves_system_turns(
    api: HttpClient, version: str | None, model: ModelId, timeout_s: float
) -> bool | None:
    """Whether it does; None where the engine did not say. Raises TimeoutError."""
    if version is not None and version.startswith(ALWAYS):
        return True
    plain = await _status(api, {"model": model, "messages": _TURNS[:2]}, timeout_s)
    if plain in NOT_THIS_PATH:
        return False  # no such route, or no template
    if plain != OK:
        return None
    mixed = await _status(api, {"model": model, "messages": _TURNS}, timeout_s)
    if mixed == OK:
        return False
    return True if mixed in (INVALID, UNPROCESSABLE) else None  # only these are the template's


async def _status(api: HttpClient, asked: dict[str, Any], timeout_s: float) -> int | None:
    try:
        status, _ = await call_engine(api, "POST", TOKENIZE, timeout_s, orjson.dumps(asked))
    except TimeoutError:
        raise
    except (OSError, HttpBroken, UnexpectedAnswer):
        return None
    return status
