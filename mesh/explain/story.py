"""One request's life at all routers that had it, put together: who had it when, and what its wait
for the first token consisted of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from schemas.decision import Decision, Placement, chosen_of, place_name
from schemas.exchange import Refusal
from schemas.explain import OPEN, LifeStep, RequestLife
from schemas.http_statuses import OK

FAR_OFF_S = 0.1  # an error of a prediction below this is none, nor is a hold after an attempt
CLOCKS_S = 5.0  # by which clocks of hosts may differ
GONE_TO = (Placement.LOCAL, Placement.PEER)
FAILED = ("failed", "engine_failed")  # outcomes
EARLIER = "in attempts that were refused or failed"


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of the wait, and where they passed."""

    name: str
    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class Story:
    """A request at the router that its client asked, and at peers' that were asked by it.

    `asked` is None where that router was not reached, or has forgotten it.
    """

    asked: RequestLife | None
    at_peers: tuple[RequestLife, ...] = ()

    @property
    def lives(self) -> tuple[RequestLife, ...]:
        return (*([self.asked] if self.asked is not None else []), *self.at_peers)


def stories(lives: Iterable[RequestLife]) -> list[Story]:
    """The requests, the newest last; a peer's part goes to the request that it fits: of several
    with one id at the same time to those that were forwarded there, in their order."""
    unique = {(one.region, one.router, one.request, one.arrived_at): one for one in lives}
    lives = sorted(unique.values(), key=lambda one: one.arrived_at)
    found = [(one, list[RequestLife]()) for one in lives if one.origin is None]
    forwards = sorted(
        (step.at, number, made.peer)
        for number, (life, _) in enumerate(found)
        for step in life.steps
        if (made := step.decision) is not None and made.peer is not None
    )
    alone: dict[tuple[str, str], list[RequestLife]] = {}
    for one in (one for one in lives if one.origin is not None):
        fits = [number for number, (life, _) in enumerate(found) if _belongs(one, life)]
        sent = [each for each in forwards if each[1] in fits and each[2] == one.region]
        if sent:
            forwards.remove(sent[0])
            fits = [sent[0][1]]
        if fits:
            found[fits[0]][1].append(one)
        else:
            alone.setdefault((one.origin or "", one.request), []).append(one)
    return [
        *(Story(None, tuple(group)) for group in alone.values()),
        *(Story(life, tuple(own)) for life, own in found),
    ]


def _belongs(one: RequestLife, to: RequestLife) -> bool:
    ended_at = float("inf") if to.ended_at is None else to.ended_at
    in_time = to.arrived_at - CLOCKS_S <= one.arrived_at <= ended_at + CLOCKS_S
    return (one.origin, one.request) == (to.region, to.request) and in_time


def waited_s(life: RequestLife) -> float | None:
    """To its first byte, or to its end without one; None of one that waits still."""
    until = life.ended_at if life.started_at is None else life.started_at
    return None if until is None else max(0.0, until - life.arrived_at)


def decisions(life: RequestLife) -> list[tuple[LifeStep, Decision]]:
    """Up to its first byte: later ones are of a stream that broke, and went on elsewhere."""
    until = float("inf") if life.started_at is None else life.started_at
    made = [(step, step.decision) for step in life.steps if step.decision is not None]
    return [(step, decision) for step, decision in made if step.at <= until]


def went_on(life: RequestLife) -> bool:
    """Whether its answer is of another engine in the end than in the beginning."""
    return len(decisions(life)) < sum(step.decision is not None for step in life.steps)


def _break(life: RequestLife) -> str:
    """Of a stream that broke, or was moved, and went on elsewhere: where, and when it did first."""
    begun_at, made = life.started_at, decisions(life)
    later = [step for step in life.steps if begun_at is not None and step.at > begun_at]
    then = [step.decision for step in later if step.decision is not None]
    sent = [one for one in (*(one for _, one in made[-1:]), *then) if one.placement in GONE_TO]
    if not then or len(sent) < 2 or begun_at is None:
        return ""
    *broken, last = [one.replica or one.peer or "its place" for one in sent]
    after_s = later[0].at - begun_at
    tried = [one for one in later if one.decision is None or one.decision.placement in GONE_TO]
    how = "went on at" if tried[-1].what in ("decided", "placed") else "was sent on to"
    left = "was moved from" if (later[0].detail or "").endswith(": moved") else "broke at"
    return (
        f"Its stream {left} {' and '.join(broken)}, {after_s:.3f} s after the first byte, "
        f"and {how} {last}. "
    )


def parts(life: RequestLife, at_peers: Sequence[RequestLife] = ()) -> tuple[Part, ...]:
    """What its wait consisted of; together they are `waited_s`. Empty while it is not known.

    `at_peers`: the same request at the peers that were asked, as far as it is known.
    """
    total_s = waited_s(life)
    if total_s is None:
        return ()
    made = decisions(life)
    if not made:
        return (Part("other", total_s, f"at {life.region}/{life.router}"),)
    _, last = made[-1]
    sent = [step for step, decision in made if decision.placement in GONE_TO]
    if last.placement not in GONE_TO or _held_last_s(life) is not None:
        return _ended_in_queue(life, total_s)
    left_s, found = total_s, list[Part]()

    def take(name: str, seconds: float, where: str) -> None:
        nonlocal left_s
        seconds = min(max(0.0, seconds), left_s)
        left_s -= seconds
        found.append(Part(name, seconds, where))

    take("held_s", last.held_s, f"waiting in {life.region}'s hold queue")
    for part in _earlier(life, sent[:-1], sent[-1].at - life.arrived_at - last.held_s):
        take(part.name, part.seconds, part.where)
    if last.placement is Placement.PEER:
        take("peer_held_s", life.peer_held_s, f"waiting in {last.peer}'s hold queue")
    placed = life if last.peer is None else _placed_in(last.peer, at_peers)
    prefill_s = None if placed is None else placed.prefill_s
    if placed is not None and prefill_s is not None:
        take("prefill_s", prefill_s, f"computing the prompt on {placed.prefill_replica}")
    if life.started_at is None:
        take("unanswered_s", left_s, f"without an answer of {_server(life, last)}")
        return tuple(found)
    whole = "" if life.is_stream else ", and its whole answer, which was not streamed"
    if life.agent_ttft_s is not None and not went_on(life):
        does = "the prompt" if prefill_s is None else "the transfer of the KV cache"
        where = f"in the engine of {_server(life, last)}: its queue and {does}{whole}"
        take("engine_s", life.agent_ttft_s, where)
        take("transport_s", left_s, "on the bus, and between its steps")
    else:
        where = f"from its dispatch to {_server(life, last)} to the first byte: the way there and "
        take("attempt_s", left_s, f"{where}back, the engine's queue, the prompt{whole}")
    return tuple(found)


def _held_last_s(life: RequestLife) -> float | None:
    """How long it was in the hold queue after its last step, when it ended there: its client left,
    or its time was up. None if it ended elsewhere."""
    if life.started_at is not None or life.ended_at is None:
        return None
    last = life.steps[-1]
    held_s = max(0.0, life.ended_at - last.at)
    if last.decision is not None:
        return held_s if last.decision.placement is Placement.HOLD else None
    return held_s if last.what in ("refused", "failed") and held_s > FAR_OFF_S else None


def _ended_in_queue(life: RequestLife, total_s: float) -> tuple[Part, ...]:
    """Of one that was shed, or that ended in the hold queue."""
    _, last = decisions(life)[-1]
    held_s = min(max(0.0, last.held_s + (_held_last_s(life) or 0.0)), total_s)
    held = Part("held_s", held_s, f"waiting in {life.region}'s hold queue")
    sent = [step for step, made in decisions(life) if made.placement in GONE_TO]
    if sent:
        return held, *_earlier(life, sent, total_s - held_s)
    return held, Part("other", total_s - held_s, f"at {life.region}/{life.router}")


def _earlier(life: RequestLife, sent: Sequence[LifeStep], total_s: float) -> tuple[Part, ...]:
    """Seconds of these attempts, which were in vain: in the hold queues of peers that did not
    place it, which is no failure, and the rest. Nothing without attempts."""
    if not sent:
        return ()
    queues: list[str] = []
    back_s = 0.0
    for before, step in pairwise(life.steps):
        if step.what == "refused" and _was_held(step, asked_s := step.at - before.at):
            back_s += asked_s
            if (queue := f"{step.region}'s") not in queues:
                queues.append(queue)
    back_s = min(max(0.0, back_s), max(0.0, total_s))
    rest = Part("earlier_attempts_s", total_s - back_s, EARLIER)
    if not queues:
        return (rest,)
    queue = "hold queue, which" if len(queues) == 1 else "hold queues, which"
    where = f"waiting in {' and '.join(queues)} {queue} did not place it"
    return Part("handed_back_s", back_s, where), rest


def _was_held(refused: LifeStep, asked_s: float) -> bool:
    """Whether a peer held it before that: one without room refuses at once, or once the wait in
    its queue is too long."""
    is_full = refused.detail == Refusal.NO_REPLICA and asked_s > FAR_OFF_S
    return is_full or refused.detail == Refusal.ELSEWHERE


def _placed_in(region: str, at_peers: Sequence[RequestLife]) -> RequestLife | None:
    """The request at the router of that region which placed it last."""
    placed = [one for one in at_peers if one.region == region and one.outcome == "placed"]
    return max(placed, key=lambda one: one.arrived_at, default=None)


def _server(life: RequestLife, last: Decision) -> str:
    """Who answers, or was to: both of a pair that has not."""
    if life.started_at is None and life.prefill_s is None and last.prefill:
        return place_name(last.replica, last.prefill)
    served_by = None if went_on(life) else life.served_by_replica
    return served_by or last.replica or last.peer or "its place"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The last decision's estimate of the first token, and what it took; seconds from there on."""

    predicted_s: float
    took_s: float

    @property
    def is_far_off(self) -> bool:
        error_s = abs(self.took_s - self.predicted_s)
        return error_s > max(FAR_OFF_S, self.predicted_s)


def prediction(life: RequestLife) -> Prediction | None:
    """None where the policy predicts no time, no token came, or the answer was not streamed."""
    sent = [(step, made) for step, made in decisions(life) if made.placement in GONE_TO]
    if not sent or life.started_at is None or not life.is_stream:
        return None
    step, made = sent[-1]
    chosen = chosen_of(made, made.candidates)
    if chosen is None or chosen.seconds is None:
        return None
    others_s = chosen.terms.get("others_s") or 0.0  # a price, and no part of its wait
    return Prediction(chosen.seconds - others_s, max(0.0, life.started_at - step.at))


def largest(of: Sequence[Part]) -> Part | None:
    """The part that took longest; None where nothing took any time."""
    worst = max(of, key=lambda part: part.seconds, default=None)
    return None if worst is None or worst.seconds <= 0.0 else worst


def summary(life: RequestLife, at_peers: Sequence[RequestLife] = ()) -> str:
    """What became of it, and where most of its wait passed. `at_peers`: as above."""
    total_s, found, broke = waited_s(life), parts(life, at_peers), _break(life)
    if life.outcome == OPEN:
        return f"{broke}It is under way."
    failed = _failure(life)
    what = "to the first token" if life.is_stream else "to the first byte"
    if life.started_at is None:
        what = "until it ended" if failed else f"until it ended ({life.outcome})"
    worst = largest(found)
    first = f"{failed} {broke}" if failed else broke
    if failed and (worst is None or worst.name == "other"):
        return first.rstrip()
    if total_s is None or worst is None:
        return f"{first}It took no time {what}."
    return f"{first}Most of its {total_s:.3f} s {what}: {worst.seconds:.3f} s {worst.where}."


def _failure(life: RequestLife) -> str:
    """Of one that failed: when, how its client saw it, and why. Empty of any other."""
    if life.outcome not in (*FAILED, "shed", "refused") or life.ended_at is None:
        return ""
    if life.started_at is None:
        when, in_stream = f"after {waited_s(life):.3f} s", life.status == OK
    else:
        since_s = max(0.0, life.ended_at - life.started_at)
        when, in_stream = f"{since_s:.3f} s after the first byte", life.is_stream
    how = ", with an error event in its stream" if in_stream else ""
    verb = "failed" if life.outcome in FAILED else "was refused"
    why = life.detail or life.fault
    return f"It {verb} {when}{how}{f': {why}' if why else ''}".removesuffix(".") + "."
