"""Waiting until the server knows what a client has said."""

from nats.aio.client import Client

from infra import bus


async def flushed(client: Client) -> None:
    """The server has taken in all subscriptions and messages so far, of anybody's client."""
    await bus.flush(client)
