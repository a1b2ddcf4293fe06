"""What replicas serve and requests ask for, by name: a model, or a model on an optional path.

Engines answer chats and completions, and only some of them `/v1/embeddings` or `/v1/messages`. Who
serves a model and has room a router must know apart for such paths, so a model there has a name of
its own, `MODEL on /v1/embeddings`. Where a prompt is computed and nothing is generated it is
another kind of work too, with its own pace, speeds and tokens per byte (`work_name`). Only routers'
and batch runners' tables, messages between batch runners and texts for people have these names;
clients, agents, heartbeats and digests name the model and the path.

A prefill replica of a pair answers no request, so it has no model but a name for its work on it
(`prefill_name`), by which its router looks for one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter

from schemas.engine_routes import GENERATING_PATHS, PLAIN_PATHS
from schemas.http import RESPONSES
from schemas.ids import MODEL_CHARS_MAX, ModelId, RegionId, ReplicaId
from schemas.kv_transfer import KvRole
from schemas.response_calls import RESPONSE
from schemas.state import Digest, Heartbeat, KnownRoutes, ModelCapacity

_ON = " on /"
_AT = " at "
_PREFILL = "/prefill"  # no path of an engine
NAMES_KEPT = 4096  # replicas, models
_NONE_LACKING: Mapping[ModelId, Collection[str]] = {}
_FIELDS = tuple(field.name for field in fields(Heartbeat))
_values = attrgetter(*_FIELDS)
KEPT_RESPONSE = ModelId("kept response")  # calls about one name no model


def served_name(model: ModelId, path: str) -> ModelId:
    """What a request for that path asks for."""
    return model if path in PLAIN_PATHS else ModelId(f"{model} on {path}")


_ANY_KEPT = served_name(KEPT_RESPONSE, RESPONSE)


@lru_cache(NAMES_KEPT)  # asked several times for each request
def model_of(name: ModelId) -> ModelId:
    """The model, as its engine names it."""
    return ModelId(name.rpartition(_ON)[0]) if _ON in name else name


def keeper_name(name: ModelId, region: RegionId, replica: ReplicaId | None = None) -> ModelId:
    """What a request asks for that only one replica can answer, as it keeps what came before: of
    its own region's routers by the replica, of others by the region alone."""
    return ModelId(f"{name}{_AT}{region}/{replica or ''}")


def kept_name(region: RegionId, replica: ReplicaId | None = None) -> ModelId:
    """What a call about a response asks for, that the replica keeps: as `keeper_name`, of any
    model."""
    return keeper_name(served_name(KEPT_RESPONSE, RESPONSE), region, replica)


def is_kept_call(name: ModelId) -> bool:
    """Whether it is a call about a response, for which nothing is computed."""
    return name.startswith(_ANY_KEPT)


def is_keeper_name(name: ModelId) -> bool:
    """Whether it is one replica's, or one region's."""
    return _ON in name and _AT in name.rpartition(_ON)[2] and not is_prefill_name(name)


def prefill_name(model: ModelId, kind: str) -> ModelId:
    """What a pair's prefill replica of that transfer kind computes, for requests for that model."""
    return ModelId(f"{model} on {_PREFILL}{_AT}{kind}")


def is_prefill_name(name: ModelId) -> bool:
    """Whether it is the work of prefill replicas, which no request asks for by itself."""
    return f"{_ON}{_PREFILL[1:]}{_AT}" in name


def is_for_others(name: ModelId) -> bool:
    """Whether peers may ask for it."""
    return not is_keeper_name(name) and not is_prefill_name(name)


@lru_cache(NAMES_KEPT)
def work_name(name: ModelId) -> ModelId:
    """The name of its kind of work, by which prompts are hashed, tokens and speeds learned, and the
    wait in the hold queue measured: the model's own where tokens are generated, by whatever API."""
    if _ON not in name:
        return name
    model, _, path = name.rpartition(_ON)
    if "/" + path.partition(" ")[0] in GENERATING_PATHS:
        return ModelId(model)
    return _ANY_KEPT if model == KEPT_RESPONSE else name  # of whichever replica


def is_model(name: ModelId) -> bool:
    """Whether that is a model for chats and completions."""
    return _ON not in name


def with_fields(beat: Heartbeat, **changed: object) -> Heartbeat:
    """As `dataclasses.replace`, in half of its time."""
    other = object.__new__(Heartbeat)
    for name, value in zip(_FIELDS, _values(beat), strict=True):
        object.__setattr__(other, name, value)
    for name, value in changed.items():
        object.__setattr__(other, name, value)
    return other


def with_adapters(beat: Heartbeat) -> Heartbeat:
    """The heartbeat of a replica that loads adapters for requests: they are among its models."""
    more = (name for name in (*beat.loading, *beat.loadable) if name not in beat.models)
    return with_fields(beat, models=(*beat.models, *more))


def beat_by_name(beat: Heartbeat) -> Heartbeat:
    """The heartbeat, its models and adapters with their optional paths: those that its engine may
    be asked for, as nothing contrary is known."""
    names = _names_on_paths(beat.models, beat.paths, beat.routes)
    return with_fields(beat, models=beat.models + names, **_loads(beat)) if names else beat


def beat_by_all_names(beat: Heartbeat) -> Heartbeat:
    """The same, with the names of what only this replica can answer."""
    # Names rarely change, and heartbeats come ten times a second; `KnownRoutes` has no hash.
    find = _kept_names if beat.routes is None else _all_names
    names = find(beat.models, beat.paths, beat.routes, beat.region, beat.replica)
    return with_fields(beat, models=names, **_loads(beat)) if names != beat.models else beat


def _all_names(
    models: tuple[ModelId, ...],
    paths: tuple[str, ...],
    routes: KnownRoutes | None,
    region: RegionId,
    replica: ReplicaId,
) -> tuple[ModelId, ...]:
    names = models + _names_on_paths(models, paths, routes)
    if RESPONSES not in paths and (routes is None or RESPONSES not in routes.unknown):
        return names
    on_path = [served_name(model, RESPONSES) for model in models if is_model(model)]
    if routes is not None:
        on_path = [name for name in on_path if name in names]
    keepers = (keeper_name(name, region, replica) for name in on_path)
    fitting = (name for name in keepers if len(name) <= MODEL_CHARS_MAX)
    return (*names, *fitting, kept_name(region, replica))


_kept_names = lru_cache(NAMES_KEPT)(_all_names)


def _optional(paths: tuple[str, ...], routes: KnownRoutes | None) -> list[str]:
    found = [path for path in paths if path not in PLAIN_PATHS]
    unknown = () if routes is None else routes.unknown
    more = (path for path in unknown if path not in found)
    return found + [path for path in more if path not in PLAIN_PATHS]


def _names_on_paths(
    models: tuple[ModelId, ...], paths: tuple[str, ...], routes: KnownRoutes | None
) -> tuple[ModelId, ...]:
    lacking = _NONE_LACKING if routes is None else routes.lacking
    names = (
        served_name(model, path)
        for path in _optional(paths, routes)
        for model in models
        if not lacking or path not in lacking.get(model, ())
    )
    return tuple(name for name in names if len(name) <= MODEL_CHARS_MAX)


def _loads(beat: Heartbeat) -> dict[str, object]:
    """What is changed of adapters: those with their optional paths are loaded as they are."""
    on_demand = beat.loadable or beat.loading
    if not on_demand or not _names_on_paths(beat.models, beat.paths, beat.routes):
        return {}
    paths = _optional(beat.paths, beat.routes)
    return {
        "loadable": _on_paths(beat.loadable, paths),
        "loading": _on_paths(beat.loading, paths),
    }


def answered_names(beat: Heartbeat) -> Collection[ModelId]:
    """Of a heartbeat by name, the names that its engine is known to answer: others are not missed
    when they are gone."""
    if beat.routes is None:
        return beat.models
    unknown = {f" on {path}" for path in beat.routes.unknown if path not in beat.paths}
    return [name for name in beat.models if name[len(model_of(name)) :] not in unknown]


def _on_paths(
    load_s: dict[ModelId, float | None], paths: Collection[str]
) -> dict[ModelId, float | None]:
    more = {served_name(name, path): each for path in paths for name, each in load_s.items()}
    return load_s | more


def beat_of_pair(beat: Heartbeat, has_prefill: Callable[[ModelId], bool]) -> Heartbeat:
    """A heartbeat by name of a replica that takes a part in pairs, with what it can do now.

    `has_prefill`: whether there is a ready prefill replica with such a name.
    """
    if (kv := beat.kv) is None or not kv.is_usable:
        return beat
    if kv.role == KvRole.PREFILL:
        names = tuple(prefill_name(model, kv.kind) for model in kv.models)
        return with_fields(
            beat, models=tuple(name for name in names if len(name) <= MODEL_CHARS_MAX)
        )
    new = (model for model in kv.models if model not in beat.models)
    more = tuple(model for model in new if has_prefill(prefill_name(model, kv.kind)))
    return with_fields(beat, models=beat.models + more) if more else beat


def digest_by_name(digest: Digest) -> Digest:
    """The digest, its models with their optional paths.

    Digests don't name paths by label: a region is taken to have, within a label, as many replicas
    with the path as it has of the model. If it has none, it refuses.
    """
    names = {
        served_name(model, path): (model, capacity)
        for path, models in digest.models_by_path.items()
        if path not in PLAIN_PATHS
        for model, capacity in models.items()
    }
    keeping = {name: known for name, known in names.items() if name.endswith(f" on {RESPONSES}")}
    for name, known in keeping.items():
        names[keeper_name(name, digest.region)] = known
    if keeping:
        most = max(keeping.values(), key=lambda known: known[1].ready)
        names[kept_name(digest.region)] = most
    if not names:
        return digest
    more = {name: capacity for name, (_, capacity) in names.items()}
    by_label = {}
    for label, models in digest.models_by_label.items():
        within = {name: models[model] for name, (model, _) in names.items() if model in models}
        by_label[label] = models | within
    return replace(digest, models=digest.models | more, models_by_label=by_label)


def models_only(capacities: Mapping[ModelId, ModelCapacity]) -> dict[ModelId, ModelCapacity]:
    """Those of models for chats and completions."""
    return {name: capacity for name, capacity in capacities.items() if is_model(name)}


def models_by_path(
    capacities: Mapping[ModelId, ModelCapacity],
) -> dict[str, dict[ModelId, ModelCapacity]]:
    """The others, by path and model; what only one replica answers is not for peers."""
    found: dict[str, dict[ModelId, ModelCapacity]] = {}
    for name, capacity in capacities.items():
        if not is_model(name) and is_for_others(name):
            model = model_of(name)
            path = name.removeprefix(f"{model} on ")
            found.setdefault(path, {})[model] = capacity
    return found
