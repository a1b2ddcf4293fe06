"""Who hands work to a region's replicas: its own routers, or, when all are gone, one peer's.

Theory of operation. Each region has a lease (`lease.py`) in a stream on its own nats-server,
which goes on when the routers are gone. Any router of the region renews it in the region's name,
four times a lease. A peer may *adopt* the region when two things have come together: no digest of
its routers is heard, and nobody has written the lease for as long as it lasts. A link that is cut
shows both, but then the stream can't be reached either, and nothing is adopted; a stream that has
stopped shows the second alone.

The nearest living region goes first: it claims at once, and every other one waits a step for each
living region that is nearer, by the round trips that digests tell. Who is first does not matter
for safety; the stream takes one of them. The adopter listens to the heartbeats of the region,
places work on its replicas like on its own, counts them in its digest, and renews its lease. It
lets go of them at once when it hears that somebody else has written the lease, when its own last
write is as old as a lease, when it shuts down, and when the region's routers have been heard for a
whole lease (they may be too old to know of leases).

A region's own routers take the lease back at once, whoever holds it. They serve without one as
long as they know of no other owner: where nobody can write the stream, nobody else owns either.
All of a region's routers own alike: an adopter's sibling joins by a renewal of its own.
A region that is confined to labels claims none that carries no such label: whatever it would place
there it could not send, and others can.

That leaves what two of them may do inside one lease, one of them not knowing of the other yet.
Routers say the terms of their leases with every sign of life, and an agent refuses work of any
other region than the one that said the highest (`agents/core/routers.py`).

Rejected: a leader of each region or of the mesh (the request path would wait for elections);
leases that the stream drops by age (the age is judged by the wall clock of the server's host, and
with the message goes the term); reading the stream across links (JetStream's API in the allow-list
for what the stream can say by itself). Source: SkyWalker, section 4.2, whose central controller
this does without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, Protocol

from mesh.core.membership.lease import LeaseState
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.view.peers import PeerTable
from schemas.ids import RegionId, RouterId
from schemas.state import Digest, Lease

# Parts of a lease.
RENEW = 0.25  # three renewals may be lost
# An adopter's routers write by themselves, one each: more seldom, as they may meet; at the latest
# when so much of it is left.
RENEW_ADOPTED = 0.6
SILENCE = 0.5  # without a digest, which comes every 0.1 s: the region may be gone
STEP = 0.15  # a farther region gives a nearer one so long to claim: a wide round trip
JITTER = 0.03
START_LEASES = 3.0  # a router that has just started has heard nothing yet, of anybody


class ReplicaControl(Protocol):
    """What becomes of the replicas."""

    def adopt(self, region: RegionId, now: float) -> None:
        """From now on they are this region's."""

    def hand_back(self, region: RegionId, now: float) -> None:
        """They are not any more; what is under way there goes on."""


@dataclass(slots=True)
class Watched:
    """A peer region's signs of life, beside its lease."""

    heard_at: float  # a digest of a router that takes requests
    back_since: float = inf  # heard of again after we adopted it
    jitter_s: float | None = None  # drawn once each time it falls silent


class Ownership:
    """One router's. Without peers, or with a lease of 0 s, nobody claims anything."""

    def __init__(
        self,
        *,
        home: RegionId,
        router: RouterId,
        peers: tuple[RegionId, ...],
        settings: RouterSettings,
        table: PeerTable,
        dice: Random,
        effects: list[fx.Effect],
        control: ReplicaControl,
        owned: dict[RegionId, int],
    ) -> None:
        """`owned`: filled with the regions that this one owns by a lease, each with its term."""
        self._home, self._router = home, router
        self._lease_s = settings.lease_s
        self._ground = settings.ground
        self._table = table
        self._dice = dice
        self._effects = effects
        self._control = control
        regions = (home, *peers) if peers and settings.lease_s else ()
        self._leases = {region: LeaseState(region) for region in regions}
        self._watched: dict[RegionId, Watched] = {}
        # Peer regions whose replicas are this region's, each with its lease's term, by name. A new
        # dict with every change.
        self.adopted: dict[RegionId, int] = {}
        self.owned = owned  # those and home; agents know these terms
        self.release_at = inf  # when the first adopted region's lease expires
        self._accepting = True
        self._last_number = 0
        self.adoptions = self.hand_backs = 0  # since the start

    def is_ours(self, region: RegionId, now: float) -> bool:
        """Whether an adopted region's replicas may be given work at this moment."""
        return region in self.adopted and now < self._leases[region].ours_until

    def adopted_by(self, now: float) -> RegionId | None:
        """Who owns our own replicas, if it is not us."""
        home = self._leases.get(self._home)
        if home is None or home.owner in (None, self._home):
            return None
        return home.owner if now - home.heard_at < self._lease_s else None

    def leases(self) -> tuple[LeaseState, ...]:
        """What is known of every region's lease, for metrics."""
        return tuple(self._leases.values())

    def handlers(self) -> dict[type, Callable[[Any, float], None]]:
        """Who hears which event, for the router's table."""
        return {ev.LeaseHeard: self._on_heard, ev.LeaseAnswered: self._on_answered}

    def digest_seen(self, digest: Digest, now: float) -> None:
        """A peer's router speaks. One that drains is leaving: its region may be gone after it."""
        watched = self._watched.get(digest.region)
        if watched is not None and digest.accepting:
            watched.heard_at, watched.jitter_s = now, None
            if digest.region in self.adopted:
                watched.back_since = min(watched.back_since, now)

    def saw_term(self, region: RegionId, term: int) -> None:
        """One of the region's agents knows of this term."""
        if (tenure := self._leases.get(region)) is not None:
            tenure.saw_term(term)

    def release_expired(self, now: float) -> None:
        """Hand back regions whose lease has expired; due from `release_at` on.

        The router calls it before it decides anything: its process may have been suspended.
        """
        for region in [region for region in self.adopted if not self.is_ours(region, now)]:
            self._let_go(self._leases[region], now)
        self._publish_changes()

    def tick(self, now: float, *, accepting: bool) -> None:
        """Claim, renew and let go, as time has it."""
        self._accepting = accepting
        for region, tenure in self._leases.items():
            if tenure.asked is not None and now - tenure.asked.sent_at >= self._lease_s:
                tenure.unanswered(now)
            if region == self._home:
                self._keep_home(tenure, now)
            elif region in self.adopted:
                self._keep_adopted(tenure, now)
            else:
                self._watch(tenure, now)
        self._publish_changes()

    # What the stream says.

    def _on_heard(self, event: ev.LeaseHeard, now: float) -> None:
        lease = event.lease
        tenure = self._leases.get(lease.region)
        if tenure is None or not tenure.hear(lease, event.seq, now):
            return
        if lease.region == self._home:
            self._keep_home(tenure, now)
        elif lease.region in self.adopted:
            self._keep_adopted(tenure, now)
        self._publish_changes()

    def _on_answered(self, event: ev.LeaseAnswered, now: float) -> None:
        tenure = next((t for t in self._leases.values() if _is_asked(t, event.number)), None)
        if tenure is None:  # nobody waits for it any more
            return
        if event.seq is None:
            tenure.unanswered(now + self._lease_s * RENEW)
        elif event.granted:
            tenure.granted(self._home, event.seq, self._lease_s, now)
            if tenure.region != self._home and tenure.region not in self.adopted:
                self._adopt(tenure, now)
        else:
            # Who has written may have been a sibling: the stream is about to say it. A router that
            # has just come home knew of no write, and takes back whatever it is.
            knew = tenure.seq
            tenure.outdated(event.seq, now)
            if tenure.region == self._home and not knew:
                self._keep_home(tenure, now)
        self._publish_changes()

    def _adopt(self, tenure: LeaseState, now: float) -> None:
        late = now >= tenure.ours_until or tenure.owner != self._home
        if late or not self._accepting:
            return
        self._watched[tenure.region].back_since = inf
        self.adopted = dict(sorted({**self.adopted, tenure.region: tenure.term}.items()))
        self.adoptions += 1
        self._control.adopt(tenure.region, now)

    def _publish_changes(self) -> None:
        """Publish to agents at once what has changed, not with the next keepalive."""
        home = self._leases.get(self._home)
        owned = {self._home: home.term} if home is not None and home.owner == self._home else {}
        self.adopted = {region: self._leases[region].term for region in self.adopted}
        owned |= self.adopted
        for region in self._leases:
            if owned.get(region) != self.owned.get(region):
                self._effects.append(fx.OwnershipChanged(region, region in owned))
        self.owned.clear()
        self.owned.update(owned)
        ends = (self._leases[region].ours_until for region in self.adopted)
        self.release_at = min(ends, default=inf)

    # What time makes of it.

    def _keep_home(self, tenure: LeaseState, now: float) -> None:
        is_ours = tenure.owner == self._home
        if not is_ours or now - tenure.heard_at >= self._lease_s * RENEW:
            self._claim(tenure, now)

    def _keep_adopted(self, tenure: LeaseState, now: float) -> None:
        watched = self._watched[tenure.region]
        if not self._is_living(tenure.region, now):
            watched.back_since = inf
        is_back = now - watched.back_since >= self._lease_s
        is_taken = tenure.owner not in (None, self._home)
        if is_taken or is_back or now >= tenure.ours_until or not self._accepting:
            self._let_go(tenure, now)
        elif tenure.owner is not None and tenure.ours_until - now <= self._lease_s * RENEW_ADOPTED:
            self._claim(tenure, now)

    def _watch(self, tenure: LeaseState, now: float) -> None:
        region = tenure.region
        if region not in self._watched:  # the first tick
            self._watched[region] = Watched(now + self._lease_s * (START_LEASES - SILENCE))
        watched = self._watched[region]
        if self._is_living(region, now) or not self._ground.may_send(self._home, region):
            return
        if watched.jitter_s is None:
            watched.jitter_s = self._dice.uniform(0.0, JITTER) * self._lease_s
        wait_s = self._nearer(region, now) * STEP * self._lease_s + watched.jitter_s
        ours = tenure.owner == self._home  # by a sibling: it may be joined at once
        lapsed_at = -inf if ours else tenure.heard_at + self._lease_s
        if now >= max(lapsed_at, watched.heard_at + SILENCE * self._lease_s) + wait_s:
            self._claim(tenure, now)

    def _is_living(self, region: RegionId, now: float) -> bool:
        watched = self._watched.get(region)
        return watched is not None and now - watched.heard_at <= self._lease_s * SILENCE

    def _nearer(self, lost: RegionId, now: float) -> int:
        """How many living regions are nearer to the lost one than we are."""
        mine = (self._table.rtt_s.get(lost, inf), self._home)
        others = [
            (min(told, default=inf), region)
            for region, peer in self._table
            if region != lost and self._is_living(region, now)
            if self._ground.may_send(region, lost)
            if (told := [d.rtt_s[lost] for d in peer.digests.values() if lost in d.rtt_s])
        ]
        return sum(other < mine for other in others)

    def _claim(self, tenure: LeaseState, now: float) -> None:
        if tenure.asked is not None or now < tenure.ask_at or not self._accepting:
            return
        self._last_number += 1
        asked = tenure.ask(self._last_number, self._home, now)
        lease = Lease(
            region=tenure.region,
            owner=self._home,
            router=self._router,
            term=asked.term,
            lease_s=self._lease_s,
        )
        self._effects.append(fx.ClaimLease(asked.number, asked.expected, lease))

    def _let_go(self, tenure: LeaseState, now: float) -> None:
        self.adopted = {region: t for region, t in self.adopted.items() if region != tenure.region}
        tenure.ours_until = -inf
        self.hand_backs += 1
        self._control.hand_back(tenure.region, now)


def _is_asked(tenure: LeaseState, number: int) -> bool:
    return tenure.asked is not None and tenure.asked.number == number
