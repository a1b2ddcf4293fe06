"""A region's HTTP face in a few lines: it is ready or not, slow or not, and knows others."""

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web


class Face:
    """Its answers to `/ready` and `/v1/regions` are what a test says; `asked` counts chats."""

    def __init__(self):
        self.ready, self.delay_s, self.status = True, 0.0, 200
        self.others: object = {"object": "list", "data": []}
        self.asked = 0
        self.url = ""

    async def answer(self, request):
        if request.path == "/prefix/ready":
            await asyncio.sleep(self.delay_s)
            return web.Response(status=200 if self.ready else 503)
        if request.path == "/prefix/v1/regions":
            return web.json_response(self.others)
        self.asked += 1
        return web.Response(text=self.url, status=self.status, headers={"retry-after": "1"})


@asynccontextmanager
async def face():
    """A running one."""
    made = Face()
    runner = web.ServerRunner(web.Server(made.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/prefix/v1"
    made.close = runner.cleanup
    try:
        yield made
    finally:
        await runner.cleanup()
