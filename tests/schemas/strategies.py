"""Hypothesis strategies for everything that travels on the bus."""

from dataclasses import fields
from typing import Any, get_type_hints

from hypothesis import strategies as st

from schemas import exchange, wire
from schemas.decision import Candidate, CandidateKind, Decision, Placement
from schemas.ids import MODEL_CHARS_MAX, NAME_PATTERN
from schemas.state import TERM_MAX, Digest, Heartbeat, ModelCapacity, ReplicaState

NAMES = st.from_regex(NAME_PATTERN.removesuffix("$") + r"\Z")
TEXTS = st.text(max_size=40)
MODELS = st.text(min_size=1, max_size=MODEL_CHARS_MAX)
COUNTS = st.integers(0, 2**63 - 1)
TERMS = st.integers(0, TERM_MAX)
RATIOS = st.floats(0, 1)
POSITIVE = st.floats(0, allow_infinity=False, allow_nan=False)
WIRE_INTS = st.integers(-(2**63), 2**64 - 1)

_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: WIRE_INTS,
    str: TEXTS,
    float: st.floats(allow_nan=False),
    tuple[int, ...]: st.lists(WIRE_INTS, max_size=8).map(tuple),
    tuple[str, ...]: st.lists(TEXTS, max_size=8).map(tuple),
}


def wire_messages() -> st.SearchStrategy[Any]:
    """Any instance of any registered wire message; `schemas.exchange` registers them."""
    assert exchange.Cancel in wire.registered().values()
    return st.one_of([_instances(cls) for cls in wire.registered().values()])


def _instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: _BY_TYPE[hints[field.name]] for field in fields(cls)})


LABEL_LISTS = st.lists(NAMES, max_size=3).map(tuple)

HEARTBEATS = st.builds(
    Heartbeat,
    region=NAMES,
    replica=NAMES,
    epoch=COUNTS,
    seq=COUNTS,
    state=st.sampled_from(ReplicaState),
    engine=TEXTS,
    models=st.lists(MODELS, max_size=3).map(tuple),
    full=st.booleans(),
    pending=st.none() | COUNTS,
    running=st.none() | COUNTS,
    outstanding=COUNTS,
    batch_max=st.none() | COUNTS,
    batch_occupancy=st.none() | RATIOS,
    kv_used_ratio=st.none() | RATIOS,
    prefill_s_per_token=st.none() | POSITIVE,
    decode_tokens_per_s=st.none() | POSITIVE,
    taken=st.dictionaries(NAMES, COUNTS, max_size=3),
    residency=st.none() | LABEL_LISTS,
    owner=st.none() | NAMES,
    owner_taken=st.dictionaries(NAMES, COUNTS, max_size=3),
    term=TERMS,
)

CAPACITIES = st.builds(ModelCapacity, ready=COUNTS, free=COUNTS)

DIGESTS = st.builds(
    Digest,
    region=NAMES,
    router=NAMES,
    epoch=COUNTS,
    seq=COUNTS,
    accepting=st.booleans(),
    replicas_ready=COUNTS,
    replicas_free=COUNTS,
    queue=COUNTS,
    models=st.dictionaries(MODELS, CAPACITIES, max_size=3),
    requests_per_s=POSITIVE,
    kv_used_ratio=st.none() | RATIOS,
    residency=st.none() | LABEL_LISTS,
    models_by_label=st.dictionaries(
        NAMES, st.dictionaries(MODELS, CAPACITIES, max_size=2), max_size=2
    ),
    adopted=st.dictionaries(NAMES, TERMS, max_size=3),
    rtt_s=st.dictionaries(NAMES, POSITIVE, max_size=3),
)

CANDIDATES = st.builds(
    Candidate,
    name=TEXTS,
    kind=st.sampled_from(CandidateKind),
    available=st.booleans(),
    why=st.none() | TEXTS,
    seconds=st.none() | POSITIVE,
    terms=st.dictionaries(TEXTS, st.none() | POSITIVE, max_size=4),
    matched_tokens=COUNTS,
    pending=st.none() | COUNTS,
)

DECISIONS = st.builds(
    Decision,
    request=TEXTS,
    region=NAMES,
    policy=TEXTS,
    placement=st.sampled_from(Placement),
    replica=st.none() | TEXTS,
    reason=TEXTS,
    held_s=POSITIVE,
    candidates=st.lists(CANDIDATES, max_size=5).map(tuple),
)

# Any JSON value, for putting wrong things where right ones belong.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
