"""Waiting until the server knows what a client has said."""

from nats.aio.client import Client


async def flushed(client: Client) -> None:
    """The server has taken in all subscriptions and messages so far, of anybody's client: twice,
    as nats-py's own first ping may overtake messages that wait [2.16.0]."""
    for _ in range(2):
        await client.flush()
