"""What the mesh promises over every kind of engine, as tests: a class for each kind inherits them.

Each leaves the mesh as it found it: two replicas, ready and idle.
"""

import asyncio
import contextlib
import itertools
import random
import re
from collections.abc import AsyncIterator, Mapping

import aiohttp
import openai
import orjson
import pytest
import pytest_asyncio

from infra.process import end_all
from mesh.replay.client import StreamFault
from mesh.session.continuation import continuation
from mesh.session.said import Said
from schemas.decision import decode_decision
from schemas.http import CHAT, COMPLETIONS, H_DEBUG, H_DECISION
from schemas.state import ReplicaState
from tests.engines import coding_agent, install, route_table, routes
from tests.engines.engine import MODEL, RealEngine
from tests.engines.mesh_over_engines import (
    BY_PREFIX,
    BY_TURNS,
    DONE,
    Asked,
    MeshOverEngines,
    body,
)

WORDS = ("river", "carries", "old", "boats", "past", "quiet", "mills", "weir", "wide", "green")
KEYS = ("", "the-engines-own-key")  # of us-0 and us-1
WAITING = 2
HUNG_ASKED = 12
KILLED_AFTER_BYTES = 1000  # some events
BIAS = 100  # of a token, which is then above all without one
# Each token of the tiny llama's answer leads the next best by 0.005 nats or more. llama.cpp's sums
# depend on how tokens are batched: beside another request it took one that was 0.001 behind.
QUESTIONS = {CHAT: "Say so?", COMPLETIONS: "How one?"}
ENGINE_ENDS_WITHIN_S = 10.0
HUNG_ANSWERED_WITHIN_S = 25.0
KNOWN_ANSWERED_WITHIN_S = 10.0


# What differs from one answer to the next: times, names, and what a cache changes.
_OWN = re.compile(
    rb'"(id|created|content|text|cached_tokens|[a-z_]+_(?:n|ms|second))": ?'
    rb'("(?:[^"\\]|\\.)*"|[0-9.e+-]+)'
)
# vLLM says the first in the last event, which is taken out if it has the token counts; Ollama has
# the second in each event of a completion, where it was asked for them.
_ASKED = re.compile(
    rb',"system_fingerprint":"[^"]*"'
    rb'|,"usage":\{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0\}'
)
FORMS = {CHAT: {"messages": [{"role": "user", "content": "Where are you?"}]}}
FORMS[COMPLETIONS] = {"prompt": "Where are you?"}


def prompt(seed: object, chars: int) -> str:
    """A text like no other; the same for the same seed."""
    dice = random.Random(str(seed))
    text = ""
    while len(text) < chars:
        text += f"{dice.choice(WORDS)} {dice.randrange(10_000)} "
    return text


@contextlib.asynccontextmanager
async def asked_directly(engine: RealEngine, number: int, tokens: int) -> AsyncIterator[None]:
    """So many long streams of a client that goes past the mesh."""

    async def stream(http: aiohttp.ClientSession, text: str) -> None:
        async with http.post(
            f"{engine.url}/v1/chat/completions", data=body(text, tokens)
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    headers = {**engine.headers, "content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http:
        streams = [asyncio.create_task(stream(http, prompt(n, 40))) for n in range(number)]
        try:
            yield
        finally:
            await end_all(streams)


async def streamed(url: str, data: bytes, headers: dict[str, str]) -> bytes:
    """The bytes of an answer."""
    headers = {**headers, "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(url, data=data) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.read()


def _events(stream: bytes) -> list[bytes]:
    """What differs between the events of a stream; those of the same form are once there, as an
    engine puts several tokens into one when its client reads late. Without comments, of which
    there are more where less is cached."""
    alike = _OWN.sub(rb"\1", _ASKED.sub(b"", stream)).split(b"\n\n")
    return [event for event, _ in itertools.groupby(alike) if not event.startswith(b":")]


async def several(mesh: MeshOverEngines, number: int, tokens: int, **options: float) -> list[Asked]:
    """So many at once, placed on all replicas that can be had."""
    texts = [prompt((number, n), 60) for n in range(number)]
    asked = (mesh.ask(text, tokens, priority=BY_TURNS, **options) for text in texts)
    return await asyncio.gather(*asked)


def replicas(answers: list[Asked]) -> set[str | None]:
    assert [str(each) for each in answers if not each.whole] == []
    return {each.replica for each in answers}


class ServedContract:
    """Over engines of any kind. Inherit it in a module with a fixture `mesh` of two equal ones."""

    column: str  # of the table of routes in docs/api.md
    slow_chars = 8000  # of a prompt that keeps the engine from its first token for a while
    slow_prompts = 2  # at once, at least: heartbeats are to see them

    @pytest_asyncio.fixture(loop_scope="module")
    async def sdk(self, mesh: MeshOverEngines) -> AsyncIterator[openai.AsyncOpenAI]:
        url = f"{mesh.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="a-client's", max_retries=0) as client:
            yield client

    async def test_the_official_client_streams(self, mesh, sdk):
        names = {model.id for model in (await sdk.models.list()).data}
        assert names == {MODEL, *mesh.engines["us-0"].further_names}
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Where are you?"}],
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=mesh.engines["us-0"].exact,
        )
        chunks = [chunk async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert sum(bool(choice.delta.content) for choice in choices) > 1
        assert choices[-1].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 24
        assert chunks[-1].usage.prompt_tokens > 0

    async def test_the_official_client_gets_whole_answers(self, mesh, sdk):
        asked = {"model": MODEL, "max_tokens": 8, "extra_body": mesh.engines["us-0"].exact}
        messages = [{"role": "user", "content": "Where are you?"}]
        chat = await sdk.chat.completions.create(messages=messages, **asked)
        assert chat.choices[0].message.content
        assert chat.usage.completion_tokens == 8
        text = await sdk.completions.create(prompt="Where are", **asked)
        assert text.choices[0].text
        assert text.usage.completion_tokens == 8

    @pytest.mark.parametrize("path", FORMS)
    async def test_a_client_that_asked_for_no_token_counts_gets_none_and_they_are_known(
        self, mesh, path
    ):
        engine = mesh.engines["us-0"]
        asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, **engine.exact}
        data = orjson.dumps({**asked, **FORMS[path], "stream": True})
        before = await mesh.tokens()
        directly = await streamed(engine.url + path, data, engine.headers)
        through = await streamed(mesh.url + path, data, {})
        assert _events(through) == _events(directly)
        assert through.endswith(DONE) is engine.ends_done
        prompt_tokens, output_tokens = before
        await mesh.until(lambda: mesh.counted(prompt_tokens + 1, output_tokens + 6), "the counts")
        await mesh.until_ready()

    async def test_an_engine_ends_what_its_client_leaves(self, mesh, sdk):
        engines = mesh.engines.values()
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a long story."}],
            max_tokens=min(engine.context_tokens for engine in engines) - 100,
            stream=True,
            extra_body=mesh.engines["us-0"].exact,
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await mesh.until(lambda: _computes(mesh), "an engine to say that it computes")
        await stream.close()
        async with asyncio.timeout(ENGINE_ENDS_WITHIN_S):
            while await _computes(mesh):
                await asyncio.sleep(0.05)
        await mesh.until_ready()

    async def test_every_route_does_what_the_table_says(self, mesh):
        route_table.check(self.column, await routes.found(mesh))

    async def test_unknown_models_are_refused_with_the_known_ones(self, sdk):
        with pytest.raises(openai.NotFoundError, match=MODEL) as refused:
            await sdk.chat.completions.create(
                model="stranger", messages=[{"role": "user", "content": "Hello"}]
            )
        assert refused.value.code == "model_not_found"

    async def test_a_hung_engine_costs_no_answer(self, mesh):
        clock = asyncio.get_running_loop().time
        async with mesh.engines["us-0"].hung():
            began = clock()
            first = await several(mesh, HUNG_ASKED, 8, within_s=HUNG_ANSWERED_WITHIN_S)
            print(f"{HUNG_ASKED} answered {clock() - began:.1f} s after the hang")
            assert replicas(first) == {"us-1"}
            await mesh.until(
                lambda: mesh.beats["us-0"].state is not ReplicaState.READY, "us-0 to be given up"
            )
            later = await several(mesh, HUNG_ASKED, 8, within_s=KNOWN_ANSWERED_WITHIN_S)
            assert replicas(later) == {"us-1"}
        await mesh.until_ready()
        await mesh.until(lambda: answers_at(mesh, "us-0"), "an answer of us-0")

    @pytest.mark.parametrize("begun", [False, True], ids=["unbegun", "begun"])
    async def test_a_killed_engine_takes_nothing_unbegun_with_it_and_may_come_back(
        self, mesh, begun
    ):
        engine = mesh.engines["us-0"]
        chars, tokens = (60, 96) if begun else (self.slow_chars, 4)
        number = 4 * engine.batch_max if begun else max(engine.batch_max, self.slow_prompts)
        answers, streams = list[Asked](), list[asyncio.Task[None]]()

        def has_work() -> bool:
            """Whether us-0 does; else more are asked: one that was just back is given few."""
            if begun and _begun_at(answers, "us-0"):
                return True
            if not begun and mesh.beats["us-0"].outstanding > 0:
                return True
            if all(stream.done() for stream in streams):
                for _ in range(number):
                    answers.append(asked := Asked())
                    text = prompt((begun, len(answers)), chars)
                    asking = mesh.ask(text, tokens, into=asked, priority=BY_TURNS)
                    streams.append(asyncio.create_task(asking))
            return False

        await mesh.until(has_work, "us-0 to have work")
        await engine.kill()
        try:
            await asyncio.gather(*streams)
            self._only_begun_streams_broke(answers, engine.batch_max)
            await mesh.until(
                lambda: mesh.beats["us-0"].state is not ReplicaState.READY, "us-0 to be given up"
            )
        finally:
            await engine.start()  # the next test needs it
        await mesh.until_ready()
        await mesh.until(lambda: answers_at(mesh, "us-0"), "an answer of us-0")

    def _only_begun_streams_broke(self, answers: list[Asked], batch_max: int) -> None:
        broken = [asked for asked in answers if not asked.whole]
        assert [str(asked) for asked in broken if asked.problem] == []
        assert {asked.replica for asked in broken} <= {"us-0"}
        assert all(asked.begun for asked in broken), list(map(str, broken))
        assert len(broken) <= batch_max


class EngineContract(ServedContract):
    """Over engines that show their load, with the count of cached tokens in their answers."""

    too_long_says = "context"  # of the engine's own answer

    async def test_a_prompt_goes_where_it_is_cached(self, mesh):
        texts = [prompt(("cached", n), 400) for n in range(4)]
        first = [await mesh.ask(text, 4, priority=BY_PREFIX) for text in texts]
        again = [await mesh.ask(text, 4, priority=BY_PREFIX) for text in texts]
        assert replicas(first + again) <= set(mesh.engines)
        for before, after in zip(first, again, strict=True):
            assert after.replica == before.replica, after.decision
            tokens = after.stream.usage.prompt_tokens
            assert (before.stream.usage.cached_tokens or 0) < tokens / 4
            assert after.stream.usage.cached_tokens > tokens / 2

    async def test_a_heartbeat_has_the_engines_own_counts(self, mesh):
        engine = mesh.engines["us-0"]
        tokens = engine.context_tokens // 2
        async with asked_directly(engine, engine.batch_max + WAITING, tokens):
            await mesh.until(lambda: _agree(mesh, "us-0", engine.batch_max, WAITING), "one truth")
            beat = mesh.beats["us-0"]
            assert beat.full
            assert beat.outstanding == 0  # all of it is of others
        await mesh.until(lambda: _agree(mesh, "us-0", 0, 0), "nothing to be computed")
        await mesh.until_ready()

    @pytest.mark.parametrize("form", [{"stream": False, "stream_options": None}, {"stream": True}])
    async def test_a_prompt_that_is_too_long_gets_the_engines_own_answer(self, mesh, form):
        longest = max(engine.context_tokens for engine in mesh.engines.values())
        before = await mesh.placements()
        refused = await mesh.ask(prompt("long", longest * 8), 8, **form)
        if refused.status == 200:  # some begin a stream to say it there
            assert form["stream"]
            assert refused.stream.fault is StreamFault.ERROR_EVENT
        else:
            assert 400 <= refused.status < 600
            assert self.too_long_says in refused.body.decode()
        assert await mesh.placements() - before <= 2
        await mesh.until_ready()


class CodingAgentContract:
    """Over engines that answer `/v1/messages` and count the cached tokens of its prompts."""

    # Whether its later prompts begin like earlier ones; the last is another conversation's, whose
    # version differs where the billing stays. Where the hash in it stays, no prompts are alike.
    begin_alike = (True, True, True, False)

    async def test_what_is_cached_of_a_coding_agents_prompts_is_expected(self, mesh):
        _, *later = await coding_agent.asked(mesh, type(self).__name__)
        coding_agent.check(later)
        assert tuple(found.cached > coding_agent.WITHIN for found in later) == self.begin_alike


class GoesOnContract:
    """Over engines of which one goes on with a stream of another one."""

    @property
    def said_alike(self) -> Mapping[str, object]:
        """Fields with which its tokens are those that their text is read as, and are counted; of
        the tiny llama words for tokens, each with the space before it. SGLang on a busy machine
        sends several tokens in an event."""
        counted = {"include_usage": True, "continuous_usage_stats": True}
        words = {str(token): BIAS for token in install.words_of_llama()}
        return {"logit_bias": words, "stream_options": counted}

    def greedy(self, path: str, tokens: int = 40) -> Said:
        text = QUESTIONS[path]
        asked = {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": tokens}
        form = {CHAT: {"messages": [{"role": "user", "content": text}]}, COMPLETIONS: {}}[path]
        form = form or {"prompt": text}
        return Said(orjson.dumps({**asked, **form, **self.said_alike}), is_chat=path == CHAT)

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    async def test_it_goes_on_with_what_another_engine_said(self, mesh, path):
        """The rest of a greedy answer, whatever was said of it: by the engine alone, as the text
        of several at once depends on how they are batched."""
        engine = mesh.engines["us-0"]
        whole = self.greedy(path)
        stream = await streamed(engine.url + path, whole.body, engine.headers)
        whole.chunks.append(stream)
        whole.read()
        events = stream.split(b"\n\n")
        for count in (2, 9, 17, 30):
            said = self.greedy(path)
            said.chunks += [event + b"\n\n" for event in events[:count]]
            fields, splice = continuation(said)
            rest = await streamed(engine.url + path, orjson.dumps(fields), engine.headers)
            said.chunks.append(splice.joined(rest))
            said.read()
            assert (said.text, said.finished) == (whole.text, whole.finished), count

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    async def test_a_stream_whose_engine_is_killed_is_the_unbroken_one(self, mesh, path):
        asked, got = (self.greedy(path, 300) for _ in range(2))
        engine = mesh.engines["us-1"]
        asked.chunks.append(await streamed(engine.url + path, asked.body, engine.headers))
        asked.read()
        before, is_killed = await mesh.continued(), False
        headers = {H_DEBUG: "1", "content-type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(mesh.url + path, data=got.body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            replica = decode_decision(answer.headers[H_DECISION].encode()).replica
            broken = mesh.engines[replica]
            async for chunk in answer.content.iter_any():
                got.chunks.append(chunk)
                if not is_killed and sum(map(len, got.chunks)) > KILLED_AFTER_BYTES:
                    is_killed = True
                    await broken.kill()
        assert is_killed
        await broken.start()
        await mesh.until_ready()
        got.read()
        assert (got.text, got.finished) == (asked.text, asked.finished)
        assert await mesh.continued() == before + 1


class KeyedEngineContract(EngineContract):
    """Of engines that can ask for a key: us-1 is started with one, which its agent has in a file.

    That all of the above passes says that the agent gives the key with all it asks.
    """

    async def test_an_engine_with_a_key_refuses_other_clients(self, mesh):
        engine = mesh.engines["us-1"]
        url = f"{engine.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            for headers in ({}, {"authorization": "Bearer a-client's"}):
                async with http.post(url, json={"model": MODEL}, headers=headers) as answer:
                    assert answer.status == 401

    async def test_an_agent_takes_the_key_from_its_environment(self, mesh):
        engine = mesh.engines["us-1"]
        async with mesh.another_agent("us-2", engine, MESH_ENGINE_KEY=engine.api_key) as log:
            await mesh.until_ready("us-2")
            await mesh.until(lambda: answers_at(mesh, "us-2"), "an answer of us-2")
            assert engine.api_key not in log.read_text()

    async def test_an_agent_with_a_wrong_key_logs_it_and_gets_no_work(self, mesh):
        engine = mesh.engines["us-1"]
        wrong = "not-the-engines-key"
        async with mesh.another_agent("us-3", engine, *mesh.key_file("us-3", wrong)) as log:
            await mesh.until(lambda: "401" in log.read_text(), "the log to name the reason")
            await mesh.until(lambda: "us-3" in mesh.beats, "a heartbeat of us-3")
            assert mesh.beats["us-3"].state is ReplicaState.STARTING
            assert replicas(await several(mesh, HUNG_ASKED, 8)) <= {"us-0", "us-1"}
            assert wrong not in log.read_text()
        await mesh.until_ready()


async def _computes(mesh: MeshOverEngines) -> bool:
    return any([await engine.computes() for engine in mesh.engines.values()])


async def _agree(mesh: MeshOverEngines, replica: str, running: int, waiting: int) -> bool:
    """Whether the page has these counts, and a heartbeat sent between two looks at it the same."""
    engine = mesh.engines[replica]
    before = await engine.counts()
    seq = mesh.beats[replica].seq
    await mesh.until(lambda: mesh.beats[replica].seq > seq + 2, "three heartbeats")
    beat, after = mesh.beats[replica], await engine.counts()
    if (before.running, before.waiting) != (running, waiting) or before[:2] != after[:2]:
        return False
    if (beat.running, beat.pending) != (running, waiting):
        return False
    if before.kv_used_ratio is None or after.kv_used_ratio is None:
        return beat.kv_used_ratio is None
    lowest, highest = sorted((before.kv_used_ratio, after.kv_used_ratio))
    return beat.kv_used_ratio is not None and lowest <= beat.kv_used_ratio <= highest


async def answers_at(mesh: MeshOverEngines, replica: str) -> bool:
    """Whether one of several requests is answered there; all of them are answered."""
    return replica in replicas(await several(mesh, HUNG_ASKED, 16))


def _begun_at(answers: list[Asked], replica: str) -> bool:
    return any(asked.begun and asked.replica == replica for asked in answers)
