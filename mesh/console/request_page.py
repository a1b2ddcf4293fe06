"""The life of one request as the page reads it; what it says is what `mesh explain` prints."""

from collections.abc import Iterator
from typing import Any

from mesh.explain.story import Story, largest, parts, waited_s
from mesh.explain.terminal import clock, printable
from mesh.explain.text import Moment, moments, story_summary, verdicts
from schemas.decision import Decision, candidate_name, chosen_of

MOMENTS_MAX = 200


def shown_request(story: Story) -> dict[str, Any]:
    """All that is known of it. No text holds a control character."""
    life = story.asked or story.at_peers[0]
    asked = story.asked
    found = () if asked is None else parts(asked, story.at_peers)
    worst = largest(found)
    happened = moments(story)
    shown = {
        "request": life.request,
        "facts": {name: str(text) for name, text in _facts(story)},
        "outcome": life.outcome,
        "status": life.status,
        "summary": story_summary(story),
        "waited_s": None if asked is None else waited_s(asked),
        "has_first_byte": life.started_at is not None,
        "parts": [
            {"name": one.name, "seconds": one.seconds, "where": one.where, "most": one is worst}
            for one in found
        ],
        "moments": [_moment(one) for one in happened[:MOMENTS_MAX]],
        "left_out": max(0, len(happened) - MOMENTS_MAX),
    }
    clean: dict[str, Any] = _clean(shown)
    return clean


def _facts(story: Story) -> Iterator[tuple[str, object]]:
    life = story.asked or story.at_peers[0]
    route = f"{life.method or ''} {life.route}".strip()
    place = life.served_by_region, life.served_by_replica
    of_place = (o for o in story.lives if (o.served_by_region, o.served_by_replica) == place)
    prefill = next((one.prefill_replica for one in of_place if one.prefill_replica), None)
    facts = (
        ("arrived", f"{clock(life.arrived_at)} at {life.region}/{life.router}"),
        ("route", route),
        ("model", life.model),
        ("tenant", life.tenant),
        ("served by", "/".join(filter(None, place))),
        ("prefill on", prefill),
        ("trace", life.trace),
        ("tokens in", life.prompt_tokens),
        ("tokens cached", life.cached_tokens),
        ("tokens out", life.output_tokens),
    )
    yield from ((name, value) for name, value in facts if value not in (None, ""))


def _moment(moment: Moment) -> dict[str, Any]:
    made = moment.decision
    return {
        "at_s": moment.at_s,
        "who": moment.who,
        "text": moment.text,
        "candidates": [] if made is None else list(_candidates(made)),
        "more": 0 if made is None else max(0, made.considered - len(made.candidates)),
    }


def _candidates(made: Decision) -> Iterator[dict[str, Any]]:
    best = chosen_of(made, made.candidates)
    for one, text in verdicts(made):
        terms = {name: value for name, value in one.terms.items() if value is not None}
        yield {
            "name": candidate_name(made, one),
            "kind": one.kind,
            "available": one.available,
            "chosen": one is best,
            "seconds": one.seconds,
            "terms": terms,
            "text": text,
        }


def _clean(value: Any) -> Any:
    """The value with every text printable: names come from clients and peers."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_clean(name): _clean(each) for name, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list) else value
