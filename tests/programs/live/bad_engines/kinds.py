"""The misbehaviours, each an engine whose one part is broken. The name is the table's row."""

import asyncio

from aiohttp import web

from tests.programs.live.bad_engines.engine import MODEL, TOKENS, Asked, Engine

LONG_S = 3600.0


def fails(status: int, **headers: str) -> type[Engine]:
    """Answers each request at once with this status."""

    class Fails(Engine):
        async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
            error = {"error": {"message": "no", "type": "error", "code": status}}
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.json_response(error, status=status, headers=given)

    return Fails


def page_fails(status: int) -> type[Engine]:
    """Its metrics page has this status; it computes well."""

    class PageFails(Engine):
        async def page(self, request: web.Request) -> web.StreamResponse:
            return web.Response(status=status) if self.is_bad else await super().page(request)

    return PageFails


class ErrorFirst(Engine):
    """200, then an error event as the first one, or as the whole body."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        error = b'{"error":{"message":"EngineDeadError","type":"InternalServerError","code":500}}'
        if not asked.is_stream:
            return web.Response(body=error, status=500, content_type="application/json")
        stream = await self.opened(request)
        await stream.write(b"data: " + error + b"\n\ndata: [DONE]\n\n")
        return stream


class Empty(Engine):
    """200 with an empty body."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        return await self.opened(request) if asked.is_stream else web.Response()


class Resets(Engine):
    """Resets each connection that brings a request."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


class Silent(Engine):
    """Takes requests and never answers; its page tells of them, its counters stand."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        async with self.place():
            await asyncio.sleep(LONG_S)
        return web.Response()


class SilentWithoutPage(Silent):
    """The same of an engine whose kind has no metrics page."""

    kind = "openai"


class FrozenWithComments(Engine):
    """Computes nothing and sends a comment each second, as vLLM's keep-alive option does. Its page
    stands."""

    beat = b": keep-alive\n\n"

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        stream = await self.opened(request)
        while True:
            await stream.write(self.beat)
            await asyncio.sleep(1.0)


class FrozenWithRoles(FrozenWithComments):
    """The same with a chunk that has a role and no content."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        self.beat = asked.chunk({"role": "assistant", "content": ""})
        return await super().answer(request, asked)


class FreezesAll(Engine):
    """Stops in the middle of every running answer, with comments from then on."""

    async def compute(self, seconds: float) -> None:
        await asyncio.sleep(LONG_S if self.is_bad else seconds)


class Slow(Engine):
    """Takes ten times as long for each token."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self.token_s *= 10


class SlowFirst(Engine):
    """Takes three seconds to the first token."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self.prefill_s = 3.0


class Narrow(Engine):
    """Computes one request at a time and tells it in its page."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self.at_once, self.prefill_s = 1, 0.5


class GaugesSayIdle(Narrow):
    """The same, with gauges that say that nothing runs and nothing waits."""

    async def page(self, request: web.Request) -> web.StreamResponse:
        running, waiting = self.running, self.waiting
        if self.is_bad:
            self.running = self.waiting = 0
        try:
            return await super().page(request)
        finally:
            self.running, self.waiting = running, waiting


class GaugesSayFull(Engine):
    """Healthy, with gauges that say that fifty requests wait."""

    async def page(self, request: web.Request) -> web.StreamResponse:
        self.waiting += (more := 50 if self.is_bad else 0)
        try:
            return await super().page(request)
        finally:
            self.waiting -= more


class GaugesAreAbsurd(Engine):
    """Healthy, with values that no engine has."""

    async def page(self, request: web.Request) -> web.StreamResponse:
        if not self.is_bad:
            return await super().page(request)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        values = ("NaN", "-1", "1e300")
        lines = (
            f'vllm:{n}{{model_name="{MODEL}"}} {v}\n' for n, v in zip(names, values, strict=True)
        )
        return web.Response(text="".join(lines))


class PageIsGarbage(Engine):
    """Its page is HTML, as a proxy's login is."""

    async def page(self, request: web.Request) -> web.StreamResponse:
        if not self.is_bad:
            return await super().page(request)
        return web.Response(text="<html><body>Sign in</body></html>", content_type="text/html")


class PageHangs(Engine):
    """Its page never comes."""

    async def page(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(LONG_S if self.is_bad else 0.0)
        return await super().page(request)


class ModelsFail(Engine):
    """Its list of models answers 503; it computes well."""

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503) if self.is_bad else await super().models(request)


class CutAtBorder(Engine):
    """Ends each stream cleanly between two events, half way."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if not asked.is_stream:
            return await self.good(request, asked)
        async with self.place():
            await self.compute(self.prefill_s)
            stream = await self.opened(request)
            for number in range(TOKENS // 2):
                await self.write_token(stream, asked, number)
            return stream


class CutInside(CutAtBorder):
    """Resets each stream half way."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        stream = await super().answer(request, asked)
        if asked.is_stream and request.transport is not None:
            request.transport.abort()
        return stream


class BrokenJson(Engine):
    """Half of the JSON of each answer that is not streamed, well framed."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.is_stream:
            return await self.good(request, asked)
        whole = asked.whole()
        return web.Response(body=whole[: len(whole) // 2], content_type="application/json")


class RoleFirst(Narrow):
    """Sends the role at once and the first content when the request's turn has come."""

    kind = "openai"

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if not asked.is_stream:
            return await self.good(request, asked)
        stream = await self.opened(request)
        await stream.write(asked.chunk({"role": "assistant", "content": ""}))
        async with self.place():
            await self.compute(self.prefill_s)
            for number in range(TOKENS):
                await self.write_token(stream, asked, number)
        await stream.write(asked.chunk({}, "stop") + b"data: [DONE]\n\n")
        return stream


class NeverStops(Narrow):
    """Computes an answer to its end though its client has left."""

    kind = "openai"

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        return await asyncio.shield(asyncio.create_task(self.good(request, asked)))


class Restarts(Engine):
    """Is killed, comes back after three seconds, and answers 500 from then on."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self._task = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        await self.stop()
        await asyncio.sleep(3.0)
        await self.start()

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.json_response({"error": {"message": "not initialised"}}, status=500)


class Killed(Engine):
    """Is killed and does not come back."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self._task = asyncio.create_task(self.stop())


class OtherModel(Engine):
    """Serves another model than it did, under another name; 404 for the old one."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self.model = "another"

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        error = {"error": {"message": f"The model `{MODEL}` does not exist.", "code": 404}}
        return web.json_response(error, status=404)


class Loads(Engine):
    """Loads its model for 95 s at the first request, without a word."""

    kind = "openai"

    def turn_bad(self) -> None:
        super().turn_bad()
        self._loaded = asyncio.Event()

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if len(self.seen) == 1:
            asyncio.get_running_loop().call_later(95.0, self._loaded.set)
        await self._loaded.wait()
        return await self.good(request, asked)


class HugeEvents(Engine):
    """Sends events of 1 MiB."""

    async def write_token(self, stream: web.StreamResponse, asked: Asked, number: int) -> None:
        if self.is_bad:
            await stream.write(b": " + b"x" * 1024 * 1024 + b"\n\n")
        await super().write_token(stream, asked, number)


class WithoutDone(Engine):
    """Healthy, but its streams end without `[DONE]`."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if not asked.is_stream:
            return await self.good(request, asked)
        stream = await self.opened(request)
        async with self.place():
            await self.compute(self.prefill_s)
            for number in range(TOKENS):
                await self.write_token(stream, asked, number)
        await stream.write(asked.chunk({}, "stop"))
        return stream


class LoginPage(Engine):
    """200 with the HTML of a login, as a proxy's."""

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        return web.Response(text="<html>Sign in</html>", content_type="text/html")


KINDS: dict[str, type[Engine]] = {
    "fails at once with 500": fails(500),
    "fails at once with 502": fails(502),
    "fails at once with 503": fails(503),
    "fails at once with 400": fails(400),
    "fails at once with 401": fails(401),
    "fails at once with 404": fails(404),
    "429 with Retry-After: 2": fails(429, retry_after="2"),
    "429 without Retry-After": fails(429),
    "error as the first event": ErrorFirst,
    "200 without a body": Empty,
    "200 with a login page": LoginPage,
    "resets each request": Resets,
    "takes requests, never answers": Silent,
    "the same, without a metrics page": SilentWithoutPage,
    "never answers, sends comments": FrozenWithComments,
    "never answers, sends roles": FrozenWithRoles,
    "stops inside every answer": FreezesAll,
    "ten times slower tokens": Slow,
    "three seconds to each first token": SlowFirst,
    "one request at a time": Narrow,
    "the same, gauges say idle": GaugesSayIdle,
    "gauges say that fifty wait": GaugesSayFull,
    "gauges say NaN, -1, 1e300": GaugesAreAbsurd,
    "metrics page 503": page_fails(503),
    "metrics page 401": page_fails(401),
    "metrics page is HTML": PageIsGarbage,
    "metrics page never comes": PageHangs,
    "/v1/models 503": ModelsFail,
    "streams cut at an event": CutAtBorder,
    "streams reset half way": CutInside,
    "half of the JSON": BrokenJson,
    "role first, content after its queue": RoleFirst,
    "computes on after its client left": NeverStops,
    "killed, back after 3 s with 500s": Restarts,
    "killed": Killed,
    "serves another model": OtherModel,
    "loads for 95 s": Loads,
    "events of 1 MiB": HugeEvents,
    "streams without [DONE]": WithoutDone,
}
