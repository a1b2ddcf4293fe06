"""Which optional paths an engine answers for which of its models.

What an engine's server knows and what its model can do are two things: one that has a chat and an
embedding model answers `/v1/messages` for one of them and `/v1/embeddings` for the other. An answer
holds for the model that was asked. Of a path that nothing is known of a request is let through:
the engine's answer tells. That it has no such path (404, 405, 501) holds for that model until its
models change, and LACKING_S where a client's request told it: it may have been about the request.

An engine of one model is asked by a tiny request for it; one that loads models on demand by a
request without a body, which tells whether its server has the path at all. One that answers neither
way TRIES_MAX times is asked no more.
"""

from collections.abc import Mapping

from schemas.engine_routes import OPTIONAL_PATHS
from schemas.ids import ModelId
from schemas.state import LACKING_MODELS_MAX, KnownRoutes

LACKING_S = 600.0
TRIES_MAX = 5
RETRY_S = 30.0  # after an answer that says nothing about the path
ANY = ModelId("")  # the model, of an engine of one
_MODEL = b"model"
_NOT_THERE = (b"not found", b"not exist", b"not_found", b"unknown", b"no such", b"no model")


def is_about_model(body: bytes) -> bool:
    """Whether an error says that there is no such model, which says nothing about the path."""
    text = body[:4096].lower()
    return _MODEL in text and any(each in text for each in _NOT_THERE)


class ModelRoutes:
    """Of one engine."""

    def __init__(self) -> None:
        self.names: tuple[ModelId, ...] = ()
        self._by_model = False  # else what one name can do, all can
        self._answers: dict[tuple[ModelId, str], bool] = {}
        self._until: dict[tuple[ModelId, str], float] = {}  # of those that clients' requests told
        self._server: dict[str, bool] = {}  # whether its server has the path, for any model
        self._asked: set[str] = set()  # of the engine that answers now
        self._tries: dict[str, int] = {}
        self._due_at: dict[str, float] = {}
        self.generation = 0  # another one with other models: answers before it count no more

    def listed(self, names: tuple[ModelId, ...], *, on_demand: bool, now: float) -> None:
        """The engine was asked for its models. `names`: without adapters."""
        if names != self.names or on_demand is not self._by_model:
            self._change(names, on_demand=on_demand)
        if self._until:
            for key in [key for key, until in self._until.items() if until <= now]:
                del self._until[key]
                self._answers.pop(key, None)

    def _change(self, names: tuple[ModelId, ...], *, on_demand: bool) -> None:
        stays = on_demand and self._by_model
        self.names, self._by_model = names, on_demand
        if stays:  # it lists them in another order, or one more: its server is the same
            kept = {key: each for key, each in self._answers.items() if key[0] in names}
            self._answers = kept
            self._until = {key: each for key, each in self._until.items() if key in kept}
            return
        self.generation += 1
        for known in (self._answers, self._until, self._server, self._asked):
            known.clear()
        self._tries.clear()

    def restarted(self) -> None:
        """Another process may have its place: it is asked again, and taken for the same until
        then."""
        self._asked.clear()
        self._tries.clear()

    def ask_again(self, path: str) -> None:
        """Find out about it at once."""
        self._asked.discard(path)
        self._due_at.pop(path, None)
        self._tries.pop(path, None)

    def to_ask(self, now: float) -> list[str]:
        """Paths to find out about now."""
        due = (path for path in self.unasked if now >= self._due_at.get(path, now))
        return [path for path in due if self._tries.get(path, 0) < TRIES_MAX]

    @property
    def unasked(self) -> list[str]:
        """Paths of which the engine has not told, when asked, whether it has them."""
        return sorted(OPTIONAL_PATHS - self._asked)

    def told(self, path: str, *, has: bool) -> None:
        """The engine was asked for it."""
        self._asked.add(path)
        if self._by_model:
            self._server[path] = has
        else:
            self._answers[ANY, path] = has
            self._until.pop((ANY, path), None)

    def told_nothing(self, path: str, now: float) -> bool:
        """It has other troubles. Whether it is asked no more."""
        self._due_at[path] = now + RETRY_S
        self._tries[path] = self._tries.get(path, 0) + 1
        return self._tries[path] == TRIES_MAX

    def answered(self, model: ModelId, path: str, *, has: bool, now: float) -> bool:
        """A client's request for it was answered. Whether that is new."""
        if (key := self._key(model, path)) is None or self._answers.get(key) is has:
            return False
        self._answers[key] = has
        self._until.pop(key, None)
        if not has:
            self._until[key] = now + LACKING_S
        return True

    def learns(self, path: str) -> bool:
        """Whether a client's request tells about that path, as the agent could not find out."""
        return self._by_model or (bool(self.names) and (ANY, path) not in self._answers)

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that it is known to answer, for some model."""
        return tuple(sorted({path for (_, path), has in self._answers.items() if has}))

    def known(self) -> KnownRoutes | None:
        """What else is to be told of them; None where all are known, the same for all models."""
        if not self.names:
            return None
        keys = self.names if self._by_model else (ANY,)
        possible = sorted(path for path in OPTIONAL_PATHS if self._server.get(path, True))
        answers = self._answers
        unknown = [path for path in possible if any((key, path) not in answers for key in keys)]
        lacking: Mapping[ModelId, tuple[str, ...]] = {}
        if self._by_model:
            told = {*unknown, *self.paths}
            each = (
                (name, [path for path in possible if answers.get((name, path)) is False])
                for name in keys
            )
            some = ((name, tuple(path for path in paths if path in told)) for name, paths in each)
            lacking = dict([(name, paths) for name, paths in some if paths][:LACKING_MODELS_MAX])
        if not unknown and not lacking:
            return None
        return KnownRoutes(unknown=tuple(unknown), lacking=dict(lacking))

    def _key(self, model: ModelId, path: str) -> tuple[ModelId, str] | None:
        if not self._by_model:
            return ANY, path
        return (model, path) if model in self.names else None
