"""Which routers give work to a region's replicas: its own or, if all are gone, one peer's.

Each region has a lease (`lease.py`) in a stream on its own nats-server, which works on when the
routers are gone. Any router of the region renews it in the region's name, four times per lease and
twice while nothing is under way. A peer may *adopt* the region when two things coincide: no digest
of its routers arrives, and the lease has not been written for as long as it lasts. A link that is
cut shows both, but then the stream can't be reached either, and nothing is adopted; a stream that
has stopped shows only the second.

The nearest living region claims first, at once; each other one waits a step per living region that
is nearer, by the round trips in digests. The order is not needed for safety: the stream takes one
of them. The adopter receives the region's heartbeats, places on its replicas like on its own,
counts them in its digest, and renews its lease. It hands them back as soon as another region has
written the lease, its own last write is as old as a lease, it shuts down, or the region's routers
have sent digests for a whole lease (they may be too old to know of leases).

A region's own routers take the lease back at once, whichever region holds it. They serve without
one as long as they know of no other owner: if the stream can't be written, no region owns anything.
All of a region's routers own alike: an adopter's sibling joins by a renewal of its own. A region
confined to labels claims no region without such a label: it could not send anything there.

That leaves two owners that don't know of each other within one lease. Routers publish the terms of
their leases in keepalives, and an agent refuses work of any other region than the one with the
highest term (`agents/core/routers.py`). Source: SkyWalker, section 4.2, whose central controller
this replaces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple

from mesh.core.membership.lease import LeaseState
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.view.peers import PeerTable
from schemas.ids import RegionId, RouterId
from schemas.state import Digest, Lease, longer_s

# Parts of a lease.
RENEW = 0.25  # three renewals may be lost
RENEW_AT_REST = 0.5  # one may; the home's digests say that it lives, and it serves without a lease
# Of an adopted region, when so much is left: more seldom, as every router of the adopter renews.
RENEW_ADOPTED = 0.6
SILENCE = 0.5  # without a digest, beyond the time until the next one: the region may be gone
STEP = 0.15  # that a region waits for each nearer one: a long round trip
JITTER = 0.03
START_LEASES = 3.0  # a router that has just started has received nothing yet


class Adopted(NamedTuple):
    """Its replicas are this region's from now on."""

    region: RegionId


class GivenBack(NamedTuple):
    """They are not any more; answers under way go on."""

    region: RegionId


Change = Adopted | GivenBack | fx.ClaimLease | fx.OwnershipChanged
Changes = Iterator[Change]


@dataclass(slots=True)
class Watched:
    """A peer region's digests, beside its lease."""

    # The last digest of a router that accepts requests, and how much longer than usual it is silent
    # after it, as it says.
    seen_at: float
    back_since: float = inf  # the first one after this region adopted it
    jitter_s: float | None = None  # drawn once each time it falls silent


class Ownership:
    """One router's leases. Without peers, or with a lease of 0 s, it claims none.

    Methods that give `Changes` do so while they run: the caller acts on each before the next, and
    takes them all.
    """

    def __init__(
        self,
        home: RegionId,
        router: RouterId,
        peers: tuple[RegionId, ...],
        settings: RouterSettings,
        table: PeerTable,
        dice: Random,
    ) -> None:
        self._home, self._router = home, router
        self._lease_s, self._digest_s = settings.lease_s, settings.digest_s
        self._ground = settings.ground
        self._table = table
        self._dice = dice
        regions = (home, *peers) if peers and settings.lease_s else ()
        self._leases = {region: LeaseState(region) for region in regions}
        self._watched: dict[RegionId, Watched] = {}
        # Peer regions whose replicas are this region's, each with its lease's term, by name. A new
        # dict with every change.
        self.adopted: dict[RegionId, int] = {}
        self.owned: dict[RegionId, int] = {}  # those and home; agents know these terms
        self.release_at = inf  # when the first adopted region's lease expires
        self._accepting = True
        self._renew_s = self._lease_s * RENEW
        self._last_number = 0
        self.adoptions = self.hand_backs = 0  # since the start

    def is_ours(self, region: RegionId, now: float) -> bool:
        """Whether an adopted region's replicas may be given work at this moment."""
        return region in self.adopted and now < self._leases[region].ours_until

    def adopted_by(self, now: float) -> RegionId | None:
        """The peer that owns this region's replicas, if one does."""
        home = self._leases.get(self._home)
        if home is None or home.owner in (None, self._home):
            return None
        return home.owner if now - home.seen_at < self._lease_s else None

    def leases(self) -> tuple[LeaseState, ...]:
        """Every region's lease, for metrics."""
        return tuple(self._leases.values())

    def digest_seen(self, digest: Digest, now: float) -> None:
        """A peer's digest. A router that drains doesn't count: its region may be gone after it."""
        watched = self._watched.get(digest.region)
        if watched is not None and digest.accepting:
            longer = longer_s(digest.next_within_s, self._digest_s)
            watched.seen_at, watched.jitter_s = now + longer, None
            if digest.region in self.adopted:
                watched.back_since = min(watched.back_since, now)

    def saw_term(self, region: RegionId, term: int) -> None:
        """One of the region's agents has reported this term."""
        if (state := self._leases.get(region)) is not None:
            state.saw_term(term)

    def release_expired(self, now: float) -> Changes:
        """Hand back regions whose lease has expired; due from `release_at` on.

        The router calls it before it decides anything: its process may have been suspended.
        """
        for region in [region for region in self.adopted if not self.is_ours(region, now)]:
            yield self._hand_back(self._leases[region])
        yield from self._owned_now()

    def tick(self, now: float, *, accepting: bool, rests: bool = False) -> Changes:
        """Claim, renew and hand back what is due. `rests`: nothing is under way in the region."""
        self._accepting = accepting
        self._renew_s = self._lease_s * (RENEW_AT_REST if rests else RENEW)
        for region, state in self._leases.items():
            if state.asked is not None and now - state.asked.sent_at >= self._lease_s:
                state.unanswered(now)
            if region == self._home:
                yield from self._keep_home(state, now)
            elif region in self.adopted:
                yield from self._keep_adopted(state, now)
            else:
                yield from self._watch(state, now)
        yield from self._owned_now()

    # Messages of the stream.

    def heard(self, event: ev.LeaseHeard, now: float) -> Changes:
        """A lease was written."""
        lease = event.lease
        state = self._leases.get(lease.region)
        if state is None or not state.seen(lease, event.seq, now):
            return
        if lease.region == self._home:
            yield from self._keep_home(state, now)
        elif lease.region in self.adopted:
            yield from self._keep_adopted(state, now)
        yield from self._owned_now()

    def answered(self, event: ev.LeaseAnswered, now: float) -> Changes:
        """The stream has taken a claim of this router, or has not."""
        state = next((t for t in self._leases.values() if _is_asked(t, event.number)), None)
        if state is None:  # the claim is out of date
            return
        if event.seq is None:
            state.unanswered(now + self._lease_s * RENEW)
        elif event.granted:
            state.granted(self._home, event.seq, self._lease_s, now)
            if state.region != self._home and state.region not in self.adopted:
                yield from self._adopt(state, now)
        else:
            # The last writer may have been a sibling: the stream is about to report it. A router
            # that has just started knew of no write, and takes the lease back from any.
            knew = state.seq
            state.outdated(event.seq, now)
            if state.region == self._home and not knew:
                yield from self._keep_home(state, now)
        yield from self._owned_now()

    def _adopt(self, state: LeaseState, now: float) -> Changes:
        late = now >= state.ours_until or state.owner != self._home
        if late or not self._accepting:
            return
        self._watched[state.region].back_since = inf
        self.adopted = dict(sorted({**self.adopted, state.region: state.term}.items()))
        self.adoptions += 1
        yield Adopted(state.region)

    def _owned_now(self) -> Changes:
        """What has changed, for agents: at once, not with the next keepalive."""
        home = self._leases.get(self._home)
        owned = {self._home: home.term} if home is not None and home.owner == self._home else {}
        self.adopted = {region: self._leases[region].term for region in self.adopted}
        owned |= self.adopted
        ends = (self._leases[region].ours_until for region in self.adopted)
        self.release_at = min(ends, default=inf)
        before, self.owned = self.owned, owned
        for region in self._leases:
            if owned.get(region) != before.get(region):
                yield fx.OwnershipChanged(region, region in owned)

    # At ticks.

    def _keep_home(self, state: LeaseState, now: float) -> Changes:
        is_ours = state.owner == self._home
        if not is_ours or now - state.seen_at >= self._renew_s:
            yield from self._claim(state, now)

    def _keep_adopted(self, state: LeaseState, now: float) -> Changes:
        watched = self._watched[state.region]
        if not self._is_living(state.region, now):
            watched.back_since = inf
        is_back = now - watched.back_since >= self._lease_s
        is_taken = state.owner not in (None, self._home)
        if is_taken or is_back or now >= state.ours_until or not self._accepting:
            yield self._hand_back(state)
        elif state.owner is not None and state.ours_until - now <= self._lease_s * RENEW_ADOPTED:
            yield from self._claim(state, now)

    def _watch(self, state: LeaseState, now: float) -> Changes:
        region = state.region
        if region not in self._watched:  # the first tick
            self._watched[region] = Watched(now + self._lease_s * (START_LEASES - SILENCE))
        watched = self._watched[region]
        if self._is_living(region, now) or not self._ground.may_send(self._home, region):
            return
        if watched.jitter_s is None:
            watched.jitter_s = self._dice.uniform(0.0, JITTER) * self._lease_s
        wait_s = self._nearer(region, now) * STEP * self._lease_s + watched.jitter_s
        ours = state.owner == self._home  # by a sibling: join at once
        lapsed_at = -inf if ours else state.seen_at + self._lease_s
        if now >= max(lapsed_at, watched.seen_at + SILENCE * self._lease_s) + wait_s:
            yield from self._claim(state, now)

    def _is_living(self, region: RegionId, now: float) -> bool:
        watched = self._watched.get(region)
        return watched is not None and now - watched.seen_at <= self._lease_s * SILENCE

    def _nearer(self, lost: RegionId, now: float) -> int:
        """How many living regions are nearer to the lost one than this one."""
        mine = (self._table.rtt_s.get(lost, inf), self._home)
        others = [
            (min(rtts), region)
            for region, peer in self._table
            if region != lost and self._is_living(region, now)
            if self._ground.may_send(region, lost)
            if (rtts := [s.rtt_s[lost] for s in peer.seldom_sent.values() if lost in s.rtt_s])
        ]
        return sum(other < mine for other in others)

    def _claim(self, state: LeaseState, now: float) -> Changes:
        if state.asked is not None or now < state.ask_at or not self._accepting:
            return
        self._last_number += 1
        asked = state.ask(self._last_number, self._home, now)
        lease = Lease(
            region=state.region,
            owner=self._home,
            router=self._router,
            term=asked.term,
            lease_s=self._lease_s,
        )
        yield fx.ClaimLease(asked.number, asked.expected, lease)

    def _hand_back(self, state: LeaseState) -> GivenBack:
        self.adopted = {region: t for region, t in self.adopted.items() if region != state.region}
        state.ours_until = -inf
        self.hand_backs += 1
        return GivenBack(state.region)


def _is_asked(state: LeaseState, number: int) -> bool:
    return state.asked is not None and state.asked.number == number
