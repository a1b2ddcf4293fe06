"""What replicas serve and requests ask for, by name: a model, or a model on an optional path.

Engines answer chats and completions, and only some of them `/v1/embeddings`, which is another kind
of work: a prompt is computed and nothing is generated. All that a router knows by model (who serves
it and has room, the hold queue and its pace, speeds, tokens per byte, offline rooms) it must know
of such work apart, so the work has a name of its own, `MODEL on /v1/embeddings`. Only routers' and
batch runners' tables, messages between batch runners and texts for people have these names;
clients, agents, heartbeats and digests name the model and the path. Rejected: a path beside the
model in every table and rule.
"""

from collections.abc import Mapping
from dataclasses import replace

from schemas.engine_routes import GENERATING_PATHS, OPTIONAL_PATHS, PLAIN_PATHS
from schemas.ids import MODEL_CHARS_MAX, ModelId
from schemas.state import Digest, Heartbeat, ModelCapacity

_ON = " on /"
_GENERATING_ENDS = tuple(f" on {path}" for path in sorted(OPTIONAL_PATHS & GENERATING_PATHS))


def served_name(model: ModelId, path: str) -> ModelId:
    """What a request for that path asks for."""
    return model if path in PLAIN_PATHS else ModelId(f"{model} on {path}")


def model_of(name: ModelId) -> ModelId:
    """The model, as its engine names it."""
    return ModelId(name.rpartition(_ON)[0]) if _ON in name else name


def prompts_name(name: ModelId) -> ModelId:
    """The name that its prompts are hashed under and their tokens learned by: the model's own where
    tokens are generated, so that one conversation over two APIs is one prefix."""
    return model_of(name) if name.endswith(_GENERATING_ENDS) else name


def is_model(name: ModelId) -> bool:
    """Whether that is a model for chats and completions."""
    return _ON not in name


def beat_by_name(beat: Heartbeat) -> Heartbeat:
    """The heartbeat, its models with their optional paths."""
    paths = [path for path in beat.paths if path not in PLAIN_PATHS]
    more = (served_name(model, path) for path in paths for model in beat.models)
    names = tuple(name for name in more if len(name) <= MODEL_CHARS_MAX)
    return replace(beat, models=beat.models + names) if names else beat


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
    """The others, by path and model."""
    found: dict[str, dict[ModelId, ModelCapacity]] = {}
    for name, capacity in capacities.items():
        if not is_model(name):
            model = model_of(name)
            path = name.removeprefix(f"{model} on ")
            found.setdefault(path, {})[model] = capacity
    return found
