"""What the `mesh` policy learns from what becomes of its placements.

A first token takes

    ttft_s = base_s + s_per_token × tokens to compute before it + s_per_decode × requests running

(GORGO, section 4.2, has the first two terms). Prefill shares iterations with decodes, every
engine in its own way, so each candidate's three numbers are fitted on line, by least squares
that forget, to what its placements came to: a mixed fleet needs no table, and an engine that
slows down is noticed within some thirty answers. A candidate with few answers
leans on the fleet: the fit is a ridge towards it, as heavy as RIDGE answers. One with none has the
speed that its heartbeat or digest tells. The fleet's own slope leans little on the one that is
taken for granted at start: that is off by a factor on most GPUs, and while it is too steep,
prompts are sent away that would have been quicker at home.

Rejected: scaling an estimate by observed over expected, which can't tell a slow engine from one
that has much to decode.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from mesh.core.policies.base import Destination, Target
from schemas.decision import CandidateKind
from schemas.ids import ModelId
from schemas.state import Heartbeat

MEMORY = 0.97  # kept of the past at each answer: some thirty of them
RIDGE = 8.0  # answers
FLEET_SLOPE_RIDGE = 2.0
ANSWERS_MIN = 4.0  # before which estimates are guesses that nobody may be shed for
RUNNING_START = 8.0  # beside a newcomer, where nobody tells
KILO = 1000.0  # tokens are counted in thousands inside, for well-scaled sums
TTFT_S_MAX = 60.0  # a longer one tells of an accident, not of a speed
RESIDENCE_START_S = 10.0
PREFILL_TOKENS_START = 500.0
OUTPUT_TOKENS_START = 200.0
# From short prompts alone nothing follows for long ones: as much as an answer to 300 tokens says
# holds the slope. In squared thousands of tokens.
ANCHOR = 0.3**2
MODELS_MAX = 256  # the one that was taught first out
WEIGHT = 0.02  # of a new observation in the averages over all, once there are some fifty
START_COUNTS = 4.0  # observations, the value that an average starts from
RETURNS_MAX = 16.0


class FittedSpeed(NamedTuple):
    """The three numbers. Seconds, seconds per prompt token, seconds per running request."""

    base_s: float
    s_per_token: float
    s_per_decode: float


# Before anybody told or taught anything: about an 8B model on a recent data centre GPU.
SPEED_START = FittedSpeed(base_s=0.05, s_per_token=1e-4, s_per_decode=0.0)


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

    def speed(self, prior: FittedSpeed, slope_ridge: float = RIDGE) -> FittedSpeed:
        """The ridge towards `prior`, which weighs as much as RIDGE answers like these.

        Its slope weighs `slope_ridge` of them, and ANCHOR whatever they were like. No number falls
        below a tenth of it, or below zero.
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
            (self.w + RIDGE, self.x, self.n),
            (self.xx + slope_ridge / self.w * self.xx + ANCHOR, self.xn),
            self.nn + RIDGE / self.w * self.nn + 1e-9,
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


@dataclass(slots=True)
class CandidateSpeed:
    """What is known of one candidate."""

    fit: SpeedFit = field(default_factory=SpeedFit)
    speed: FittedSpeed | None = None
    residence_s: float = RESIDENCE_START_S
    slot_s: float | None = None  # the same, of answers that were seen; None before the first

    def resided(self, seconds: float) -> None:
        """An answer was complete so long after its first token."""
        self.residence_s += 0.1 * (seconds - self.residence_s)
        self.slot_s = seconds if self.slot_s is None else 0.9 * self.slot_s + 0.1 * seconds


UNKNOWN_SPEED = CandidateSpeed()


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class ReplicaSpeeds:
    """What a replica's last word comes to at its speed, whatever it is asked: `mesh.py`.

    Kept because a busy router decides many times between two heartbeats of a replica.
    """

    heartbeat: Heartbeat
    s_per_token: float
    running: float
    base_s: float
    batch_s: float  # what all that run there pay for one more
    stalled: float  # decodes that a prefill stalls, by their weight
    kv_reported_tokens: float  # infinite where nobody tells
    queued_tokens: int | None  # told to be
    batch_max: float  # requests that run at once; infinite where nobody tells


class SpeedModel:
    """Of one model: by candidate, and of all of them together."""

    def __init__(self) -> None:
        self.replicas: dict[str, CandidateSpeed] = {}  # to be read
        # To be read, for as long as the heartbeat is the replica's last; gone with its speed.
        self.standings: dict[str, ReplicaSpeeds] = {}
        self._leaning: set[str] = set()  # those of them that follow the fleet's speed
        self._peers: dict[str, CandidateSpeed] = {}
        self._cluster_events = SpeedFit()
        self.fleet_speed = SPEED_START
        self._prompts = self._answers = self._batches = 0
        self._continued_ratio = 0.0  # prompts that go on where an earlier answer ended
        self.running = RUNNING_START  # beside a newcomer, usually
        self.prefill_tokens = PREFILL_TOKENS_START
        self.output_tokens = OUTPUT_TOKENS_START
        self.kv_tokens = PREFILL_TOKENS_START + OUTPUT_TOKENS_START  # of a whole request

    def of(self, target: Target) -> CandidateSpeed:
        """What is known of that candidate."""
        of = self.replicas if target.peer is None else self._peers
        return of.get(target.name, UNKNOWN_SPEED)

    def speed(self, target: Target) -> FittedSpeed:
        """Its own; until it has answered, what its agent or its region tells; else the fleet's."""
        return self.of(target).speed or self.told(target) or self.fleet_speed

    def speed_to_stand(self, beat: Heartbeat) -> FittedSpeed:
        """The same for a replica whose `ReplicaSpeeds` are going to be kept."""
        own = self.replicas.get(beat.replica, UNKNOWN_SPEED).speed
        if own is not None:
            return own
        self._leaning.add(beat.replica)
        return self.told_by(beat) or self.fleet_speed

    def told(self, target: Target) -> FittedSpeed | None:
        """By its heartbeat or digest; None if that tells no speed."""
        if target.replica is not None:
            return self.told_by(target.replica.heartbeat)
        return None if target.peer is None else self._completed(*target.peer.prefill)

    def told_by(self, beat: Heartbeat) -> FittedSpeed | None:
        """The same for a replica, in one call."""
        return self._completed(beat.prefill_s_per_token, beat.prefill_base_s)

    def _completed(self, slope: float | None, base_s: float | None) -> FittedSpeed | None:
        if slope is None:
            return None
        usual_s, _, s_per_decode = self.fleet_speed
        # Made past its own `__new__`, which takes twice as long, for everybody at every decision.
        return tuple.__new__(
            FittedSpeed, (usual_s if base_s is None else base_s, slope, s_per_decode)
        )

    def knows(self, target: Target) -> bool:
        """Whether its speed is more than a first guess."""
        answers = max(self.of(target).fit.w, self._cluster_events.w)
        return answers >= ANSWERS_MIN or self.told(target) is not None

    def began(self, spot: Destination, tokens: float, running: float, ttft_s: float) -> None:
        """A first token came `ttft_s` after it was asked for, round trip not counted."""
        y = min(TTFT_S_MAX, max(0.0, ttft_s))
        self._cluster_events.add(tokens / KILO, running, y)
        self.fleet_speed = self._cluster_events.speed(SPEED_START, FLEET_SLOPE_RIDGE)
        lesson = self._known(spot)
        lesson.fit.add(tokens / KILO, running, y)
        lesson.speed = lesson.fit.speed(self.fleet_speed)
        for name in (*self._leaning, spot.name):
            self.standings.pop(name, None)
        self._leaning.clear()

    @property
    def returns(self) -> float:
        """How many more prompts will follow one and go on from it, on average."""
        ratio = self._continued_ratio
        return RETURNS_MAX if ratio >= 1.0 else min(RETURNS_MAX, ratio / (1.0 - ratio))

    def batch(self, running: float) -> None:
        """So many ran beside a newcomer."""
        self._batches += 1
        self.running += _weight(self._batches) * (running - self.running)

    def resided(self, spot: Destination, seconds: float) -> None:
        """An answer was complete so long after its first token."""
        self._known(spot).resided(seconds)

    def forget(self, spot: Destination) -> None:
        """Whoever comes back under that name is another."""
        self._layer(spot).pop(spot.name, None)
        self.standings.pop(spot.name, None)
        self._leaning.discard(spot.name)

    def _known(self, spot: Destination) -> CandidateSpeed:
        """The lesson of that candidate, from now on."""
        of = self._layer(spot)
        lesson = of.get(spot.name)
        if lesson is None:
            lesson = of[spot.name] = CandidateSpeed()
        return lesson

    def _layer(self, spot: Destination) -> dict[str, CandidateSpeed]:
        return self.replicas if spot.kind is CandidateKind.REPLICA else self._peers

    def prompt(self, prefill_tokens: int, *, goes_on: bool) -> None:
        """A prompt of which so many tokens had to be computed. `goes_on`: from an answer."""
        self._prompts += 1
        weight = _weight(self._prompts)
        self._continued_ratio += weight * (goes_on - self._continued_ratio)
        self.prefill_tokens += weight * (prefill_tokens - self.prefill_tokens)

    def answer(self, prompt_tokens: int, output_tokens: int) -> None:
        """An answer of that length to a prompt of that length."""
        self._answers += 1
        weight = _weight(self._answers)
        self.kv_tokens += weight * (prompt_tokens + output_tokens - self.kv_tokens)
        self.output_tokens += weight * (output_tokens - self.output_tokens)


def _weight(seen: int) -> float:
    """Of the newest of so many observations: all count alike at first, later ones more."""
    return max(WEIGHT, 1.0 / (START_COUNTS + seen))


class SpeedModels:
    """The lessons of each model: a fleet of large and small ones has no speed in common."""

    def __init__(self) -> None:
        self._of: dict[ModelId, SpeedModel] = {}

    def of(self, model: ModelId) -> SpeedModel:
        """That model's."""
        lessons = self._of.get(model)
        if lessons is None:
            if len(self._of) >= MODELS_MAX:
                del self._of[next(iter(self._of))]
            lessons = self._of[model] = SpeedModel()
        return lessons

    def forget(self, spot: Destination) -> None:
        """Whoever comes back under that name is another, whatever it serves."""
        for lessons in self._of.values():
            lessons.forget(spot)
