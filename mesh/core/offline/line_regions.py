"""Where a job's lines go, and when: home first, then the peer with the most slack left.

Peers publish every second what they would take (`OfflineState`). A region's own runner knows its
replicas, so home is used while it has room and its price is not higher. Else a line goes to the
cheapest peer with room, and among equally cheap ones to the one that expects the most slack until
the job's deadline: a region where it is night. If regions name prices, a job waits for cheaper
ones while their slack until its deadline suffices for it, and home's own would still suffice if
they do not deliver: a peer that promises too much costs money, and no job its deadline.

What a peer claims is bounded twice. Whatever its room, only so many tokens are under way there as
it has shown to answer: the amount doubles while lines are answered and halves with each refusal.
And after a refusal it gets nothing for a while, longer each time in a row. So a region that claims
room that it lacks gets few lines, and refuses them.

Residency is a hard filter: a region gets a line only if the map (`Ground`) lets it carry one of the
wanted labels and its state names that label, and, if home is confined, if the map lets home send
anything there.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from mesh.core.offline.backoff import Backoff
from mesh.core.offline.forecast import HOUR_S
from mesh.core.offline.queues import Wanted
from schemas.ids import ModelId, RegionId, RouterId
from schemas.residency import Ground, Label
from schemas.state import OfflineCapacity, OfflineState

REGIONS_MAX = 256
RUNNERS_MAX = 16  # of one region
SILENT_S_MAX = 5.0  # five states missing: the peer gets nothing
SEEN_AFTER_S = 2.0  # a state's period and a round trip: what was sent since may not be in it
UNDER_WAY_TOKENS = 65_536  # at a peer that has answered nothing yet: a few documents
UNDER_WAY_TOKENS_MAX = 2**26
BACKOFF_S, BACKOFF_S_MAX = 0.5, 60.0
HOURS_MAX = 72  # of a claimed slack that are read
SLACK_MORE = 1.25  # than a job's work, before it waits for it


@dataclass(slots=True)
class PeerRegion:
    """One peer."""

    states: dict[RouterId, OfflineState] = field(default_factory=dict)
    seen_at: dict[RouterId, float] = field(default_factory=dict)
    sent: deque[tuple[float, int]] = field(default_factory=deque)  # tokens, lately
    sent_tokens: int = 0
    under_way_tokens: int = 0
    allowed_tokens: int = UNDER_WAY_TOKENS

    def capacities(self, model: ModelId) -> Iterator[OfflineCapacity]:
        for state in self.states.values():
            if state.accepting and model in state.models:
                yield state.models[model]

    @property
    def price(self) -> float | None:
        known = [state.price for state in self.states.values() if state.price is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class Home:
    """This region, for one decision."""

    price: float | None
    slack_tokens: float  # until the job's deadline


class Regions:
    """The peers."""

    def __init__(self, home: RegionId, ground: Ground) -> None:
        self._home = home
        self._ground = ground
        self._labels = dict(ground.carried)
        self.peers: dict[RegionId, PeerRegion] = {}
        self.backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)

    def see(self, state: OfflineState, now: float) -> None:
        """Take in a state; an older one of the same runner is ignored."""
        if state.region == self._home:
            return
        peer = self.peers.get(state.region)
        if peer is None:
            if len(self.peers) >= REGIONS_MAX:
                return
            peer = self.peers[state.region] = PeerRegion()
        known = peer.states.get(state.router)
        if known is None and len(peer.states) >= RUNNERS_MAX:
            return
        if known is not None and (state.epoch, state.seq) <= (known.epoch, known.seq):
            return
        peer.states[state.router], peer.seen_at[state.router] = state, now

    def expire(self, now: float) -> None:
        """Forget states of silent runners, and what was sent so long ago that states show it."""
        for peer in self.peers.values():
            for router, seen_at in list(peer.seen_at.items()):
                if now - seen_at > SILENT_S_MAX:
                    del peer.states[router], peer.seen_at[router]
            while peer.sent and peer.sent[0][0] <= now - SEEN_AFTER_S:
                peer.sent_tokens -= peer.sent.popleft()[1]

    def models(self) -> frozenset[ModelId]:
        """Models that some peer serves, with room or without."""
        states = (state for peer in self.peers.values() for state in peer.states.values())
        return frozenset(model for state in states for model in state.models)

    # Hand-outs.

    def sent(self, region: RegionId, tokens: int, now: float) -> None:
        """A line is being sent there."""
        peer = self.peers[region]
        peer.sent.append((now, tokens))
        peer.sent_tokens += tokens
        peer.under_way_tokens += tokens

    def over(self, region: RegionId, tokens: int) -> None:
        """The attempt is over."""
        self.peers[region].under_way_tokens -= tokens

    def answered(self, region: RegionId, tokens: int) -> None:
        peer = self.peers[region]
        peer.allowed_tokens = min(UNDER_WAY_TOKENS_MAX, peer.allowed_tokens + tokens)
        self.backoff.answered(region)

    def penalize(self, region: RegionId, now: float) -> None:
        """It refused a line, or failed it."""
        if not self.backoff.is_waiting(region, now):
            peer = self.peers[region]
            peer.allowed_tokens = max(UNDER_WAY_TOKENS // 16, peer.allowed_tokens // 2)
        self.backoff.penalize(region, now)

    # Choice.

    def may_go(self, region: RegionId, wanted: Wanted) -> bool:
        """Whether a line that wants one of these labels may be computed there."""
        if not self._ground.may_send(self._home, region):
            return False
        return wanted is None or not wanted.isdisjoint(self._carried(region))

    def _carried(self, region: RegionId) -> frozenset[Label]:
        peer = self.peers[region]
        named = {label for state in peer.states.values() for label in state.residency or ()}
        return frozenset(self._labels.get(region, ())) & named

    def takes(self, region: RegionId, model: ModelId, now: float) -> bool:
        """Whether that peer serves the model and takes peers' lines at this moment."""
        peer = self.peers[region]
        return not self.backoff.is_waiting(region, now) and any(peer.capacities(model))

    def room_tokens(self, region: RegionId, model: ModelId, now: float) -> int:
        """Tokens that it may be sent now, as offline work."""
        if not self.takes(region, model, now):
            return 0
        peer = self.peers[region]
        claimed = max(capacity.room_tokens for capacity in peer.capacities(model))
        return min(claimed - peer.sent_tokens, self.allowance(region))

    def allowance(self, region: RegionId) -> int:
        """Tokens that may be under way there besides those that are; one line always may."""
        peer = self.peers[region]
        if not peer.under_way_tokens:
            return UNDER_WAY_TOKENS_MAX
        return peer.allowed_tokens - peer.under_way_tokens

    def slack_tokens(self, region: RegionId, model: ModelId, seconds: float) -> float:
        """Tokens that it expects to have for others in that time; 0.0 where it publishes none."""
        capacities = list(self.peers[region].capacities(model))
        found = [_slack(one.slack_tokens, seconds) - one.waiting_tokens for one in capacities]
        return max(0.0, *found) if found else 0.0

    def promised(self, model: ModelId, wanted: Wanted, now: float) -> list[float]:
        """Tokens that peers together expect to have for others in each of the next hours."""
        hours: list[float] = []
        for region in self.peers:
            if not self.takes(region, model, now) or not self.may_go(region, wanted):
                continue
            offers = [_less(one) for one in self.peers[region].capacities(model)]
            best = max(offers, key=sum)
            hours += [0.0] * (len(best) - len(hours))
            for hour, tokens in enumerate(best):
                hours[hour] += tokens
        return hours

    def highest_price(
        self,
        home: Home,
        model: ModelId,
        wanted: Wanted,
        work_tokens: float,
        left_s: float,
        now: float,
    ) -> float:
        """The highest price at which lines go out now; infinite where price doesn't matter.

        `work_tokens`: to be computed until the job is done. `left_s`: until its deadline.
        """
        needed = work_tokens * SLACK_MORE
        if home.price is None:
            return inf
        offers = [(home.price, home.slack_tokens)]
        for region, peer in self.peers.items():
            is_trusted = not self.backoff.is_waiting(region, now)
            if peer.states and is_trusted and self.may_go(region, wanted):
                price = home.price if peer.price is None else peer.price
                offers.append((price, self.slack_tokens(region, model, left_s)))
        offers.sort()
        total = 0.0
        for price, slack in offers:
            total += slack
            if total >= needed:
                is_sure = price >= home.price or home.slack_tokens >= needed
                return price if is_sure else inf
        return inf

    def in_order(
        self, model: ModelId, home_price: float | None, left_s: float, now: float
    ) -> list[RegionId]:
        """Peers that would take a line now: the cheapest first, then by slack."""
        found = []
        for region in self.peers:
            if self.takes(region, model, now):
                slack = self.slack_tokens(region, model, left_s)
                found.append((self.price(region, home_price), -slack, region))
        return [region for _, _, region in sorted(found)]

    def price(self, region: RegionId, home_price: float | None) -> float:
        """Home's where it names none; prices count only if home names one."""
        if home_price is None:
            return 0.0
        price = self.peers[region].price
        return home_price if price is None else price


def _less(offer: OfflineCapacity) -> list[float]:
    """Its slack of each hour, less what its own jobs wait for."""
    waiting, left = float(offer.waiting_tokens), []
    for tokens in offer.slack_tokens[:HOURS_MAX]:
        left.append(max(0.0, tokens - waiting))
        waiting = max(0.0, waiting - tokens)
    return left


def _slack(hourly: tuple[int, ...], seconds: float) -> float:
    """Of the first so many seconds. Nothing is expected beyond the hours that are named."""
    tokens = 0.0
    for hour in hourly[:HOURS_MAX]:
        if seconds <= 0:
            break
        tokens += hour * min(1.0, seconds / HOUR_S)
        seconds -= HOUR_S
    return tokens
