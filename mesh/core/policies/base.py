"""What a policy is: it picks one of the available candidates, and reports what it knew.

A policy ranks; it never admits. Which candidates are available is settled before it is called
(selective pushing). There are two kinds:

* *layered* (`joint = False`): one instance picks among local replicas, another among peer regions,
  and peers are considered only when no local replica is available (SkyWalker 3.1, two-layer
  routing);
* *joint* (`joint = True`): one instance weighs replicas, peers and holding against each other.

A policy learns from its own placements and from others': `placed`, `began` at the first token,
`served` at the end of the answer, and `left`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import ClassVar, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

from mesh.core.model.request import Request, Served
from mesh.core.prefixes.prefix_index import PrefixIndex
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind


class Destination(NamedTuple):
    """The name of a place for a request: a replica or a peer region."""

    kind: CandidateKind
    name: str


class Prefill(NamedTuple):
    """The first stage on a pair: the prefill replicas that may compute the prompt.

    A policy that prices pairs leaves the one that it takes, with the `terms` of the whole pair in
    seconds.
    """

    among: "tuple[Target, ...]"
    terms: Mapping[str, float] = {}
    transfer_tokens: float = 0.0  # of the prompt, that the decode replica lacks


class Target(NamedTuple):
    """One available place, and what is known of it.

    `load`: requests in it or on their way. `rtt_s`: round trip to it, 0.0 inside the region, None
    while unknown. Exactly one of `replica` and `peer` is set, by `kind`. `ahead`: requests held in
    its region that go before this one; for a sample of its replicas, their part of them. `prefill`:
    the replica only decodes, after another one.
    """

    name: str
    load: int
    kind: CandidateKind = CandidateKind.REPLICA
    rtt_s: float | None = 0.0
    replica: Replica | None = None
    peer: Peer | None = None
    ahead: float = 0
    prefill: Prefill | None = None


class Score(NamedTuple):
    """A policy's estimate for one target: `seconds` of expected TTFT where it computes them.

    Those `terms` that are seconds add up to it; others inform. Three have one meaning everywhere:
    `line_s`, the wait in its region's hold queue, `queue_s`, the wait in the target's queue, and
    `others_s`, what the request costs others, for which its own client does not wait.
    """

    target: Target
    seconds: float | None = None
    terms: Mapping[str, float | None] = {}
    matched_blocks: int = 0


Priced = TypeVar("Priced")


class LazyScores(Sequence[Score]):
    """Scores that are made when somebody reads them: most receipts are never read."""

    __slots__ = ("_priced", "_score")

    def __init__(self, priced: Sequence[Priced], score: Callable[[Priced], Score]) -> None:
        """`priced`: what `score` makes each of them from; not changed afterwards."""
        self._priced = priced
        self._score = score

    def __len__(self) -> int:
        return len(self._priced)

    def __iter__(self) -> Iterator[Score]:
        return map(self._score, self._priced)

    @overload
    def __getitem__(self, place: int) -> Score: ...

    @overload
    def __getitem__(self, place: slice) -> "LazyScores": ...

    def __getitem__(self, place: "int | slice") -> "Score | LazyScores":
        if isinstance(place, slice):
            return LazyScores(self._priced[place], self._score)
        return self._score(self._priced[place])


class FirstToken(NamedTuple):
    """When a first token is expected, in seconds from now; `queue_s` of them pass in queues."""

    seconds: float
    queue_s: float


class CacheEstimate(NamedTuple):
    """What one placement relied on: blocks, and when the deepest of them was placed there."""

    blocks: int
    at: float
    placed_at: float
    is_computed: bool = False  # its first token has come


class Choice(NamedTuple):
    """The pick. `matched_blocks`: prompt blocks that the pick is estimated to hold.

    `target` None: hold the request for now; only a joint policy may. `scores`: of the targets
    examined, in any order. `held_tokens`: of the prompt, where the policy knows more than blocks.
    `is_guess`: its seconds come from no answer or report; no request may be shed for them.
    `waits_for`: the target that a request is held for; only for who reads why.
    """

    target: Target | None
    reason: str
    matched_blocks: int = 0
    scores: Sequence[Score] = ()
    held_tokens: int | None = None
    is_guess: bool = False
    expected: "FirstToken | None" = None  # `first_token`, where the policy has computed it
    waits_for: Target | None = None

    @property
    def name(self) -> str | None:
        """The pick's name; None when held."""
        return None if self.target is None else self.target.name

    @property
    def first_token(self) -> FirstToken | None:
        """At the pick, or the soonest of those examined; None where no seconds are known."""
        if self.is_guess:
            return None
        if self.expected is not None:
            return self.expected
        known = [
            (score.seconds - (score.terms.get("others_s") or 0.0), score)
            for score in self.scores
            if score.seconds is not None and (self.target is None or score.target == self.target)
        ]
        if not known:
            return None
        seconds, score = min(known, key=lambda one: one[0])
        waits = (score.terms.get(term) or 0.0 for term in ("line_s", "queue_s"))
        return FirstToken(seconds, sum(waits))


class Policy(Protocol):
    """One way to choose."""

    joint: ClassVar[bool]
    judges_load: ClassVar[bool]  # it gets busy targets too, and may give them work

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """Pick one of `targets`: available ones, replicas before peers, and at least one."""
        ...

    def hit_ratio(self, request: Request) -> float:
        """Part of the prompt that some place is estimated to hold, 0 to 1."""
        ...

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """The request went to `spot`, whichever policy chose it."""
        ...

    def began(self, request: Request, spot: Destination, now: float) -> None:
        """Its first token has come from there."""
        ...

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        """The whole answer has come from there, at this cost."""
        ...

    def left(self, request: Request, spot: Destination, now: float) -> None:
        """The attempt is over, however it ended. Comes exactly once for every `placed` of a
        client's request; a peer's request is not followed."""
        ...

    def forget(self, spot: Destination) -> None:
        """That place is gone, or came back empty."""
        ...


@runtime_checkable
class Expiring(Protocol):
    """A policy that drops what is too old at ticks."""

    def expire(self, now: float) -> None:
        """A tick: drop some of what is too old."""
        ...


@runtime_checkable
class PrefixFollowing(Protocol):
    """A policy that estimates which place holds which prefixes; gossip feeds its indexes."""

    @property
    def indexes(self) -> Mapping[CandidateKind, PrefixIndex[str]]:
        """One of replicas, one of peer regions."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """A policy that gets a sample of a large fleet, with the replicas that it names."""

    def holders(self, request: Request, most: int) -> Sequence[str]:
        """Up to `most` replicas that hold the most of the prompt, available or not."""
        ...


@runtime_checkable
class PairPricing(Protocol):
    """A policy that prices pairs, and learns what their stages take."""

    def prefilled(
        self, request: Request, spot: Destination, held: CacheEstimate, served: Served, now: float
    ) -> None:
        """The prefill stage at `spot`, estimated to hold so much, has ended at this cost, and the
        decode stage begins."""
        ...


@runtime_checkable
class QueueComparing(Protocol):
    """A policy that may give peers work only while their hold queues are no longer than ours."""

    @property
    def compares_queues(self) -> bool:
        """Whether it does so with its options."""
        ...


@runtime_checkable
class Succeeding(Protocol):
    """A policy that can go on from what another one has learned beside prefixes."""

    def go_on_from(self, earlier: Policy, *, copied: bool) -> None:
        """Know what it knows, if it is of the same kind. Unless `copied`, the other is not used
        any more. The indexes of a `PrefixFollowing` one are taken over before."""
        ...


def least_loaded(targets: Sequence[Target], dice: Random) -> Target:
    """The target with the least load; ties at random, so that routers don't all pick the same."""
    least = min(target.load for target in targets)
    return dice.choice([target for target in targets if target.load == least])


class Layered:
    """The base of most policies: two layers, and nothing to learn."""

    joint: ClassVar[bool] = False
    judges_load: ClassVar[bool] = False

    def hit_ratio(self, request: Request) -> float:
        return 0.0

    def placed(self, request: Request, spot: Destination, now: float) -> None:
        """Nothing to remember."""

    def began(self, request: Request, spot: Destination, now: float) -> None:
        """Nothing to learn."""

    def served(self, request: Request, spot: Destination, served: Served, now: float) -> None:
        """Nothing to learn."""

    def left(self, request: Request, spot: Destination, now: float) -> None:
        """Nothing to take back."""

    def forget(self, spot: Destination) -> None:
        """Nothing to forget."""


# How fast a target computes, for policies that add up seconds. A replica's heartbeat reports what
# its agent has learned, or knew before; a region's digests the median over its replicas. Without a
# report: one A100 node with Mistral 7B (GORGO, Table 1 and appendix A). A wrong speed that is the
# same for all still compares them by tokens; zero would make the unknown target the best.


PREFILL_S_PER_TOKEN = 0.0938e-3  # GORGO, Table 1: slope of TTFT on prompt tokens, R² 0.986
DECODE_S_PER_TOKEN = 0.0125  # GORGO, tables 2 to 4: median inter-token latency 12.5 to 12.7 ms


class Speed(NamedTuple):
    """Seconds of prefill per uncached token and per request, of decoding per output token."""

    prefill_s_per_token: float = PREFILL_S_PER_TOKEN
    prefill_base_s: float = 0.0
    decode_s_per_token: float = DECODE_S_PER_TOKEN

    def prefill_s(self, tokens: float) -> float:
        """Time to compute a prompt of which `tokens` are missing."""
        return self.prefill_base_s + tokens * self.prefill_s_per_token


TYPICAL = Speed()


def speed_of(target: Target) -> Speed:
    """By the target's last report; a speed of zero is none."""
    if target.replica is not None:
        return _of_replica(target.replica)
    if target.peer is not None:
        return Speed(_of_peer(target.peer) or PREFILL_S_PER_TOKEN)
    return TYPICAL


def prefill_s_per_token(target: Target) -> float:
    """The same, of its prefill alone."""
    if target.replica is not None:
        return target.replica.prefill_line[0] or PREFILL_S_PER_TOKEN
    return (target.peer and _of_peer(target.peer)) or PREFILL_S_PER_TOKEN


def _of_replica(replica: Replica) -> Speed:
    s_per_token, base_s = replica.prefill_line
    pace = replica.heartbeat.decode_tokens_per_s
    return Speed(
        s_per_token or PREFILL_S_PER_TOKEN,
        base_s or 0.0,
        1.0 / pace if pace else DECODE_S_PER_TOKEN,
    )


def _of_peer(peer: Peer) -> float | None:
    """Over its routers, each of which reports the median of the same replicas."""
    reported = [digest.prefill_s_per_token for digest in peer.digests.values()]
    known = [s_per_token for s_per_token in reported if s_per_token]
    return sum(known) / len(known) if known else None
