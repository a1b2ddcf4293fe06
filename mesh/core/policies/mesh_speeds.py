"""Speeds of replicas and peers, learned from answers, for the `mesh` policy.

A first token takes

    ttft_s = base_s + s_per_token × tokens to compute before it + s_per_decode × requests running

(GORGO, section 4.2, has the first two terms). Prefill shares iterations with decodes in a way that
differs between engines, so each candidate's three numbers are fitted on line to its answers, by
least squares with forgetting: an engine that slows down is noticed within some thirty answers. A
ridge as heavy as RIDGE answers pulls a candidate with few towards the fleet's speed; one with none
has the reported speed. The fleet's slope is pulled little towards the start value, which is off by
a factor on most GPUs.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mesh.core.model.reported_speed import BASE_S_MAX, believed_slope
from mesh.core.policies.base import Destination, Target
from mesh.core.view.peers import Peer
from mesh.core.view.replica import Replica
from schemas.decision import CandidateKind
from schemas.ids import ModelId
from schemas.state import Heartbeat, PrefillPrior

MEMORY = 0.97  # kept of the past at each answer: some thirty of them
RIDGE = 8.0  # answers
KILO = 1000.0  # tokens are counted in thousands inside, for well-scaled sums
ANCHOR = 0.3**2  # holds the slope, as short prompts determine none; in squared thousands of tokens


class FittedSpeed(NamedTuple):
    """The three numbers. Seconds, seconds per prompt token, seconds per running request."""

    base_s: float
    s_per_token: float
    s_per_decode: float


@dataclass(slots=True)
class SpeedFit:
    """Decayed sums over answers: of 1, x (thousands of tokens), n (running) and y (seconds)."""

    w: float = 0.0
    x: float = 0.0
    n: float = 0.0
    xx: float = 0.0
    nn: float = 0.0
    xn: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    ny: float = 0.0

    def add(self, x: float, n: float, y: float) -> None:
        """One answer."""
        self.w = MEMORY * self.w + 1.0
        self.x = MEMORY * self.x + x
        self.n = MEMORY * self.n + n
        self.xx = MEMORY * self.xx + x * x
        self.nn = MEMORY * self.nn + n * n
        self.xn = MEMORY * self.xn + x * n
        self.y = MEMORY * self.y + y
        self.xy = MEMORY * self.xy + x * y
        self.ny = MEMORY * self.ny + n * y

    def fade(self, share: float) -> None:
        """Let all answers so far count for this share of what they did."""
        share = share if share * self.w > 1e-3 else 0.0
        for name in self.__slots__:
            setattr(self, name, share * getattr(self, name))

    def speed(
        self, prior: FittedSpeed, slope_ridge: float = RIDGE, ridge: float = RIDGE
    ) -> FittedSpeed:
        """The ridge towards `prior`, which weighs as much as `ridge` answers like these.

        Its slope weighs `slope_ridge` of them, and ANCHOR. No number falls below a tenth of it, or
        below zero.
        """
        if not self.w:
            return prior
        base, slope, decode = prior.base_s, prior.s_per_token * KILO, prior.s_per_decode
        rest = (
            self.y - base * self.w - slope * self.x - decode * self.n,
            self.xy - base * self.x - slope * self.xx - decode * self.xn,
            self.ny - base * self.n - slope * self.xn - decode * self.nn,
        )
        db, ds, dn = _solve(
            (self.w + ridge, self.x, self.n),
            (self.xx + slope_ridge / self.w * self.xx + ANCHOR, self.xn),
            self.nn + ridge / self.w * self.nn + 1e-9,
            rest,
        )
        return FittedSpeed(
            max(0.1 * base, base + db), max(0.1 * slope, slope + ds) / KILO, max(0.0, decode + dn)
        )


def _solve(
    first: tuple[float, float, float],
    second: tuple[float, float],
    third: float,
    rest: tuple[float, float, float],
) -> tuple[float, float, float]:
    """The symmetric system of three, by elimination; the ridge keeps it regular."""
    a, b, c = first
    d, e = second
    p, q, r = rest
    d, e, q = d - b * b / a, e - b * c / a, q - b * p / a
    f, r = third - c * c / a, r - c * p / a
    f, r = f - e * e / d, r - e * q / d
    z = r / f
    y = (q - e * z) / d
    return (p - b * y - c * z) / a, y, z


# One answer's time to first token is about as far off its line as it is long, so a prior with a
# relative error of e is worth 1 / e² answers; no agent's word counts for more than these.
PRIOR_ANSWERS_MIN, PRIOR_ANSWERS_MAX = 1.0, 32.0
PRIOR_MEMORY = 0.9  # of a prior at each answer: engines at work are not as they are alone
IDLE_HALF_LIFE_S = 30.0  # of what was learned of a replica that gives no answers
IDLE_STEP_S = 1.0  # between two fits of it
FLEET_REST_S = 30.0  # without work anywhere, after which that of all replicas fades likewise
FLEET_SLOPE_RIDGE = 2.0
ANSWERS_MIN = 4.0  # before which no request may be shed for an estimate
RUNNING_START = 8.0  # beside a newcomer, where it is not reported
TTFT_S_MAX = 60.0  # a longer one is an accident, not a speed
TOKENS_MAX = 1e6  # before one first token; where more is reported, its time shows no speed
# How many times as long as usual a prompt, with those before it, counts in the sums over all: its
# time counts for as much less, so that it shows the same speed, with less weight.
LONGER_PROMPT_MAX = 8.0
LONGER_ANSWER_MAX = 10.0  # the same of an answer in the averages over all
ANSWER_TOKENS_LEAST = 100.0  # of the usual one, for that
RESIDENCE_START_S = 10.0
SLOT_START_S = 0.1  # before an answer ended there: held for it, but no request is shed for a guess
PREFILL_TOKENS_START = 500.0
OUTPUT_TOKENS_START = 200.0
DEMAND_S = 30.0  # time constant
WEIGHT = 0.02  # of a new observation in the averages over all, once there are some fifty
START_COUNTS = 4.0  # observations that the start value of an average counts for
RETURNS_MAX = 16.0
STALL_WEIGHT = 0.15  # of the decodes that our prefill stalls: they wait for one token in hundreds
DISPLACED_WEIGHT = 1.0  # of a load: the adapter that makes room for it is as likely asked for next
NO_ADAPTER = ModelId("")


# Before any report or answer: about an 8B model on a recent data centre GPU.
SPEED_START = FittedSpeed(base_s=0.05, s_per_token=1e-4, s_per_decode=0.0)

# Of a KV cache that is transferred, before the first: 128 KiB a token, as an 8B model with grouped
# heads has, over a network of 100 Gbit/s; and one step of decoding.
TRANSFER_START = FittedSpeed(base_s=0.03, s_per_token=1.1e-5, s_per_decode=0.0)


@dataclass(slots=True)
class CandidateSpeed:
    """What was learned of one candidate."""

    fit: SpeedFit = field(default_factory=SpeedFit)
    speed: FittedSpeed | None = None
    residence_s: float = RESIDENCE_START_S
    slot_s: float | None = None  # the same, of observed answers; None before the first
    prior: PrefillPrior | None = None
    prior_answers: float = 0.0  # what the prior is worth; each answer makes it less
    fitted_at: float = -math.inf  # or known to be at work since

    def lean_on(self, prior: PrefillPrior | None) -> None:
        """Another prior, with its full weight: perhaps of another engine."""
        self.prior = prior
        if prior is not None:
            worth = prior.error**-2
            self.prior_answers = min(PRIOR_ANSWERS_MAX, max(PRIOR_ANSWERS_MIN, worth))

    def add(self, thousands: float, running: float, ttft_s: float) -> None:
        """One answer."""
        self.fit.add(thousands, running, ttft_s)
        self.prior_answers *= PRIOR_MEMORY

    def fit_to(self, fleet: FittedSpeed) -> None:
        """Its speed by its answers, leaning on the fleet's and, before many, on its prior."""
        prior = self.prior
        if prior is None:
            self.speed = self.fit.speed(fleet)
            return
        answers = RIDGE + self.prior_answers
        share = self.prior_answers / answers
        before = FittedSpeed(
            fleet.base_s + share * (prior.base_s - fleet.base_s),
            fleet.s_per_token + share * (prior.s_per_token - fleet.s_per_token),
            fleet.s_per_decode,
        )
        self.speed = self.fit.speed(before, answers, answers)


UNKNOWN_SPEED = CandidateSpeed()


class ReplicaSpeeds(NamedTuple):
    """What a replica's last heartbeat comes to at its speed, for the decisions until the next."""

    heartbeat: Heartbeat
    least_s: float  # of any request's price there
    least_s_per_token: float  # of that, for each token to compute
    s_per_token: float
    running: float
    base_s: float
    displaced_s: float  # what others pay: who needs an adapter that makes room for this one
    stalled: float  # decodes that a prefill stalls, by their weight
    kv_tokens: float  # free; infinite where not reported
    queued_tokens: float | None  # as reported, and the wait for a slot as if it were prompts
    batch_room: float  # most load beside which one more has a slot; infinite where not reported
    load_s: float  # until the adapter is loaded; 0 where it is, and of a model


class PrefillDemand:
    """Seconds of prefill that this router's clients asked for, per second, of late."""

    def __init__(self) -> None:
        self._seconds, self._at, self._since = 0.0, 0.0, math.inf

    def add(self, seconds: float, now: float) -> None:
        """One more prompt, which takes so long."""
        self._seconds = self._seconds * math.exp((self._at - now) / DEMAND_S) + seconds
        self._at, self._since = now, min(self._since, now)

    def per_s(self, now: float) -> float:
        """As of `now`. A second is added to the time seen: the first prompt alone is no rate."""
        if now < self._since:
            return 0.0
        seen_s = DEMAND_S * (1.0 - math.exp((self._since - now) / DEMAND_S)) + 1.0
        return self._seconds * math.exp((self._at - now) / DEMAND_S) / seen_s


class TransferSpeed:
    """How long a decode replica's first token takes after the prompt was computed elsewhere.

    As a first token's time: a base, seconds per token transferred, and per request that runs.
    """

    def __init__(self) -> None:
        self._fit = SpeedFit()
        self._speed = TRANSFER_START

    def seconds(self, tokens: float, running: float) -> float:
        base_s, s_per_token, s_per_decode = self._speed
        return base_s + s_per_token * tokens + s_per_decode * running

    def began(self, tokens: float, running: float, seconds: float) -> None:
        """One decode stage's first token came after so many seconds."""
        y = min(TTFT_S_MAX, max(0.0, seconds))
        self._fit.add(tokens / KILO, running, y)
        self._speed = self._fit.speed(TRANSFER_START, FLEET_SLOPE_RIDGE)


class SpeedModel:
    """Speeds and averages of one model: by candidate, and of all of them together."""

    def __init__(self, model: ModelId = NO_ADAPTER, *, generates: bool = True) -> None:
        """`model`: its name, which may be an adapter's. `generates`: whether its answers are
        tokens, and not only computed prompts."""
        self._model = model
        self._loads_sent: set[str] = set()  # replicas on which a request on its way needs a load
        self.replicas: dict[str, CandidateSpeed] = {}
        self.demand = PrefillDemand()
        self.transfer = TransferSpeed()
        # Valid while the heartbeat is the replica's last; dropped with its speed.
        self.kept: dict[str, ReplicaSpeeds] = {}
        self.kept_peers: dict[str, Any] = {}  # the same of peers (`mesh_peers.py`)
        self._at_fleet_speed: set[str] = set()  # those of them that have no speed of their own
        self._peers: dict[str, CandidateSpeed] = {}
        self._fleet = SpeedFit()
        self._fleet_awake: SpeedFit | None = None  # as it was before it began to fade
        self._fleet_fades_at = math.inf
        self.fleet_speed = SPEED_START
        self._prompts = self._answers = self._batches = 0
        self._continued_ratio = 0.0  # prompts that go on where an earlier answer ended
        self.running = RUNNING_START  # beside a newcomer, usually
        self.prefill_tokens = PREFILL_TOKENS_START
        self.output_tokens = OUTPUT_TOKENS_START if generates else 0.0
        self.kv_tokens = PREFILL_TOKENS_START + self.output_tokens  # of a whole request
        self.stall_weight = STALL_WEIGHT

    def of(self, target: Target) -> CandidateSpeed:
        """What was learned of that candidate."""
        of = self.replicas if target.peer is None else self._peers
        return of.get(target.name, UNKNOWN_SPEED)

    def speed(self, target: Target) -> FittedSpeed:
        """Its own; until it has answered, the reported one; else the fleet's."""
        if target.peer is not None:
            self._fade_peer(target.name, target.peer)
        return self.of(target).speed or self.reported(target) or self.fleet_speed

    def _fade_peer(self, name: str, peer: Peer) -> None:
        """As `_own_of` of replicas: a peer that slow answers were seen of is tried again."""
        own = self._peers.get(name)
        if own is None or own.speed is None:
            return
        if peer.forwarded_at:
            own.fitted_at = peer.seen_at
        idle_s = peer.seen_at - own.fitted_at
        if idle_s >= IDLE_STEP_S:
            own.fit.fade(0.5 ** (idle_s / IDLE_HALF_LIFE_S))
            own.fitted_at = peer.seen_at
            if own.fit.w:
                own.fit_to(self.fleet_speed)
            else:
                own.speed = None

    def reported(self, target: Target) -> FittedSpeed | None:
        """By its heartbeat or digest; None if that has no speed."""
        if target.replica is not None:
            return self._completed(*target.replica.prefill_line)
        return None if target.peer is None else self._completed(*target.peer.prefill)

    def _completed(self, slope: float | None, base_s: float | None) -> FittedSpeed | None:
        if not slope:
            return None
        usual_s, _, s_per_decode = self.fleet_speed
        least_s = usual_s if base_s is None else min(base_s, BASE_S_MAX)
        return FittedSpeed(least_s, believed_slope(slope), s_per_decode)

    def of_replica(self, replica: Replica) -> ReplicaSpeeds:
        """Compute its `ReplicaSpeeds`; kept if the heartbeat reports how many requests run."""
        beat, kv_tokens = replica.heartbeat, replica.kv_reported_tokens
        speed = self._own_of(replica)
        if speed is None:
            self._at_fleet_speed.add(beat.replica)
            speed = self._completed(*replica.prefill_line)
        base_s, s_per_token, s_per_decode = speed or self.fleet_speed
        running = replica.load if beat.running is None else beat.running
        first_s, load_s, displaced_s = base_s + s_per_decode * running, 0.0, 0.0
        if beat.loadable or beat.loading:
            load_s, displaced_s = replica.load_s(self._model), self._displaced_s(replica)
        stalled = running * self.stall_weight
        queued_tokens: float | None = beat.prefill_queued_tokens
        if beat.waited is not None and queued_tokens is not None:  # the next one waits no less
            queued_tokens += beat.waited.slot_s(s_per_token, first_s) / s_per_token
        speeds = ReplicaSpeeds(
            beat,
            first_s + displaced_s + load_s,
            s_per_token * (1.0 + stalled),
            s_per_token,
            running,
            first_s,
            displaced_s,
            stalled,
            math.inf if kv_tokens is None else kv_tokens,
            queued_tokens,
            beat.batch_max - 1 if beat.batch_max else math.inf,
            load_s,
        )
        if beat.running is not None:
            self.kept[beat.replica] = speeds
        return speeds

    def _displaced_s(self, replica: Replica) -> float:
        """What loading the adapter costs others: one that must make room may have to be loaded
        again. Nothing where there is room, or the load is under way, or a request for it."""
        beat = replica.heartbeat
        is_new = self._model in beat.loadable and beat.replica not in self._loads_sent
        if not is_new or beat.adapters_free:
            return 0.0
        return DISPLACED_WEIGHT * replica.load_s(self._model)

    def load_sent(self, name: str) -> None:
        """A request goes to that replica, which must load the adapter for it."""
        self._loads_sent.add(name)
        self.kept.pop(name, None)

    def load_over(self, name: str) -> None:
        """It was answered there, or left."""
        self._loads_sent.discard(name)
        self.kept.pop(name, None)

    def _own_of(self, replica: Replica) -> FittedSpeed | None:
        """What its answers showed, less the longer ago they are: a replica that only slow ones were
        seen of, and that gets no work for that, is tried again."""
        own = self.replicas.get(replica.heartbeat.replica)
        if own is None or own.speed is None:
            return None
        if replica.load:
            own.fitted_at = replica.seen_at
            self._fleet_fades_at = replica.seen_at + FLEET_REST_S
        idle_s = replica.seen_at - own.fitted_at
        if idle_s >= IDLE_STEP_S or own.prior is not replica.prior:
            if own.prior != replica.prior:
                own.lean_on(replica.prior)
            own.prior = replica.prior
            own.fit.fade(0.5 ** (idle_s / IDLE_HALF_LIFE_S))
            own.fitted_at = replica.seen_at
            self._fade_fleet(replica.seen_at)
            own.fit_to(self.fleet_speed)
        return own.speed

    def _fade_fleet(self, now: float) -> None:
        """Where all replicas were slow, and peers get all work for that, they are tried again."""
        idle_s = now - self._fleet_fades_at
        if idle_s >= IDLE_STEP_S:
            self._fleet_awake = self._fleet_awake or replace(self._fleet)
            self._fleet.fade(0.5 ** (idle_s / IDLE_HALF_LIFE_S))
            self._fleet_fades_at = now
            self.fleet_speed = self._fleet.speed(SPEED_START, FLEET_SLOPE_RIDGE)

    def _wake_fleet(self, thousands: float, running: float, ttft_s: float) -> None:
        """Believe what faded if the first answer after it agrees with that more than with what is
        left: a region that is slow costs one request for each rest."""
        awake, self._fleet_awake = self._fleet_awake, None
        if awake is not None:
            before = awake.speed(SPEED_START, FLEET_SLOPE_RIDGE)
            was_off, is_off = (
                abs(ttft_s - base_s - slope * KILO * thousands - s_per_decode * running)
                for base_s, slope, s_per_decode in (before, self.fleet_speed)
            )
            self._fleet = awake if was_off < is_off else self._fleet

    def is_known(self, target: Target) -> bool:
        """Whether its speed is more than a first guess."""
        answers = max(self.of(target).fit.w, self._fleet.w)
        return answers >= ANSWERS_MIN or self.reported(target) is not None

    def began(
        self, spot: Destination, tokens: float, running: float, ttft_s: float, *, now: float
    ) -> None:
        """A first token came `ttft_s` after its placement, round trip not counted."""
        if tokens > TOKENS_MAX:
            return
        y = min(TTFT_S_MAX, max(0.0, ttft_s))
        if spot.kind is CandidateKind.REPLICA:  # a peer's word is for that peer alone
            share = min(1.0, self._prompt_tokens_max / tokens) if tokens else 1.0
            self._wake_fleet(tokens / KILO, running, y)
            self._fleet_fades_at = now + FLEET_REST_S
            self._fleet.add(share * tokens / KILO, running, share * y)
            self.fleet_speed = self._fleet.speed(SPEED_START, FLEET_SLOPE_RIDGE)
        own = self._layer(spot).setdefault(spot.name, CandidateSpeed())
        own.add(tokens / KILO, running, y)
        own.fitted_at = now
        own.fit_to(self.fleet_speed)
        for name in (*self._at_fleet_speed, spot.name):
            self.kept.pop(name, None)
        self._at_fleet_speed.clear()

    def resided(self, spot: Destination, seconds: float) -> None:
        """An answer was complete so long after its first token."""
        own = self._layer(spot).setdefault(spot.name, CandidateSpeed())
        own.residence_s += 0.1 * (seconds - own.residence_s)
        own.slot_s = seconds if own.slot_s is None else 0.9 * own.slot_s + 0.1 * seconds

    def forget(self, spot: Destination) -> None:
        self._layer(spot).pop(spot.name, None)
        self.kept.pop(spot.name, None)
        self._at_fleet_speed.discard(spot.name)

    def _layer(self, spot: Destination) -> dict[str, CandidateSpeed]:
        return self.replicas if spot.kind is CandidateKind.REPLICA else self._peers

    def release_s(
        self, target: Target, lacking_tokens: float, slots: float, running: float
    ) -> float:
        """Until answers that run there have released that much memory, and so many slots of the
        batch."""
        memory_s = 0.0
        if lacking_tokens > 0.0:
            released_per_s = max(1.0, running) * self.kv_tokens / self.of(target).residence_s
            memory_s = lacking_tokens / released_per_s
        if slots <= 0.0:
            return memory_s
        answer_s = self.of(target).slot_s
        slot_s = SLOT_START_S if answer_s is None else answer_s / max(1.0, running)
        return max(memory_s, slots * slot_s)

    @property
    def _prompt_tokens_max(self) -> float:
        """The most tokens that one prompt counts in the averages over all."""
        return LONGER_PROMPT_MAX * max(PREFILL_TOKENS_START, self.prefill_tokens)

    @property
    def returns(self) -> float:
        """How many more prompts will follow one and go on from it, on average."""
        ratio = self._continued_ratio
        return RETURNS_MAX if ratio >= 1.0 else min(RETURNS_MAX, ratio / (1.0 - ratio))

    def usual_queue_tokens(self, replica: Replica) -> float:
        """Its queue where it is not reported: by its requests, each as long as usual."""
        return (replica.load if replica.pending is None else replica.pending) * self.prefill_tokens

    def batch(self, running: float) -> None:
        """So many ran beside a newcomer."""
        self._batches += 1
        self.running += _weight(self._batches) * (running - self.running)

    def prompt(self, prefill_tokens: int, *, goes_on: bool) -> None:
        """A prompt of which so many tokens had to be computed. `goes_on`: from an answer."""
        self._prompts += 1
        weight = _weight(self._prompts)
        self._continued_ratio += weight * (goes_on - self._continued_ratio)
        counted = min(prefill_tokens, self._prompt_tokens_max)
        self.prefill_tokens += weight * (counted - self.prefill_tokens)

    def answer(self, spot: Destination, prompt_tokens: int, output_tokens: int) -> None:
        """An answer of that length to a prompt of that length. A peer's counts only where no
        replica of this region has answered."""
        if spot.kind is CandidateKind.PEER and self.replicas:
            return
        self._answers += 1
        weight = _weight(self._answers)
        output = min(
            output_tokens, LONGER_ANSWER_MAX * max(ANSWER_TOKENS_LEAST, self.output_tokens)
        )
        prompt = min(prompt_tokens, LONGER_PROMPT_MAX * self.kv_tokens)
        self.kv_tokens += weight * (prompt + output - self.kv_tokens)
        self.output_tokens += weight * (output - self.output_tokens)


def _weight(seen: int) -> float:
    """Of the newest of so many observations: all weigh the same at first, later ones more."""
    return max(WEIGHT, 1.0 / (START_COUNTS + seen))
