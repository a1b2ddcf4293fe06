"""The speed that an agent finds by a probe, beside first tokens as engines' clients see them."""

import random
import time

import aiohttp

from agents.core.made_up_text import made_up_text
from schemas.http import COMPLETIONS
from schemas.state import PrefillPrior
from tests.engines.engine import MODEL, RealEngine
from tests.engines.mesh_over_engines import MeshOverEngines

TIMES = 3
WORDS = 32
FACTOR = 5.0  # each is measured in a few prompts, on a machine that may do other work meanwhile


async def check(mesh: MeshOverEngines) -> None:
    """One more agent beside us-0's engine predicts a short and a long prompt's first token."""
    engine = mesh.engines["us-0"]
    async with mesh.another_agent("us-2", engine, "--speed-probe") as log:
        found: list[PrefillPrior] = []

        def reported() -> bool:
            beat = mesh.beats.get("us-2")
            if beat is not None and beat.prefill_prior is not None:
                found.append(beat.prefill_prior)
            return bool(found)

        await mesh.until(reported, "a prior of us-2")
        assert "by a probe while it was idle" in log.read_text()
    prior = found[0]
    _, short_tokens = short = await first_token(engine, WORDS)
    long_tokens = prior.short_tokens + prior.more_tokens
    long = await first_token(engine, WORDS * long_tokens // short_tokens)
    for seconds, tokens in (short, long):
        predicted_s = prior.base_s + tokens * prior.s_per_token
        print(f"{tokens} tokens: {seconds:.3f} s, predicted {predicted_s:.3f} s")
        assert seconds / FACTOR < predicted_s < seconds * FACTOR


async def first_token(engine: RealEngine, words: int) -> tuple[float, int]:
    """The quickest of some, and how many tokens its prompt had."""
    found = []
    async with aiohttp.ClientSession(headers=engine.headers) as http:
        for _ in range(TIMES):
            prompt = made_up_text(random.Random(), words)
            asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            began = time.monotonic()
            async with http.post(engine.url + COMPLETIONS, json=asked) as answer:
                assert answer.status == 200, await answer.text()
                usage = (await answer.json())["usage"]
            found.append((time.monotonic() - began, usage["prompt_tokens"]))
    return min(found)
