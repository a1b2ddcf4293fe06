"""The regions as this router sees them: what `/v1/regions` answers and client helpers read.

The own region is shown by the digest that it publishes, so that every region is described by the
same fields; peers by their digests, the gaps between them, and pings. Unknown values are null.
"""

from collections.abc import Callable, Sequence
from math import inf, isfinite

from mesh.adapters.bus import RouterBus
from mesh.core.model.geo import GeoLocation, distance_km, rtt_estimate_s
from mesh.core.model.served_names import is_model
from mesh.core.view.peers import Peer, PeerTable
from mesh.runtime.config import RegionEntry, RouterConfig
from schemas import http
from schemas.ids import RegionId
from schemas.state import Digest, Health

NOWHERE = RegionEntry()


class Regions:
    """One router's view. `published` gets every digest that this router publishes."""

    def __init__(
        self,
        config: RouterConfig,
        peers: PeerTable,
        bus: RouterBus,
        clock: Callable[[], float],
        routing: Callable[[], http.Routing],
    ) -> None:
        self._config = config
        self._routing = routing
        self._peers = peers
        self._bus = bus
        self._clock = clock
        self._own: Digest | None = None

    def reconfigure(self, config: RouterConfig) -> None:
        """Show endpoints and locations as this has them."""
        self._config = config

    def published(self, digest: Digest) -> None:
        self._own = digest

    def seen(self, near: GeoLocation | None) -> tuple[http.Region, ...]:
        """All of them, the nearest first: to this router, or to `near` by the great circle."""
        regions = [self._home(near), *(self._peer(name, near) for name in self._config.peers)]
        return tuple(sorted(regions, key=_distance if near is not None else _round_trip))

    def _home(self, near: GeoLocation | None) -> http.Region:
        health = Health.GREEN if self._bus.is_connected else Health.RED
        digests = () if self._own is None else (self._own,)
        return self._region(self._config.region, health, digests, near, rtt_s=0.0)

    def _peer(self, name: RegionId, near: GeoLocation | None) -> http.Region:
        now = self._clock()
        peer = self._peers.get(name) or Peer()
        silent_s = now - peer.seen_at
        return self._region(
            name,
            self._peers.health(peer, now),
            tuple(peer.digests.values()),
            near,
            heard_s=silent_s if isfinite(silent_s) else None,
            rtt_s=peer.rtt_s,
            jitter_s=peer.pings.jitter_s,
            loss_ratio=peer.pings.loss_ratio,
        )

    def _region(
        self,
        name: RegionId,
        health: Health,
        digests: Sequence[Digest],
        near: GeoLocation | None,
        *,
        rtt_s: float | None,
        heard_s: float | None = None,
        jitter_s: float | None = None,
        loss_ratio: float | None = None,
    ) -> http.Region:
        entry = self._config.entries.get(name, NOWHERE)
        km = None
        if near is not None and entry.location is not None:
            km = distance_km(near, entry.location)
        served = (model for digest in digests for model, has in digest.models.items() if has.ready)
        return http.Region(
            name=name,
            home=name == self._config.region,
            health=health,
            heard_s=heard_s,
            rtt_s=rtt_s,
            jitter_s=jitter_s,
            loss_ratio=loss_ratio,
            accepting=any(digest.accepting for digest in digests),
            replicas_ready=max((digest.replicas_ready for digest in digests), default=0),
            replicas_free=max((digest.replicas_free for digest in digests), default=0),
            queue=sum(digest.queue for digest in digests),
            models=tuple(sorted(set(filter(is_model, served)))),
            endpoint=entry.endpoint,
            routing=self._routing() if name == self._config.region else None,
            location=None if entry.location is None else http.Location(*entry.location),
            distance_km=km,
            rtt_estimate_s=None if km is None else rtt_estimate_s(km),
        )


def _round_trip(region: http.Region) -> tuple[float, str]:
    return inf if region.rtt_s is None else region.rtt_s, region.name


def _distance(region: http.Region) -> tuple[float, str]:
    return inf if region.distance_km is None else region.distance_km, region.name
