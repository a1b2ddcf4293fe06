"""Before a region is examined: does its nats-server answer at all?

A nats-server speaks first: it greets whoever connects. One look at that takes the place of all
logins that would fail, and its limit is what a dead region costs. A server that was stopped still
gets its connections from the kernel, so a connection alone says little.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

NATS_PORT = 4222
GREETING = b"INFO "


class NothingRuns(ConnectionError):
    """Nobody listens at any of the addresses; the message names them."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A server that does not answer. `listens`: somebody takes connections there."""

    url: str
    why: str
    listens: bool


async def silence_at(url: str, answer_s: float) -> Silence | None:
    """None if a nats-server greets there within `answer_s` seconds, else what it does instead."""
    parts, listens = urlsplit(url), False
    try:
        async with asyncio.timeout(answer_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or NATS_PORT)
            listens = True
            try:
                greeting = await reader.readexactly(len(GREETING))
            finally:
                writer.close()
    except TimeoutError:
        why = f"it takes connections and says nothing for {answer_s:g} s"
        return Silence(url, why if listens else f"no connection within {answer_s:g} s", listens)
    except asyncio.IncompleteReadError:
        return Silence(url, "it closes connections without a word", listens=True)
    except ConnectionRefusedError:
        return Silence(url, "nobody listens there", listens=False)
    except OSError as error:
        return Silence(url, str(error), listens)
    return None if greeting == GREETING else Silence(url, "no nats-server speaks there", listens)
