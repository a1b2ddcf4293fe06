"""Replicas whose answers come later than those of their like, and the share of work each gets.

An engine whose GPU throttles, or that computes one request at a time, answers everything, so it
does not fail; and policies that don't learn speeds go on giving it as much as any other. So each
router compares what its own clients' requests showed. Of streams the time to the first token,
relative to what prompts with as many tokens to compute usually take, and the time per further
token, stalls included; of plain answers the whole time, relative to that of prompts and answers as
long. A first token that is still awaited counts with the time that it has taken so far. What three
quarters of a replica's last WINDOW answers exceed, ANSWERS_MIN at least, is compared with its like:
with the median of the medians of the others with the same model and kind of engine. Of the last RUN
answers half of the least counts, if that is more: what is twice as slow is seen sooner.

Slow is three times its like (SLOW): GPUs of two generations differ by a factor of two, and the
batches of equal replicas make about as much. Two things keep load from being taken for slowness: an
answer's time counts only where nothing waited before it, by the replica's own report, and a replica
that computes more than its like (MORE_WORK) is not judged: by the tokens of this router's requests
that have ended, and of the time per token by requests in its batch, as it reports them, over that
time, since another router may have filled it. ANSWER_FLOOR_S and TOKEN_FLOOR_S, added
to both sides, keep differences of milliseconds from being ratios. Where nobody is slow nothing
changes.

A slow one gets (SLOW / ratio)² of an equal part, SHARE_MIN at least: a tenth where it is ten times
as slow, about what it can compute. The share is at most halved each JUDGE_S, and grows by GROWTH
when its answers are better or older than FRESH_S. At most half of a model's replicas are slow at a
time, the worst ones, and one that alone could take a request may. Peers' requests are not seen
here, and pairs of a prefill and a decode replica not judged.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from mesh.core.model.request import Request, Served
from mesh.core.view.replica import Replica
from schemas.ids import ModelId, RegionId, ReplicaId

SLOW = 3.0
WINDOW, ANSWERS_MIN, RUN = 8, 4, 3
FRESH_S = 60.0
JUDGE_S = 1.0
ANSWER_FLOOR_S, TOKEN_FLOOR_S = 0.1, 0.005
MORE_WORK = 1.25
WORK_MEMORY = 0.9  # of tokens computed, from one judgement to the next
SHARE_MIN, GROWTH = 1 / 32, 1.25
DEBT_MIN = -1.0  # of requests that only it could take
OUTPUT_TOKENS_MIN = 8  # fewer may arrive in one burst
USUAL_WEIGHT = 0.02  # of one more first token, once there are some
PLACES_MAX, KINDS_MAX = 4096, 1024

Key = tuple[ReplicaId, ModelId]
# Of answers: kind of engine, model, bits of the counts of tokens: to compute before the first one,
# and of the whole answer; -1 of a stream.
Kind = tuple[str, ModelId, int, int]
Timed = tuple[float, float]  # when it was seen, and what
Answer = tuple[float, float, Kind]


@dataclass(slots=True)
class Sent:
    """A request under way."""

    key: Key
    engine: str
    tokens: int  # of its prompt, to compute
    sent_at: float
    streams: bool
    is_counted: bool  # nothing waited before it
    first_at: float | None = None

    def kind(self, output_tokens: int = 0) -> Kind:
        size = -1 if self.streams else output_tokens.bit_length()
        return self.engine, self.key[1], self.tokens.bit_length(), size


@dataclass(slots=True)
class Place:
    """One replica, for one model."""

    # When seen, and seconds: to first tokens, of plain answers, for each further token.
    firsts: deque[Answer] = field(default_factory=lambda: deque(maxlen=WINDOW))
    plain: deque[Answer] = field(default_factory=lambda: deque(maxlen=WINDOW))
    paces: deque[Timed] = field(default_factory=lambda: deque(maxlen=WINDOW))
    new_tokens: int = 0  # computed since the last judgement
    work: float = 0.0  # tokens of late

    def judged(self) -> None:
        self.work, self.new_tokens = WORK_MEMORY * self.work + self.new_tokens, 0


@dataclass(slots=True)
class SlowPlace:
    """A place that gets less work, and why."""

    what: str = ""
    share: float = 1.0  # of an equal part
    credit: float = 0.0  # of a request that it may be given: it may at 1

    @property
    def words(self) -> str:
        return f"slow: {self.what}"

    def move(self, target: float) -> None:
        self.share = min(1.0, self.share * GROWTH, max(target, SHARE_MIN, self.share / 2.0))


class SlowPlaces:
    """Of one router."""

    def __init__(self) -> None:
        self.by_key: dict[Key, SlowPlace] = {}
        self._places: dict[Key, Place] = {}
        self._sent: dict[int, Sent] = {}  # by the request's key
        self._usual: dict[Kind, tuple[int, float]] = {}  # answers seen, and their seconds
        self._due_at = float("-inf")

    # What happens to a client's request.

    def sent(self, request: Request, replica: Replica, tokens: int, now: float) -> None:
        """It goes there, with so many prompt tokens to compute; nothing of it is counted yet."""
        beat = replica.heartbeat
        key = beat.replica, request.model
        loads = request.model in beat.loadable or request.model in beat.loading
        is_counted = not (replica.pending or beat.full or loads)
        self._sent[request.key] = Sent(key, beat.engine, tokens, now, request.streams, is_counted)

    def began(self, request: int, now: float) -> None:
        """The first token of its stream is here."""
        sent = self._sent.get(request)
        if sent is not None and sent.first_at is None:
            sent.first_at = now

    def served(self, request: int, served: Served, now: float) -> None:
        """It has ended well."""
        sent, output_tokens = self._sent.get(request), served.output_tokens or 0
        if sent is None or (sent.first_at is None and (sent.streams or not output_tokens)):
            return
        if (place := self._place(sent.key)) is None:
            return
        first_at, expected = sent.first_at or now, sent.kind(output_tokens)
        if served.prompt_tokens is not None and served.cached_tokens is not None:
            sent.tokens = max(0, served.prompt_tokens - served.cached_tokens)
        place.new_tokens += sent.tokens + output_tokens
        if sent.is_counted:
            seconds, kind = first_at - sent.sent_at + ANSWER_FLOOR_S, sent.kind(output_tokens)
            (place.firsts if sent.streams else place.plain).append((now, seconds, kind))
            for each in {expected, kind}:  # what is awaited is known by what is expected
                self._learn(each, seconds)
        if sent.streams and output_tokens >= OUTPUT_TOKENS_MIN:
            place.paces.append((now, (now - first_at) / (output_tokens - 1)))

    def left(self, request: int) -> None:
        """It is over, however it ended."""
        self._sent.pop(request, None)

    def forget(self, name: ReplicaId) -> None:
        """Another process runs there now, or none."""
        for of in (self._places, self.by_key):
            for key in [key for key in of if key[0] == name]:
                del of[key]

    # What follows.

    def judge(self, replicas: Mapping[ReplicaId, Replica], now: float) -> None:
        """Compare all, if it is due."""
        if now < self._due_at:
            return
        self._due_at = now + JUDGE_S
        like: dict[tuple[str, RegionId, ModelId], list[Key]] = {}
        running: dict[Key, int] = {}
        for key, place in list(self._places.items()):
            if (replica := replicas.get(key[0])) is None:
                self.forget(key[0])
                continue
            place.judged()
            beat = replica.heartbeat
            like.setdefault((beat.engine, beat.region, key[1]), []).append(key)
            running[key] = beat.running or 0
        waits = self._waits(now) if self._sent else {}
        worse: dict[Key, tuple[float, str]] = {}
        for keys in like.values():
            if len(keys) > 1:
                worse.update(self._worse(keys, waits, running, now))
        for key in worse.keys() - self.by_key.keys():
            self.by_key[key] = SlowPlace()
        for key, slow in list(self.by_key.items()):
            ratio, slow.what = worse.get(key, (0.0, slow.what))
            slow.move((SLOW / ratio) ** 2 if ratio else 1.0)
            if slow.share >= 1.0:
                del self.by_key[key]

    def placed(self, name: str, model: ModelId, places: int) -> None:
        """A request for the model went there, of so many replicas that serve it."""
        for (other, its_model), slow in self.by_key.items():
            if its_model == model:
                credit = min(1.0, slow.credit + slow.share / places) - (other == name)
                slow.credit = max(DEBT_MIN, credit)

    def bars(self, name: str, model: ModelId) -> str | None:
        """Why the replica should not get the next request for the model; None if it may."""
        slow = self.by_key.get((ReplicaId(name), model))
        return None if slow is None or slow.credit >= 1.0 else slow.words

    def words(self) -> dict[str, str]:
        """Why each that is slow gets less."""
        return {name: slow.words for (name, _), slow in self.by_key.items()}

    def shares(self) -> dict[str, float]:
        """Of an equal part, of each that is slow: its least, of several models."""
        found: dict[str, float] = {}
        for (name, _), slow in self.by_key.items():
            found[name] = min(slow.share, found.get(name, 1.0))
        return found

    def _worse(
        self,
        keys: Sequence[Key],
        waits: Mapping[Key, list[Timed]],
        running: Mapping[Key, int],
        now: float,
    ) -> Iterable[tuple[Key, tuple[float, str]]]:
        """Those that are slow among these, each with how slow, the worst half at most."""
        places = self._places
        measures = (
            (
                "first tokens",
                0.0,
                {k: self._ratios(places[k].firsts) + waits.get(k, []) for k in keys},
            ),
            ("plain answers", 0.0, {key: self._ratios(places[key].plain) for key in keys}),
            ("tokens", TOKEN_FLOOR_S, {key: places[key].paces for key in keys}),
        )
        found: dict[Key, tuple[float, str]] = {}
        for what, floor, seen in measures:
            last = {key: _last(seen[key], now - FRESH_S) for key in keys}
            medians = {key: floor + median(each) for key, each in last.items() if each}
            least = SLOW * min(medians.values(), default=0.0)
            # What a batch computes in a second, other routers' requests included.
            rates = {key: running[key] / medians[key] for key in medians} if floor else {}
            for key, each in last.items() if len(medians) > 1 else ():
                if not each or floor + max(each) < least or self._works_more(key, keys):
                    continue
                if rates and rates[key] > MORE_WORK * _of_others(rates, key):
                    continue
                ratio = (floor + _own(each)) / _of_others(medians, key)
                if ratio >= SLOW and ratio > found.get(key, (0.0, ""))[0]:
                    found[key] = ratio, f"{what} {ratio:.1f}× its like"
        known = [key for key in keys if key in self.by_key]
        new = sorted(found.keys() - known, key=lambda key: -found[key][0])
        most = max(0, len(keys) // 2 - len(known))
        return [(key, found[key]) for key in (*known, *new[:most]) if key in found]

    def _works_more(self, key: Key, keys: Collection[Key]) -> bool:
        work = {each: self._places[each].work for each in keys}
        return work[key] > MORE_WORK * _of_others(work, key)

    def _ratios(self, seen: Iterable[Answer]) -> list[Timed]:
        """How long answers took, as multiples of what such ones usually take."""
        usual = self._usual
        return [(at, seconds / usual[kind][1]) for at, seconds, kind in seen if kind in usual]

    def _waits(self, now: float) -> dict[Key, list[Timed]]:
        """How long first tokens are awaited, where that is longer than usual."""
        found: dict[Key, list[Timed]] = {}
        for sent in self._sent.values():
            if sent.streams and sent.is_counted and sent.first_at is None:
                _, usual_s = self._usual.get(sent.kind(), (0, inf))
                seconds = now - sent.sent_at + ANSWER_FLOOR_S
                if seconds > usual_s:
                    found.setdefault(sent.key, []).append((now, seconds / usual_s))
        return found

    def _learn(self, kind: Kind, seconds: float) -> None:
        seen, usual = self._usual.get(kind, (0, seconds))
        if seen == 0 and len(self._usual) >= KINDS_MAX:
            self._usual.clear()
        usual += max(USUAL_WEIGHT, 1.0 / (seen + 1)) * (seconds - usual)
        self._usual[kind] = seen + 1, usual

    def _place(self, key: Key) -> Place | None:
        if key not in self._places and len(self._places) < PLACES_MAX:
            self._places[key] = Place()
        return self._places.get(key)


def _last(seen: Collection[Timed], since: float) -> list[float]:
    """The last WINDOW of them that are newer; none of too few."""
    fresh = [value for at, value in seen if at >= since][-WINDOW:]
    return fresh if len(fresh) >= RUN else []


def _own(last: Sequence[float]) -> float:
    """What a replica's last answers show of it."""
    run = min(last[-RUN:]) / 2.0
    return run if len(last) < ANSWERS_MIN else max(run, sorted(last)[len(last) // 4])


def _of_others(values: Mapping[Key, float], key: Key) -> float:
    return median([value for other, value in values.items() if other != key])
