"""A router of two workers that serves https: other people's clients, and a certificate that is
replaced under their streams."""

import asyncio
import shutil
import signal
import ssl
from contextlib import AsyncExitStack

import aiohttp
import openai

from tests.mesh.supervisor.test_forked_workers import streams_in_both, two_workers
from tests.support.certificates import made_certificate
from tests.support.scripted_engine import event, hang, say
from tests.support.until import PATIENCE_S

REST = event("late") + b"data: [DONE]\n\n"


async def shown(port: int, ca) -> bool:
    """Whether a new connection is shown a certificate of that authority."""
    context = ssl.create_default_context(cafile=ca)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except ssl.SSLCertVerificationError:
        return False
    writer.transport.abort()
    return True


async def curl(url: str, ca) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--cacert", str(ca), url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_a_certificate_is_replaced_and_no_stream_is_cut(tmp_path, nats_server, monkeypatch):
    old, new = made_certificate(tmp_path / "old"), made_certificate(tmp_path / "new")
    served = [shutil.copy(one, tmp_path) for one in (old.cert, old.key)]
    table = f'tls = {{ cert = "{old.cert.name}", key = "{old.key.name}" }}\n'
    connector = aiohttp.TCPConnector(force_close=True, ssl=old.client)
    async with (
        two_workers(tmp_path, nats_server, table=table) as (router, engine, _),
        aiohttp.ClientSession(connector=connector) as session,
    ):
        gate = asyncio.Event()
        engine.behaviour = hang(event("first"), gate)
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            begun = await streams_in_both(router, session, stack)

            # A file with half of a pair changes nothing.
            shutil.copy(new.cert, served[0])
            router.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(PATIENCE_S):
                while b"not taken over" not in await router.process.stderr.readline():
                    pass
            assert await shown(router.http_port, old.ca)

            shutil.copy(new.key, served[1])
            router.process.send_signal(signal.SIGHUP)
            in_row = 0  # both workers have taken it: the kernel chooses one for each connection
            while in_row < 12:
                in_row = in_row + 1 if await shown(router.http_port, new.ca) else 0
                await asyncio.sleep(0.01)
            gate.set()
            for answer in begun:
                assert await answer.content.read() == REST

            engine.behaviour = say("hello")
            monkeypatch.setenv("SSL_CERT_FILE", str(new.ca))
            async with openai.AsyncOpenAI(
                base_url=router.url + "/v1", api_key="unused", max_retries=0
            ) as api:
                assert [one.id async for one in api.models.list()] == ["tiny"]
                answer = await api.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "hello"}]
                )
                assert answer.choices[0].message.content == "hello"
            status, said = await curl(router.url + "/health", old.ca)
            assert status != 0 and "certificate" in said
            status, said = await curl(router.url.replace("https", "http") + "/health", new.ca)
            assert status == 0 and "https://" in said
