"""What `mesh up` says of a nats-server that hangs, and of one that answers again."""

import asyncio
import os
import signal

from mesh.demo import stream_checks
from mesh.demo.stream_checks import keep_checking
from tests.support.until import until


async def test_a_server_that_hangs_is_named_once_and_so_is_its_return(
    nats_server, caplog, monkeypatch
):
    monkeypatch.setattr(stream_checks, "GREETING_S", 2.5)  # more than a pause of this process
    set_up: list[None] = []

    async def note() -> None:
        set_up.append(None)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    checks = asyncio.create_task(keep_checking({"nats-us": nats_server.url}, note, 0.01))
    await until(lambda: len(set_up) > 1)
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        await until(lambda: bool(said()))
        before = len(set_up)
        await asyncio.sleep(3.0)  # one check more, at least
        assert len(set_up) == before
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await until(lambda: len(said()) > 1)
    await until(lambda: len(set_up) > before)
    checks.cancel()
    hung, back = said()
    assert hung.startswith("nats-us hangs or is stopped: it accepts connections and sends nothing")
    assert back == "nats-us answers again"
