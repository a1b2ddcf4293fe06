"""What our processes show as NATS micro services, to `nats micro ls|info|stats`.

The library would pass an endpoint's requests to a callback, one after another, and count the time
until it returns. Ours come another way and last for minutes, so the process gives the figures. Its
instance is called as in mesh.toml, not by a random id: it shows in listings, and
`nats micro info mesh-agent us-0` finds it.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.service import (
    EndpointInfo,
    EndpointStats,
    Service,
    ServiceConfig,
    ServiceInfo,
    ServiceStats,
)
from nats.nuid import NUID

from infra.process import LimitedLog
from infra.tracing import package_version
from schemas.replies import is_service_reply

log = logging.getLogger(__name__)

NANOSECONDS = 1_000_000_000


class Endpoint(NamedTuple):
    """Where requests come from."""

    name: str
    subject: str
    queue: str


@dataclass(frozen=True, slots=True)
class EndpointFigures:
    """What happened at an endpoint since the process started."""

    requests: int = 0
    errors: int = 0
    ended: int = 0  # of the requests, those that `processing_s` is about
    processing_s: float = 0.0  # of all together, in seconds
    last_error: str = ""
    more: Mapping[str, int] = field(default_factory=dict)  # other counts, by name


class ProcessService(Service):
    """One process as a service with at most one endpoint, whose figures the process gives."""

    def __init__(
        self,
        client: Client,
        kind: str,
        instance: str,
        description: str,
        metadata: dict[str, str],
        endpoint: Endpoint | None = None,
        figures: Callable[[], EndpointFigures] = EndpointFigures,
    ) -> None:
        """`metadata`: may change later. `instance`: alone of its kind in its region."""
        config = ServiceConfig(
            name=kind, version=package_version(), description=description, metadata=metadata
        )
        super().__init__(_answering_services(client), config)
        self._id = instance
        self._endpoint = endpoint
        self._figures = figures

    def info(self) -> ServiceInfo:
        info = super().info()
        if self._endpoint is not None:
            info.endpoints = [EndpointInfo(*self._endpoint)]
        return info

    def stats(self) -> ServiceStats:
        stats = super().stats()
        if self._endpoint is None:
            return stats
        figures = self._figures()
        nanoseconds = round(figures.processing_s * NANOSECONDS)
        stats.endpoints = [
            EndpointStats(
                *self._endpoint,
                num_requests=figures.requests,
                num_errors=figures.errors,
                processing_time=nanoseconds,
                average_processing_time=nanoseconds // max(1, figures.ended),
                last_error=figures.last_error,
                data=dict(figures.more),
            )
        ]
        return stats


class _AnsweringServices:
    """A client for NATS micro services that answers only to reply subjects of services.

    The library's service answers to whatever reply subject a request names.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._limited = LimitedLog(log)
        self._nuid = NUID()
        self.flush = client.flush

    async def subscribe(self, subject: str, cb: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Subscribe, and pass on requests that may be answered."""

        async def guarded(msg: Msg) -> None:
            if is_service_reply(msg.reply):
                await cb(msg)
            else:
                self._limited.warning(
                    "service",
                    "reply subject",
                    "dropped a request on %s: its reply subject %.200r is not allowed",
                    msg.subject,
                    msg.reply,
                )

        return await self._client.subscribe(subject, cb=guarded)


def _answering_services(client: Client) -> Client:
    """The client to give to a service of the library."""
    return cast(Client, _AnsweringServices(client))
