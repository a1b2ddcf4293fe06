"""A conversation in the shape of Claude Code's requests, asked through the mesh: how much of each
prompt the router expects to be cached, and how much the engine found.

The shape is that of version 2.1.332, with shorter texts: the system prompt is blocks, the first of
which names the billing, with a suffix that is the conversation's and a hash that is the request's;
system turns stand among the messages. Tools are left out: the tests' models have templates without
them.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import pytest

from schemas.decision import decode_decision
from schemas.http import H_DEBUG, H_DECISION, H_PRIORITY, MESSAGES
from tests.engines.engine import MODEL
from tests.engines.mesh_over_engines import BY_PREFIX, MeshOverEngines

SYSTEM_CHARS, TURN_CHARS = 1200, 350
WITHIN_S = 60.0
WITHIN = 0.2  # of a prompt, whose tokens the router estimates by its bytes
CACHED, NEWLY_CACHED = "cache_read_input_tokens", "cache_creation_input_tokens"
WORDS = ("read", "the", "file", "and", "tell", "which", "tests", "fail", "before", "you", "change")
Turn = Mapping[str, Any]


class Found(NamedTuple):
    """Of one prompt: its tokens, those that the router expected to be cached, those that were."""

    tokens: int
    expected: int
    cached: int


class Shares(NamedTuple):
    """Of one prompt: the part that the router expected to be cached, and the part that was."""

    expected: float
    cached: float


def text(seed: object, chars: int) -> str:
    """The same for the same seed."""
    dice = random.Random(str(seed))
    words = ""
    while len(words) < chars:
        words += f"{dice.choice(WORDS)} {dice.randrange(1000)} "
    return words


class CodingAgent:
    """One conversation. `seed`: of its own words; `system_seed`: of the system prompt's."""

    def __init__(self, mesh: MeshOverEngines, seed: object, system_seed: object) -> None:
        self._mesh, self._seed = mesh, seed
        self._system, self._dice = text(system_seed, SYSTEM_CHARS), random.Random(str(seed))
        self._suffix = f"{self._dice.randrange(16**3):03x}"
        self.turns: list[Turn] = [self._user(), self.note()]

    def _user(self) -> Turn:
        words = text(self._dice.random(), TURN_CHARS)
        return {"role": "user", "content": [{"type": "text", "text": words}]}

    def note(self) -> Turn:
        """A system turn: the environment as the first one, later ones remind of something."""
        return {"role": "system", "content": f"It is {self._dice.randrange(10**6)} s past noon."}

    def go_on(self, *more: Turn) -> None:
        """The next turn: an answer, the user's words, and these turns."""
        answer = {"role": "assistant", "content": text(self._dice.random(), TURN_CHARS)}
        self.turns += [answer, self._user(), *more]

    async def ask(self) -> Shares:
        """Ask it twice: all of the second one is expected, by which the router counts tokens."""
        request = f"{self._dice.randrange(16**5):05x}"
        first, again = await self._ask(request), await self._ask(request)
        return Shares(first.expected / again.expected, first.cached / first.tokens)

    async def _ask(self, request: str) -> Found:
        version = f"cc_version=2.1.332.{self._suffix}; cc_entrypoint=cli"
        billing = f"x-anthropic-billing-header: {version}; cch={request};"
        body = {
            "model": MODEL,
            "max_tokens": 2,
            "system": [{"type": "text", "text": words} for words in (billing, self._system)],
            "messages": self.turns,
        }
        headers = {H_DEBUG: "1", H_PRIORITY: BY_PREFIX}
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
            http.post(self._mesh.url + MESSAGES, json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
            decision = decode_decision(answer.headers[H_DECISION].encode())
        [place] = (each for each in decision.candidates if each.name == decision.replica)
        cached = usage.get(CACHED) or 0
        tokens = usage["input_tokens"] + cached + (usage.get(NEWLY_CACHED) or 0)
        return Found(tokens, place.matched_tokens or 0, cached)


async def asked(mesh: MeshOverEngines, seed: object) -> Sequence[Shares]:
    """Of a first prompt; its next turn; one with another system turn; the one after that; the first
    prompt of another conversation of the same agent."""
    one, other = (CodingAgent(mesh, (seed, n), seed) for n in range(2))
    found = [await one.ask()]
    for more in [], [one.note()], []:
        one.go_on(*more)
        found.append(await one.ask())
    return [*found, await other.ask()]


def check(found: Sequence[Shares]) -> None:
    """That as much was expected as there was."""
    expected = [each.expected for each in found]
    assert expected == [pytest.approx(each.cached, abs=WITHIN) for each in found]
