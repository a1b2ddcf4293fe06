"""An engine by https whose certificate is of a private authority."""

import time

import pytest
from aiohttp import web

from agents.adapters.engine import EngineClient
from agents.adapters.engine_kinds import KINDS
from agents.core.events import EngineScraped, ScrapeFailed
from tests.support.certificates import made_certificate


@pytest.fixture
async def engine(tmp_path):
    made = made_certificate(tmp_path)
    app = web.Application()
    models = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response(models)

    app.router.add_get("/v1/models", list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=made.tls.context)
    await site.start()
    yield made, f"https://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def scraped(url: str) -> EngineScraped | ScrapeFailed:
    client = EngineClient(url, f"{url}/metrics", KINDS["openai"], time.monotonic)
    try:
        return await client.scrape()
    finally:
        client.close()


async def test_its_authority_comes_from_the_environment(engine, monkeypatch):
    made, url = engine
    found = await scraped(url)
    assert isinstance(found, ScrapeFailed)
    assert "certificate" in found.detail.lower()
    monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
    assert isinstance(await scraped(url), EngineScraped)
