"""A real agent beside an engine that fails, is full, and answers again."""

import logging

from schemas.exchange import Outcome
from tests.agents.scene import scene
from tests.agents.scripted_engine import Conversation, plain

BUSY = b"HTTP/1.1 429 Odd\r\nRetry-After: 2\r\nContent-Length: 2\r\n\r\n{}"


async def test_heartbeats_and_log_say_how_requests_ended(nats_server, caplog) -> None:
    answers = [plain(500, b"{}")] * 3 + [plain(200, b"{}"), BUSY] + [plain(200, b"{}")] * 20

    async def script(talk: Conversation) -> None:
        await talk.send(answers.pop(0))

    caplog.set_level(logging.INFO, "agents.runtime.agent")
    async with scene(nats_server, script) as here:
        agent = here.router

        async def ask(number: int) -> str:
            return (await agent.answer(await agent.send_work(number))).outcome

        usual = agent.beats[-1].outstanding_max
        assert agent.beats[-1].results is None
        for number in range(3):
            assert await ask(number) == Outcome.DONE  # the router reads the status
        await agent.until(lambda: getattr(agent.beats[-1].results, "in_a_row", 0) == 3)
        results = agent.beats[-1].results
        assert (results.failed, results.of, results.what) == (3, 3, "HTTP 500")
        await ask(3)
        await agent.until(lambda: agent.beats[-1].results.in_a_row == 0)
        await ask(4)
        await agent.until(lambda: agent.beats[-1].outstanding_max < usual)
        await agent.until(lambda: not agent.beats[-1].full)
        assert 1 <= agent.beats[-1].outstanding_max < usual
        assert await ask(5) == Outcome.DONE
    lines = [record.getMessage() for record in caplog.records]
    assert "us/g0: engine fails: its last 3 requests, HTTP 500" in lines
