"""The decision receipt: who was considered for a request, at what price in seconds, and why.

Every decision is one value with its candidates and its reason; the same value goes on the trace,
into the log and, with the request header `x-mesh-debug: 1`, into the response header
`x-mesh-decision`.

Scores are seconds of expected time to first token wherever a policy computes them, because seconds
of different causes add up and a person can check them. A policy that computes none leaves `seconds`
null instead of inventing a number.

Wherever a receipt is written down its seconds have microseconds (`rounded`): the digits after
them are arithmetic's, not knowledge, and they double the size. Inside, and in a router's
recording, they stay as they were computed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import orjson

from schemas.ids import ValidRegionId
from schemas.json_messages import decoder
from schemas.numbers import Count, Seconds
from schemas.wire import WireError

SECONDS_DIGITS = 6
# Common HTTP clients refuse a header line above 8 KiB (aiohttp: 8190 bytes with its name).
HEADER_BYTES_MAX = 7 * 1024


class Placement(StrEnum):
    """What became of the request."""

    LOCAL = "local"  # handed to a replica of this region
    PEER = "peer"  # handed to another region
    HOLD = "hold"  # waits in this router's queue
    SHED = "shed"  # refused: 429 or 503 with Retry-After; 403 where it may never go


class CandidateKind(StrEnum):
    """What kind of place a candidate is."""

    REPLICA = "replica"
    PEER = "peer"


# Not frozen: eight are made for every decision, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class Candidate:
    """One place that was considered."""

    name: str
    """Replica or region."""
    kind: CandidateKind
    available: bool
    """Whether it could have been chosen."""
    why: str | None = None
    """Why it could not; null when available."""
    seconds: Seconds | None = None
    """Price in seconds, where the policy computes one: expected TTFT from now, and `others_s`."""
    terms: Mapping[str, float | None] = field(default_factory=dict)
    """What `seconds` adds up from, null where unknown. rtt_s: the way there and back; line_s:
    requests held there that go first; queue_s: prompts before this one; prefill_s: its own tokens
    that are not cached; base_s: what every first token costs there; memory_s: until KV memory is
    free; load_s: until its adapter is loaded; others_s: what it costs the other requests there. Of
    a pair with a prefill replica queue_s, prefill_s and base_s are that one's, transfer_s lasts
    until the other one's first token, and decode_queue_s are prompts before it there."""
    matched_tokens: Count | None = 0
    """Prompt tokens whose KV it is believed to hold; null where that is not shown: a mesh that
    lists API keys shows neither prices nor matches to requests without one of them."""
    pending: Count | None = None
    """Requests accepted there and not yet running, hand-offs on their way included."""
    prefill: str | None = None
    """The replica that would compute the prompt for it; null where it computes it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why one request was placed where it was."""

    v: Literal[1] = 1
    """Version of the meaning of these fields."""
    request: str
    """The id in `x-request-id`."""
    region: ValidRegionId
    """The region that decided."""
    policy: str
    placement: Placement
    replica: str | None = None
    """The replica that answers; null while none does."""
    prefill: str | None = None
    """The replica that computes its prompt for the one that answers; null where that one does."""
    peer: str | None = None
    """The region that the request was forwarded to."""
    hops: Count = 0
    """Regions passed between the asking one and the answering one."""
    attempt: Count = 1
    """1 for the first placement; rises when a replica refused or was lost before a token."""
    held_s: Seconds = 0.0
    """Time in this router's hold queue, in seconds."""
    peer_held_s: Seconds = 0.0
    """Time in the hold queue of the peer that placed it, in seconds."""
    attempts_s: Seconds | None = None
    """The rest of the wait for the first byte: attempts, each from its dispatch to its failure or
    to that byte, round trips included, in seconds."""
    ttft_s: Seconds | None = None
    """From the request's arrival to the first byte of its answer, in seconds: the sum of `held_s`,
    `peer_held_s` and `attempts_s`. Null where no answer has begun, or it is not streamed: then the
    first byte comes with the last."""
    reason: str
    """One sentence for people."""
    residency: tuple[str, ...] = ()
    """Labels, one of which the place that computes it must carry; empty for anywhere. Places that
    carry none of them are among the candidates with `why` "residency"; those that do and are away
    are not forbidden: their `why` is "silent"."""
    candidates: tuple[Candidate, ...] = ()
    """Who was considered, the best first; a header may leave out the last ones."""
    considered: Count = 0
    """How many were considered, whether listed or not."""


def place_name(name: str | None, prefill: str | None) -> str:
    """A place for people: of a pair both replicas, the one that computes the prompt first."""
    return f"{prefill} + {name}" if prefill else f"{name}"


def chosen_of(decision: Decision, candidates: Iterable[Candidate]) -> Candidate | None:
    """The place that it went to; None of a request that was held or shed, and of a place that is
    not among these candidates.

    A policy that prices no pairs lists each with any prefill replica, and the decision has another.
    """
    chosen = decision.replica or decision.peer, decision.prefill is not None
    free = (one for one in candidates if one.available)
    return next((one for one in free if (one.name, one.prefill is not None) == chosen), None)


def candidate_name(decision: Decision, one: Candidate) -> str:
    """A candidate for people; of the chosen pair the prefill replica that the decision has."""
    is_chosen = one is chosen_of(decision, decision.candidates)
    return place_name(one.name, decision.prefill if is_chosen else one.prefill)


NOT_SHOWN = "prices and matches are shown to requests with a tenant's key"


def without_matches(decision: Decision) -> Decision:
    """The decision without what shows whether a prompt has been here before: the tokens that match,
    the seconds that follow from them, and the sentence with these. Why one is shed is in its
    error anyway."""
    reason = decision.reason if decision.placement is Placement.SHED else NOT_SHOWN
    candidates = tuple(
        replace(one, matched_tokens=None, seconds=None, terms={})
        for one in sorted(decision.candidates, key=lambda one: one.name)
    )
    return replace(decision, reason=reason, candidates=candidates)


def rounded(decision: Decision) -> Decision:
    """The decision with its seconds as they are written down, to the microsecond.

    Costs a copy of every candidate: call it where a receipt is asked for, not where it is made.
    """
    return replace(
        decision,
        held_s=round(decision.held_s, SECONDS_DIGITS),
        peer_held_s=round(decision.peer_held_s, SECONDS_DIGITS),
        attempts_s=_microseconds(decision.attempts_s),
        ttft_s=_microseconds(decision.ttft_s),
        candidates=tuple(map(rounded_candidate, decision.candidates)),
    )


def rounded_candidate(one: Candidate) -> Candidate:
    """The same for one of the candidates. `replace` would take three times as long."""
    return Candidate(
        name=one.name,
        kind=one.kind,
        available=one.available,
        why=one.why,
        seconds=_microseconds(one.seconds),
        terms={name: _microseconds(value) for name, value in one.terms.items()},
        matched_tokens=one.matched_tokens,
        pending=one.pending,
        prefill=one.prefill,
    )


def _microseconds(value: float | None) -> float | None:
    return round(value, SECONDS_DIGITS) if value else value  # most terms are 0 or unknown


def encode_decision(decision: Decision) -> bytes:
    """The JSON of a decision, its seconds `rounded`."""
    return orjson.dumps(rounded(decision))


decode_decision = decoder(Decision)


def header_value(decision: Decision, bytes_max: int = HEADER_BYTES_MAX) -> str:
    """The decision as an HTTP header value: JSON in plain ASCII of at most `bytes_max`.

    The last candidates are left out until it fits. Raises WireError if it doesn't fit with none.
    """
    kept = decision.candidates
    while True:
        plain = orjson.loads(encode_decision(replace(decision, candidates=kept)))
        text = json.dumps(plain, separators=(",", ":"))  # orjson writes UTF-8, headers are ASCII
        if len(text) <= bytes_max:
            return text
        if not kept:
            raise WireError(f"a decision of {len(text)} bytes does not fit {bytes_max}")
        kept = kept[: len(kept) // 2]
