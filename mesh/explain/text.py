"""The life of a request as text for people, or as plain values for programs."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from mesh.explain.story import Story, largest, parts, summary, waited_s
from schemas.decision import Candidate, Decision, Placement
from schemas.explain import OPEN, LifeStep, RequestLife

NO_TERM_S = 0.0005  # shown with three digits it would be 0


def story_lines(story: Story) -> Iterator[str]:
    """All that is known of one request. No line holds a control character."""
    for line in _story_lines(story):
        yield printable(line)


def printable(text: str) -> str:
    """Names and ids come from clients and peers: what a terminal would obey is escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
        for one in text
    )


def _story_lines(story: Story) -> Iterator[str]:
    life = story.asked or story.at_peers[0]
    yield f"request {life.request}{f', trace {life.trace}' if life.trace else ''}"
    about = [life.method or "", life.route, f"model {life.model}" if life.model else ""]
    if life.tenant:
        about.append(f"tenant {life.tenant}")
    began = f"arrived at {life.region}/{life.router} at {clock(life.arrived_at)}"
    yield f"{' '.join(filter(None, about))}; {began}"
    if story.asked is None:
        yield (
            f"Its client asked {life.origin}, whose router was not reached or has forgotten it: "
            f"below is what the peer has."
        )
    else:
        yield summary(story.asked)
    yield ""
    for _, lines in sorted(_events(story), key=lambda event: event[0]):
        yield from lines
    if story.asked is not None and (found := parts(story.asked)):
        total_s, worst = waited_s(story.asked), largest(found)
        yield ""
        yield f"  {total_s or 0.0:9.3f} s  {_until(story.asked)}, of which"
        for part in found:
            yield f"  {part.seconds:9.3f} s  {part.where}{'  <- most' if part is worst else ''}"


def _until(life: RequestLife) -> str:
    return "to its end, without a first byte" if life.started_at is None else "to the first byte"


def _events(story: Story) -> Iterator[tuple[float, list[str]]]:
    start = (story.asked or story.at_peers[0]).arrived_at
    for life in story.lives:
        who = f"{life.region}/{life.router}"

        def line(at: float, text: str, who: str = who) -> str:
            return f"  {at - start:+9.3f} s  {who:<10}  {text}"

        origin = f" from {life.origin}" if life.origin else ""
        yield life.arrived_at, [line(life.arrived_at, f"arrived{origin}")]
        for step in life.steps:
            head, *rest = _step_lines(step, life)
            yield step.at, [line(step.at, head), *(f"{'':25}{one}" for one in rest)]
        if life.started_at is not None:
            yield life.started_at, [line(life.started_at, "first byte to the client")]
        if life.ended_at is not None:
            yield life.ended_at, [line(life.ended_at, _end(life))]


def _end(life: RequestLife) -> str:
    if life.origin is not None:
        if life.outcome == "placed":
            return f"handed to {life.served_by_replica}, which answers {life.origin} directly"
        return f"refused: {life.detail or 'no reason given'}"
    said = [life.outcome]
    if life.status is not None:
        said.insert(0, str(life.status))
    if life.fault:
        said.append(f"error {life.fault}")
    if life.detail:
        said.append(life.detail)
    tokens = (
        (life.prompt_tokens, "in"),
        (life.cached_tokens, "cached"),
        (life.output_tokens, "out"),
    )
    counted = [f"{count} {name}" for count, name in tokens if count is not None]
    if counted:
        said.append(f"tokens {', '.join(counted)}")
    return f"ended: {', '.join(said)}, {life.sent_bytes} bytes"


def _step_lines(step: LifeStep, life: RequestLife) -> Iterator[str]:
    if step.decision is not None:
        yield from _decision_lines(step.decision)
    elif step.what == "placed":
        held = f" after {step.held_s:.3f} s in its hold queue" if step.held_s else ""
        yield f"{step.region} placed it on {step.replica}{held}"
    elif step.what == "refused":
        yield f"{step.replica or step.region} refused it: {step.detail}"
    else:
        yield f"the attempt failed: {step.detail}"


def _decision_lines(made: Decision) -> Iterator[str]:
    verbs = {
        Placement.LOCAL: f"placed on {made.replica}",
        Placement.PEER: f"forwarded to {made.peer}",
        Placement.HOLD: "held",
        Placement.SHED: "shed",
    }
    held = f" after {made.held_s:.3f} s in the hold queue" if made.held_s else ""
    attempt = f", attempt {made.attempt}" if made.attempt > 1 else ""
    policy = f" (policy {made.policy})" if made.policy else ""
    yield f"{verbs[made.placement]}{held}{attempt}{policy}: {made.reason}"
    chosen = made.replica or made.peer
    best = next((one for one in made.candidates if one.name == chosen and one.available), None)
    for one in made.candidates:
        yield f"{one.name:<10} {_candidate(one, best)}"
    if made.considered > len(made.candidates):
        yield f"and {made.considered - len(made.candidates)} more"


def _candidate(one: Candidate, best: Candidate | None) -> str:
    if not one.available:
        return f"not available: {one.why}"
    matched = f", {one.matched_tokens} tokens cached there" if one.matched_tokens else ""
    pending = f", {one.pending} pending" if one.pending else ""
    verdict = "chosen" if one is best else "not chosen"
    if one.seconds is None:
        terms = ", ".join(f"{name} {value:g}" for name, value in _known(one))
        return f"{verdict}{f': {terms}' if terms else ''}{matched}{pending}"
    if one is not best and best is not None and best.seconds is not None:
        dearer_s = one.seconds - best.seconds
        verdict = f"not chosen: {dearer_s:.3f} s more" if dearer_s > NO_TERM_S else "as good"
    sum_of = " + ".join(
        f"{name.removesuffix('_s')} {value:.3f}"
        for name, value in _known(one)
        if name.endswith("_s") and abs(value) >= NO_TERM_S
    )
    return f"{one.seconds:.3f} s{f' = {sum_of}' if sum_of else ''}: {verdict}{matched}{pending}"


def _known(one: Candidate) -> Iterator[tuple[str, float]]:
    for name, value in one.terms.items():
        if value is not None:
            yield name, value


def clock(at: float) -> str:
    """The time of day; the seconds themselves where they are none."""
    try:
        at_utc = datetime.fromtimestamp(at, UTC).replace(tzinfo=None)
        return f"{at_utc.isoformat(sep=' ', timespec='milliseconds')} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{at:.3f} s"


def table_lines(lives: Sequence[RequestLife]) -> Iterator[str]:
    """One line a request, for a list of the slowest."""
    for life in lives:
        status = life.status if life.status is not None else ("-" if life.outcome == OPEN else "")
        line = f"{clock(life.arrived_at)}  {life.request}  {status} {life.outcome}: {summary(life)}"
        yield printable(line)


def as_json(told: Sequence[Story], looked: Sequence[str]) -> str:
    """The same for programs."""

    def plain(life: RequestLife) -> dict[str, Any]:
        found = parts(life) if life.origin is None else ()
        worst = largest(found)
        return {
            **orjson.loads(orjson.dumps(life)),
            "waited_s": waited_s(life),
            "parts": {part.name: round(part.seconds, 6) for part in found},
            "largest": None if worst is None else worst.name,
        }

    requests = [
        {
            "asked": None if one.asked is None else plain(one.asked),
            "at_peers": [plain(life) for life in one.at_peers],
        }
        for one in told
    ]
    value = {"requests": requests, "looked_at": list(looked)}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
