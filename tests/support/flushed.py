"""Waiting until the server knows what a client has said."""

from nats.aio.client import Client


async def flushed(client: Client) -> None:
    """The server has taken in all subscriptions and messages so far.

    Twice, because nats-py writes a ping at once: the first one may overtake what waits to be sent.
    """
    for _ in range(2):
        await client.flush()
