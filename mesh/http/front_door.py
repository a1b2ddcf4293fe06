"""What the HTTP side needs from the router behind it.

The HTTP side admits a request with a callback; the session changes its record and calls back. A
request is settled once: with bytes to stream, with an engine's own error, or with a failure of the
router's.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from infra.tenant_table import Caller
from mesh.core.model.geo import GeoLocation
from mesh.http.read_request import BodyBudget, ParsedRequest
from mesh.session.client_request import ClientRequest
from schemas.http import Fault, Readiness, Region
from schemas.ids import ModelId
from schemas.residency import Labels
from schemas.state import ModelCard

if TYPE_CHECKING:
    from mesh.adapters.ended_requests import EndedRequests


class FrontDoor(Protocol):
    """What the HTTP side needs from the router behind it."""

    @property
    def bodies(self) -> BodyBudget:
        """What requests may keep in memory together."""

    @property
    def ended(self) -> "EndedRequests":
        """Told of requests that end without having been admitted."""

    def models(self) -> tuple[ModelId, ...]:
        """Models that a ready replica serves."""

    def model_card(self, model: ModelId) -> ModelCard:
        """The model as an engine describes it."""

    def unknown_model(self, model: str, caller: Caller | None) -> str:
        """The error for a model that is not there, which names some that the caller may name."""

    def has_listened(self) -> bool:
        """Whether replicas have had time to be heard: not where the router has just started."""

    def names_of(self, parsed: ParsedRequest) -> Collection[ModelId]:
        """Of what may serve the request: any of them."""

    def may_hear_of(self, names: Collection[ModelId]) -> bool:
        """Whether none of them is known, and one may be heard of yet."""

    def regions(self, near: GeoLocation | None) -> tuple[Region, ...]:
        """The regions as this router sees them, nearest first."""

    def not_ready_because(self) -> tuple[Fault, str] | None:
        """Why requests can't be placed at present, or None if they can."""

    def readiness(self) -> Readiness:
        """Whether this router knows the replicas' caches, and since when."""

    def residency(self, wanted: Labels, caller: Caller | None) -> Labels:
        """The labels that limit its request. Raises RequestRefused if they exclude all."""

    def admit(
        self,
        parsed: ParsedRequest,
        headers: Mapping[str, str],
        caller: Caller | None,
        changed: Callable[[], None],
    ) -> ClientRequest:
        """Take that caller's request in and place it; `bodies` was charged for it. `caller`: None
        where callers are not told apart.

        `changed` becomes the request's, and may be called before this returns. Raises
        RequestRefused if its model, labels or key forbid it; then nothing stays charged.
        """

    def started(self, request: ClientRequest) -> None:
        """The client is being sent the first byte."""

    def passed(self, request: ClientRequest) -> None:
        """Bytes have left for the client."""

    def finished(self, request: ClientRequest) -> None:
        """The whole answer has left for the client."""

    def failed(self, request: ClientRequest) -> None:
        """The client was sent `request.failure`, or the engine's own error. What is still under way
        for it is cancelled."""

    def leave(self, request: ClientRequest) -> None:
        """The client is gone; without effect after `finished` or `failed`."""
