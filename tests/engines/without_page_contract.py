"""What the mesh promises over engines that show nothing of their load, as tests."""

import asyncio
import functools

import aiohttp

from schemas.http import CHAT
from schemas.state import ReplicaState
from tests.engines.contract import ServedContract, answers_at, prompt
from tests.engines.engine import MODEL
from tests.engines.mesh_over_engines import MeshOverEngines

LEAVE_S = 2.0
TRIES = 5  # some answers are over by then: Ollama ends one that repeats a token 30 times


class WithoutPageContract(ServedContract):
    left_tokens = 1000  # of an answer that takes longer than its client stays

    async def test_a_plain_answer_that_is_left_counts_as_long_as_it_may_be_computed(self, mesh):
        engines = mesh.engines.values()
        async with aiohttp.ClientSession() as http:
            for number in range(TRIES):
                text = prompt(("left", number), 60)
                asked = {"model": MODEL, "max_tokens": self.left_tokens}
                asked["messages"] = [{"role": "user", "content": text}]
                asking = asyncio.create_task(http.post(mesh.url + CHAT, json=asked))
                await asyncio.sleep(LEAVE_S)
                if not asking.done():
                    break
            assert not asking.done(), await asking.result().text()
            asking.cancel()
            await asyncio.wait([asking])
        await asyncio.sleep(LEAVE_S)
        goes_on = any([await engine.computes() for engine in engines])
        assert goes_on is mesh.engines["us-0"].computes_what_is_left
        assert any(beat.running for beat in mesh.beats.values())
        for engine in engines:  # rather than wait for its end
            await engine.kill()
            await engine.start()
        await mesh.until(lambda: _are_ready(mesh), "both to be ready again")
        for replica in mesh.engines:
            await mesh.until(
                functools.partial(answers_at, mesh, replica), f"an answer of {replica}"
            )
        await mesh.until_ready()


def _are_ready(mesh: MeshOverEngines) -> bool:
    return all(mesh.beats[replica].state is ReplicaState.READY for replica in mesh.engines)
