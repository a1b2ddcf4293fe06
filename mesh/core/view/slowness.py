"""Replicas that answer later than their like, and requests that wait too long at one.

An engine whose GPU throttles, or that computes one request at a time, answers everything, so it
does not fail; one that is frozen answers nothing, and its HTTP server may go on. And policies that
don't learn speeds give both as much as any other. So each router compares what its own clients'
requests showed: of streams the time to the first token, of plain answers the whole time, both
relative to what prompts, and answers, of that length usually take; and of streams the time per
further token, stalls included. An answer counts by whichever is worse. A first token that is still
awaited counts with the time that it has taken so far. The lower quartile of a replica's last WINDOW
answers, ANSWERS_MIN at least, or half of the least of its last RUN, whichever is more, is compared
with its like: with the median of the medians of the others with the same model and kind of engine.

Slow is three times its like (SLOW): GPUs of two generations differ by a factor of two, and the
batches of equal replicas make about as much. Two things keep load from being taken for slowness: an
answer's time counts only where nothing waited before it, by the replica's own report, and a replica
that computes more than its like (MORE_WORK) is not judged: by the tokens of this router's requests
that have ended, and of the time per token by requests in its batch, as it reports them, over that
time, since another router may have filled it. ANSWER_FLOOR_S and TOKEN_FLOOR_S, added to both
sides, keep differences of milliseconds from being ratios. Where nobody is slow nothing changes.

A slow one gets (SLOW / ratio)² of an equal part, SHARE_MIN at least: a tenth where it is ten times
as slow, about what it can compute. The share is at most halved each JUDGE_S, and grows by GROWTH
when its answers are better or older than FRESH_S. Of each group of like replicas at most half are
slow at a time: those that were already, then the worst of the others. One that alone could take a
request may.

A request without a byte is *overdue* where two things hold. It has waited, and its replica has
brought nothing, for OVERDUE times longer than any of the last answers to prompts of that length
took on any of its like, the first WINDOW of them and its own apart; prompts that the replica has to
compute before it count as its own, other routers' too. And one of its like has begun to answer a
request that was sent later. A plain answer shows nothing before its last token, and a long one is
no fault of its replica: it is overdue only where PLAIN_MIN are, or a stream was, and nothing came
since. Beside one that was overdue, as long as the longest is long enough. A replica that reports a
queue, then and now, is silent for that reason, unless an earlier request was overdue there. The
caller may place the request on another replica, once; and the silent one is left out
(`outliers.py`). That happens to AGAIN_SHARE of all requests at most, so few prompts are computed
twice; and at a replica that was late LATE_FREE times in a row what is sent has twice as long each
next time, since it may have to load its model.

A replica that is ready and no longer lists a model which it has answered, as an engine that was
started anew with another one, fails nothing; people are told of it for a while.

Peers are not judged here: their routers judge their replicas, and an answer of theirs contains
the round trip and their queue. Nor are pairs of a prefill and a decode replica, which share a time.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

from mesh.core.model.request import Request, Served
from mesh.core.model.served_names import model_of
from mesh.core.view.replica import Replica
from schemas.ids import ModelId, RegionId, ReplicaId
from schemas.state import Heartbeat, ReplicaState

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
USUAL_WEIGHT = 0.02  # of one more answer, once there are some
PLACES_MAX, KINDS_MAX = 4096, 1024
GONE_S = 120.0  # people are told for so long after its last answer

OVERDUE = 2.0
LONGEST_HALF_S = 20.0  # in which the longest is half forgotten, by USUAL_WEIGHT an answer at most
LATE_MIN_S = 0.2  # a request that has waited for less is never overdue
AGAIN_SHARE, AGAIN_MAX = 0.05, 8.0  # of requests that end; most at once
PLAIN_MIN = 3  # plain answers that are late together show as much as one stream
LATE_FREE, LATE_MAX = 3, 10  # times late in a row before the time is doubled; doubled no further

STREAM, ANY_LENGTH = -1, 0  # instead of the bits of an answer's tokens
Key = tuple[ReplicaId, ModelId]
Group = tuple[str, RegionId, ModelId]  # of like places: kind of engine, region, model
# Of answers: group, bits of the count of prompt tokens to compute, and of the answer's.
Kind = tuple[Group, int, int]


class Usual(NamedTuple):
    """What answers of one kind take. Seconds, with ANSWER_FLOOR_S."""

    seen: int
    mean_s: float
    at: float  # of the last one
    longest_s: float  # of late
    longest_of: Key  # who took it
    others_s: float  # the longest of any other place


class Answer(NamedTuple):
    """How long one took. Seconds."""

    at: float
    kind: Kind
    time_s: float | None  # to the first token, or of the whole; None: something waited before it
    token_s: float | None


class Seen(NamedTuple):
    """How long an answer took, beside others."""

    time: float | None = None  # a multiple of what such answers usually take
    pace: float | None = None  # seconds per token, with TOKEN_FLOOR_S
    is_stream: bool = True

    def ratio(self, usual_time: float, usual_pace: float) -> tuple[float, str]:
        """How much longer than that, by whichever is worse, and what was."""
        what = "first tokens" if self.is_stream else "plain answers"
        by_pace = (self.pace or 0.0) / usual_pace, "tokens"
        return max(((self.time or 0.0) / usual_time, what), by_pace)


@dataclass(slots=True)
class Place:
    """One replica, for one model."""

    key: Key
    group: Group
    ended: "deque[Sent]" = field(default_factory=lambda: deque(maxlen=WINDOW))  # not yet judged
    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=WINDOW))
    new_tokens: int = 0  # computed since the last judgement
    work: float = 0.0  # tokens of late
    heard_at: float = -inf  # it last brought a first token or an answer
    heard_of: float = -inf  # when the latest sent request that it began to answer was sent
    late: int = 0  # requests overdue there, each sent after the one before was, and nothing came

    def heard(self, sent_at: float, now: float) -> None:
        self.heard_at, self.late = now, 0
        if sent_at > self.heard_of:
            self.heard_of = sent_at


@dataclass(slots=True)
class Sent:
    """A request that is under way, or has ended well."""

    place: Place
    tokens: int  # of its prompt, to compute
    sent_at: float
    streams: bool
    is_counted: bool  # nothing waited before it
    loads: bool  # its model may have to be loaded for it
    late: int  # that of its place, when it was sent
    first_at: float | None = None
    ended_at: float = 0.0
    computed_tokens: int = 0  # of its prompt
    output_tokens: int = 0

    def answer(self) -> Answer:
        """How long it took, once it has ended."""
        first_at, output_tokens = self.first_at or self.ended_at, self.output_tokens
        size = STREAM if self.streams else output_tokens.bit_length()
        kind = self.place.group, self.computed_tokens.bit_length(), size
        time_s = first_at - self.sent_at + ANSWER_FLOOR_S if self.is_counted else None
        is_whole = first_at == self.ended_at  # it came at once, and shows no pace
        has_pace = self.streams and output_tokens >= OUTPUT_TOKENS_MIN and not is_whole
        token_s = (self.ended_at - first_at) / (output_tokens - 1) if has_pace else None
        return Answer(self.ended_at, kind, time_s, token_s)

    def expected(self) -> Kind:
        """Of what is known when it is sent."""
        size = STREAM if self.streams else ANY_LENGTH
        return self.place.group, self.tokens.bit_length(), size


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
        self._sent: dict[int, Sent] = {}  # by the request's key, the first that was sent first
        self._usual: dict[Kind, Usual] = {}
        self._due_at = -inf
        self._again = AGAIN_MAX  # overdue requests that may be placed again, a bucket
        self.gone: dict[str, str] = {}  # replicas that list a model no more, in words

    # What happens to a client's request.

    def sent(self, request: Request, replica: Replica, tokens: int, now: float) -> None:
        """It goes there, with so many prompt tokens to compute; nothing of it is counted yet."""
        beat, model = replica.heartbeat, request.model
        key = beat.replica, model
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= PLACES_MAX:
                return
            self._places[key] = place = Place(key, (beat.engine, beat.region, model))
        loads = model in beat.loadable or model in beat.loading
        is_counted = not (replica.pending or beat.full or loads)
        self._sent[request.key] = Sent(
            place, tokens, now, request.streams, is_counted, loads, place.late
        )

    def began(self, request: int, now: float) -> None:
        """The first token of its stream is here."""
        sent = self._sent.get(request)
        if sent is not None and sent.first_at is None:
            sent.first_at = now
            sent.place.heard(sent.sent_at, now)

    def served(self, request: int, served: Served, now: float) -> None:
        """It has ended well."""
        sent, output_tokens = self._sent.get(request), served.output_tokens or 0
        if sent is None or (sent.first_at is None and (sent.streams or not output_tokens)):
            return
        place, tokens = sent.place, sent.tokens
        if served.prompt_tokens is not None and served.cached_tokens is not None:
            tokens = max(0, served.prompt_tokens - served.cached_tokens)
        sent.ended_at, sent.computed_tokens, sent.output_tokens = now, tokens, output_tokens
        place.heard(sent.sent_at, now)
        place.new_tokens += tokens + output_tokens
        place.ended.append(sent)
        if self._again < AGAIN_MAX:
            self._again = min(AGAIN_MAX, self._again + AGAIN_SHARE)

    def left(self, request: int) -> None:
        """It is over, however it ended."""
        self._sent.pop(request, None)

    def forget(self, name: ReplicaId) -> None:
        """Another process runs there now, or none."""
        for of in (self._places, self.by_key):
            for key in [key for key in of if key[0] == name]:
                del of[key]

    # What follows.

    def overdue(self, replicas: Mapping[ReplicaId, Replica], now: float) -> list[int]:
        """Requests that another place should answer, while `may_place_again`. The caller says by
        `placed_again` which it takes from their places."""
        if not self.may_place_again:
            return []
        late: list[tuple[int, Sent, int]] = []
        plain: dict[Key, int] = {}  # of them, by place
        before: dict[Key, int] = {}  # tokens of the requests sent before, that one's included
        for request, sent in self._sent.items():
            if now - sent.sent_at < LATE_MIN_S:
                break
            if sent.first_at is not None:
                continue
            place = sent.place
            tokens = before[place.key] = before.get(place.key, 0) + sent.tokens
            if not sent.loads and self._is_late(sent, 0.0, now):
                late.append((request, sent, tokens))
                plain[place.key] = plain.get(place.key, 0) + (not sent.streams)
        late = [
            (request, sent, tokens)
            for request, sent, tokens in late
            if sent.streams or sent.place.late or plain[sent.place.key] >= PLAIN_MIN
        ]
        return self._more_than_late(late, replicas, now) if late else []

    def _more_than_late(
        self, late: list[tuple[int, Sent, int]], replicas: Mapping[ReplicaId, Replica], now: float
    ) -> list[int]:
        """Those whose like answer, and which no queue and no other router's prompt holds up."""
        heard_of: dict[Group, float] = {}  # a late place has begun nothing since
        for place in self._places.values():
            heard_of[place.group] = max(place.heard_of, heard_of.get(place.group, -inf))
        own: dict[Key, int] = {}
        for sent in self._sent.values():
            if sent.first_at is None:
                own[sent.place.key] = own.get(sent.place.key, 0) + sent.tokens
        found: list[int] = []
        for request, sent, tokens in late:
            place = sent.place
            if (replica := replicas.get(place.key[0])) is None:
                continue
            beat = replica.heartbeat
            has_queue = bool(beat.pending or beat.full) and not (sent.is_counted or place.late)
            of_others = max(0, (beat.prefill_queued_tokens or 0) - own[place.key])
            answer_others = heard_of.get(place.group, -inf) > sent.sent_at
            ahead = tokens - sent.tokens + of_others
            s_per_token = replica.prefill_line[0] or self._longest_s(sent) / max(1, sent.tokens)
            ahead_s = ahead * s_per_token
            if answer_others and not has_queue and self._is_late(sent, ahead_s, now):
                found.append(request)
        return found

    def heard_since_sent(self, request: int) -> bool:
        """Whether its place has begun or answered another one since it was sent there."""
        sent = self._sent.get(request)
        return sent is not None and sent.place.heard_at > sent.sent_at

    @property
    def may_place_again(self) -> bool:
        """Whether another request may be taken from its place."""
        return self._again >= 1.0

    def placed_again(self, request: int, now: float) -> None:
        """It was overdue, and leaves its place for that."""
        if (sent := self._sent.get(request)) is not None:
            sent.place.late = max(sent.place.late, sent.late + 1)
            self._again -= 1.0

    def _is_late(self, sent: Sent, ahead_s: float, now: float) -> bool:
        """Whether it has waited in silence too long, `ahead_s` of it for prompts to be computed
        before."""
        times = 1.0 if sent.place.late else OVERDUE
        times *= 2.0 ** min(LATE_MAX, max(0, sent.late + 1 - LATE_FREE))
        silent_s = now - max(sent.sent_at, sent.place.heard_at)
        return silent_s + ANSWER_FLOOR_S > times * (self._longest_s(sent) + ahead_s)

    def _longest_s(self, sent: Sent) -> float:
        """The longest that one like it took of late elsewhere; inf if too few are known."""
        group, bits, size = sent.expected()
        for fewer in range(bits, -1, -1):
            usual = self._usual.get((group, fewer, size))
            if usual is not None and usual.seen >= 2 * WINDOW:
                is_own = usual.longest_of == sent.place.key
                longest_s = (usual.others_s or inf) if is_own else usual.longest_s
                return longest_s * 2.0 ** (bits - fewer)
        return inf

    def judge(self, replicas: Mapping[ReplicaId, Replica], now: float) -> None:
        """Compare all, if it is due."""
        if now < self._due_at:
            return
        self._due_at = now + JUDGE_S
        like: dict[Group, dict[Key, Place]] = {}
        self.gone = {}
        for key, place in list(self._places.items()):
            if key[0] not in replicas:
                self.forget(key[0])
                continue
            if now - place.heard_at < GONE_S and _is_gone(key[1], replicas[key[0]].heartbeat):
                self.gone[key[0]] = f"no longer serves {key[1]!r}"
            self._learn(place)
            like.setdefault(place.group, {})[key] = place
        waits = self._waits(now) if self._sent else {}
        worse: dict[Key, tuple[float, str]] = {}
        for places in like.values():
            if len(places) > 1:
                running = {key: replicas[key[0]].heartbeat.running or 0 for key in places}
                worse.update(self._worse(places, waits, running, now))
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
        """Why each that is slow gets less, and each that lists a model no more gets none for it."""
        return self.gone | {name: slow.words for (name, _), slow in self.by_key.items()}

    def shares(self) -> dict[str, float]:
        """Of an equal part, of each that is slow: its least, of several models."""
        found: dict[str, float] = {}
        for (name, _), slow in self.by_key.items():
            found[name] = min(slow.share, found.get(name, 1.0))
        return found

    def _worse(
        self,
        places: Mapping[Key, Place],
        waits: Mapping[Key, list[float]],
        running: Mapping[Key, int],
        now: float,
    ) -> Iterable[tuple[Key, tuple[float, str]]]:
        """Those that are slow among these, each with how slow, the worst half at most."""
        last = {
            key: (self._seen(place, now - FRESH_S) + [Seen(ratio) for ratio in waits.get(key, ())])[
                -WINDOW:
            ]
            for key, place in places.items()
        }
        times = _medians({key: [one.time for one in seen] for key, seen in last.items()}, RUN)
        paces = _medians({key: [one.pace for one in seen] for key, seen in last.items()}, RUN)
        # What a batch computes in a second, other routers' requests included.
        rates = {key: running[key] / pace for key, pace in paces.items()}
        least_time, least_pace = (SLOW * min(of.values(), default=inf) for of in (times, paces))
        found: dict[Key, tuple[float, str]] = {}
        for key, seen in last.items():
            if len(seen) < RUN or not any(
                (one.time or 0.0) >= least_time or (one.pace or 0.0) >= least_pace for one in seen
            ):
                continue
            if _is_more({other: place.work for other, place in places.items()}, key):
                continue
            usual_time, usual_pace = _of_others(times, key), _of_others(paces, key)
            own_paces = [one.pace for one in seen if one.pace is not None]
            if own_paces and _is_more({**rates, key: running[key] / median(own_paces)}, key):
                usual_pace = inf
            ratio, what = _own([one.ratio(usual_time, usual_pace) for one in seen])
            if ratio >= SLOW:
                found[key] = ratio, f"{what} {ratio:.1f}× its like"
        known = [key for key in places if key in self.by_key]
        new = sorted(found.keys() - known, key=lambda key: -found[key][0])
        most = max(0, len(places) // 2 - len(known))
        return [(key, found[key]) for key in (*known, *new[:most]) if key in found]

    def _seen(self, place: Place, since: float) -> list[Seen]:
        """Of its last answers: how long they took, as multiples of what such ones usually take."""
        usual, found = self._usual, list[Seen]()
        for at, kind, time_s, token_s in place.answers:
            time = time_s / usual[kind].mean_s if time_s is not None and kind in usual else None
            pace = None if token_s is None else TOKEN_FLOOR_S + token_s
            if at >= since and not (time is None and pace is None):
                found.append(Seen(time, pace, is_stream=kind[2] == STREAM))
        return found

    def _waits(self, now: float) -> dict[Key, list[float]]:
        """How long first tokens are awaited, as multiples of the usual, where it is longer."""
        found: dict[Key, list[float]] = {}
        for sent in self._sent.values():
            if sent.streams and sent.is_counted and sent.first_at is None:
                usual = self._usual.get(sent.expected())
                seconds = now - sent.sent_at + ANSWER_FLOOR_S
                if usual is not None and seconds > usual.mean_s:
                    found.setdefault(sent.place.key, []).append(seconds / usual.mean_s)
        return found

    def _learn(self, place: Place) -> None:
        """Take in what it has answered since the last judgement."""
        place.work, place.new_tokens = WORK_MEMORY * place.work + place.new_tokens, 0
        for sent in place.ended:
            answer = sent.answer()
            place.answers.append(answer)
            if answer.time_s is not None:
                for kind in {sent.expected(), answer.kind}:  # what is awaited is known by the first
                    self._count(kind, answer.time_s, place.key, answer.at)
        place.ended.clear()

    def _count(self, kind: Kind, time_s: float, of: Key, at: float) -> None:
        usual = self._usual.get(kind)
        if usual is None:
            if len(self._usual) >= KINDS_MAX:
                self._usual.clear()
            usual = Usual(0, time_s, at, 0.0, of, 0.0)
        mean_s = usual.mean_s + max(USUAL_WEIGHT, 1.0 / (usual.seen + 1)) * (time_s - usual.mean_s)
        kept = max(1.0 - USUAL_WEIGHT, 0.5 ** (max(0.0, at - usual.at) / LONGEST_HALF_S))
        kept = kept if usual.seen >= WINDOW else 0.0
        longest_s, longest_of, others_s = (
            kept * usual.longest_s,
            usual.longest_of,
            kept * usual.others_s,
        )
        if of == longest_of:
            longest_s = max(longest_s, time_s)
        elif time_s > longest_s:
            longest_s, longest_of, others_s = time_s, of, longest_s
        else:
            others_s = max(others_s, time_s)
        self._usual[kind] = Usual(usual.seen + 1, mean_s, at, longest_s, longest_of, others_s)


def _is_gone(model: ModelId, beat: Heartbeat) -> bool:
    """Whether the replica is ready and could not even load it. Routes come and go by themselves."""
    there = model in beat.models or model in beat.loadable or model_of(model) != model
    return beat.state is ReplicaState.READY and not there


def _medians(values: Mapping[Key, Sequence[float | None]], least: int) -> dict[Key, float]:
    """Of each that has so many."""
    known = {key: [one for one in seen if one is not None] for key, seen in values.items()}
    return {key: median(seen) for key, seen in known.items() if len(seen) >= least}


def _own(last: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """What a replica's last answers show of it."""
    ratio, what = min(last[-RUN:])
    run = ratio / 2.0, what
    return run if len(last) < ANSWERS_MIN else max(run, sorted(last)[len(last) // 4])


def _of_others(values: Mapping[Key, float], key: Key) -> float:
    others = [value for other, value in values.items() if other != key]
    return median(others) if others else inf


def _is_more(values: Mapping[Key, float], key: Key) -> bool:
    return values[key] > MORE_WORK * _of_others(values, key)
