"""The life of a request as text for people, or as plain values for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from mesh.explain.story import Prediction, Story, largest, parts, prediction, summary, waited_s
from mesh.explain.terminal import clock, printable
from schemas.decision import Candidate, Decision, Placement, candidate_name, chosen_of, place_name
from schemas.exchange import Refusal
from schemas.explain import OPEN, LifeStep, RequestLife

NO_TERM_S = 0.0005  # shown with three digits it would be 0
_SHOWN = {"others_s": "delay of others"}  # a price, and no part of its own first token
# A peer refuses so, too, what it has no room for: its own steps say which it was.
_REFUSALS: dict[str, str] = {
    Refusal.WRONG_MODEL: "does not serve the model on that path",
    Refusal.ENGINE_DOWN: "its engine is down",
    Refusal.BAD_WORK: "could not read the request",
    Refusal.NOT_OWNER: "another region owns the replica by now",
    Refusal.NO_REPLICA: "no room there, or no replica ready",
    Refusal.ELSEWHERE: "another region serves it sooner by now",
    Refusal.NOT_KEPT: "the replica that kept the response is gone",
    Refusal.KEEPER_DRAINS: "the replica that keeps the response takes no work now",
    Refusal.OWN_WORK: "keeps its room for its own clients",
    Refusal.RESIDENCY: "lacks a label that the request wants",
}  # the others are words


def story_lines(story: Story) -> Iterator[str]:
    """All that is known of one request. No line holds a control character."""
    for line in _story_lines(story):
        yield printable(line)


def _model(life: RequestLife) -> str:
    asked = f" (asked for as {life.asked_model})" if life.asked_model else ""
    copy = ", a copy" if life.is_copy else ""
    return f"model {life.model}{asked}{copy}" if life.model else ""


def _story_lines(story: Story) -> Iterator[str]:
    life = story.asked or story.at_peers[0]
    yield f"request {life.request}{f', trace {life.trace}' if life.trace else ''}"
    about = [life.method or "", life.route, _model(life)]
    if life.tenant:
        about.append(f"tenant {life.tenant}")
    began = f"arrived at {life.region}/{life.router} at {clock(life.arrived_at)}"
    yield f"{' '.join(filter(None, about))}; {began}"
    yield story_summary(story)
    yield ""
    for moment in moments(story):
        yield f"  {moment.at_s:+9.3f} s  {moment.who:<10}  {moment.text}"
        yield from (f"{'':25}{one}" for one in _candidate_lines(moment.decision))
    if story.asked is not None and (found := parts(story.asked, story.at_peers)):
        total_s, worst = waited_s(story.asked), largest(found)
        yield ""
        yield f"  {total_s or 0.0:9.3f} s  {_until(story.asked)}, of which"
        for part in found:
            yield f"  {part.seconds:9.3f} s  {part.where}{'  <- most' if part is worst else ''}"
        if (made := prediction(story.asked)) is not None:
            yield f"  {_prediction_text(made)}"


def story_summary(story: Story) -> str:
    """What became of it; or that only peers tell of it."""
    if story.asked is not None:
        return summary(story.asked, story.at_peers)
    origin = story.at_peers[0].origin
    return (
        f"Its client asked {origin}, whose router was not reached or has forgotten it: "
        "below is what the peer has."
    )


def _prediction_text(made: Prediction) -> str:
    text = f"predicted {made.predicted_s:.3f} s from its dispatch, took {made.took_s:.3f} s"
    if not made.is_far_off:
        return text
    slower = made.took_s > made.predicted_s
    return f"{text}: {'slower' if slower else 'quicker'} than the router expected of that place"


def _until(life: RequestLife) -> str:
    return "to its end, without a first byte" if life.started_at is None else "to the first byte"


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a request. `at_s`: seconds after its arrival."""

    at_s: float
    who: str
    text: str
    decision: Decision | None = None


def moments(story: Story) -> list[Moment]:
    """All that is known to have happened, in the order of time."""
    start = (story.asked or story.at_peers[0]).arrived_at
    return sorted(_moments(story, start), key=lambda moment: moment.at_s)


def _moments(story: Story, start: float) -> Iterator[Moment]:
    for life in story.lives:
        who = f"{life.region}/{life.router}"
        origin = f" from {life.origin}" if life.origin else ""
        yield Moment(life.arrived_at - start, who, f"arrived{origin}")
        for step in life.steps:
            yield Moment(step.at - start, who, _step_text(step), step.decision)
        if life.started_at is not None:
            yield Moment(life.started_at - start, who, "first byte to the client")
        if life.ended_at is not None:
            yield Moment(life.ended_at - start, who, _end(life))


def _end(life: RequestLife) -> str:
    if life.origin is not None:
        if life.outcome == "placed":
            handed = place_name(life.served_by_replica, life.prefill_replica)
            return f"handed to {handed}, which answers {life.origin} directly"
        return f"refused: {_refusal(life.detail) or 'no reason given'}"
    shown = [life.outcome]
    if life.status is not None:
        shown.insert(0, str(life.status))
    if life.fault:
        shown.append(f"error {life.fault}")
    if life.detail:
        shown.append(life.detail)
    tokens = (
        (life.prompt_tokens, "in"),
        (life.cached_tokens, "cached"),
        (life.output_tokens, "out"),
    )
    counted = [f"{count} {name}" for count, name in tokens if count is not None]
    if counted:
        shown.append(f"tokens {', '.join(counted)}")
    return f"ended: {', '.join(shown)}, {life.sent_bytes} bytes"


def _step_text(step: LifeStep) -> str:
    if step.decision is not None:
        return _decision_text(step.decision)
    if step.what == "placed":
        held = f" after {step.held_s:.3f} s in its hold queue" if step.held_s else ""
        return f"{step.region} placed it on {step.replica}{held}"
    if step.what == "refused":
        return f"{step.replica or step.region} refused it: {_refusal(step.detail)}"
    return f"the attempt failed: {step.detail}"


def _refusal(why: str | None) -> str | None:
    return why and _REFUSALS.get(why, why)


def _decision_text(made: Decision) -> str:
    verbs = {
        Placement.LOCAL: f"placed on {place_name(made.replica, made.prefill)}",
        Placement.PEER: f"forwarded to {made.peer}",
        Placement.HOLD: "held",
        Placement.SHED: "shed",
    }
    held = f" after {made.held_s:.3f} s in the hold queue" if made.held_s else ""
    attempt = f", attempt {made.attempt}" if made.attempt > 1 else ""
    policy = f" (policy {made.policy})" if made.policy else ""
    return f"{verbs[made.placement]}{held}{attempt}{policy}: {made.reason}"


def _candidate_lines(made: Decision | None) -> Iterator[str]:
    if made is None:
        return
    named = [(candidate_name(made, one), text) for one, text in verdicts(made)]
    width = max([10, *(len(name) for name, _ in named)])
    yield from (f"{name:<{width}} {text}" for name, text in named)
    if made.considered > len(made.candidates):
        yield f"and {made.considered - len(made.candidates)} more"


def verdicts(made: Decision) -> Iterator[tuple[Candidate, str]]:
    """Each candidate with its price, and why it was chosen or was not."""
    best, verdict = chosen_of(made, made.candidates), "chosen"
    if best is None and made.placement is Placement.HOLD and made.candidates:
        best, verdict = made.candidates[0], "busy, and waited for"
    for one in made.candidates:
        yield one, _verdict(one, best, verdict) if one.available else f"not available: {one.why}"


def _verdict(one: Candidate, best: Candidate | None, of_best: str) -> str:
    matched = f", {one.matched_tokens} tokens cached there" if one.matched_tokens else ""
    pending = f", {one.pending} pending" if one.pending else ""
    verdict = of_best if one is best else "not chosen"
    if one.seconds is None:
        terms = ", ".join(_term(name, value) for name, value in _known(one))
        return f"{verdict}{f': {terms}' if terms else ''}{matched}{pending}"
    if one is not best and best is not None and best.seconds is not None:
        dearer_s = one.seconds - best.seconds
        verdict = f"not chosen: {dearer_s:.3f} s more" if dearer_s > NO_TERM_S else "as good"
    sum_of = " + ".join(
        f"{_SHOWN.get(name, name.removesuffix('_s'))} {value:.3f}"
        for name, value in _known(one)
        if name.endswith("_s") and abs(value) >= NO_TERM_S
    )
    return f"{one.seconds:.3f} s{f' = {sum_of}' if sum_of else ''}: {verdict}{matched}{pending}"


def _term(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {value:.3f} s"
    return f"{name} {value:g}"


def _known(one: Candidate) -> Iterator[tuple[str, float]]:
    for name, value in one.terms.items():
        if value is not None:
            yield name, value


def table_lines(lives: Sequence[RequestLife]) -> Iterator[str]:
    """One line a request, for a list of the slowest."""
    for life in lives:
        status = life.status if life.status is not None else ("-" if life.outcome == OPEN else "")
        line = f"{clock(life.arrived_at)}  {life.request}  {status} {life.outcome}: {summary(life)}"
        yield printable(line)


def as_json(requests: Sequence[Story], searched: Sequence[str]) -> str:
    """The same for programs."""

    def plain(life: RequestLife, at_peers: Sequence[RequestLife] = ()) -> dict[str, Any]:
        found = parts(life, at_peers) if life.origin is None else ()
        worst = largest(found)
        return {
            **orjson.loads(orjson.dumps(life)),
            "waited_s": waited_s(life),
            "parts": {part.name: round(part.seconds, 6) for part in found},
            "largest": None if worst is None else worst.name,
        }

    found = [
        {
            "asked": None if one.asked is None else plain(one.asked, one.at_peers),
            "at_peers": [plain(life) for life in one.at_peers],
        }
        for one in requests
    ]
    value = {"requests": found, "looked_at": list(searched)}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
