"""Which replicas serve a model, and which of them are idle, so that a sample can be drawn.

Examining a thousand replicas per request costs more than all else about placing it, and gains
little: the best of a few random ones is nearly as good as the best of all, and each further one
gains less (Mitzenmacher, "The power of two choices in randomized load balancing", 2001). With old
information it is even better: routers that see the same heartbeats would all send their next
requests to the same least loaded replica (Mitzenmacher, "How useful is old information?", 2000;
seen live in ai-dynamo/dynamo, issue 589), but their samples differ. A random sample would miss two
kinds that matter: the holders of a long prefix, which the policy names, and the last idle replicas
of a busy fleet, which are drawn separately.

A `SampledSet` is drawn from at random in constant time: a list holds the things and a dict their
places; the last one replaces a removed one.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator
from random import Random
from typing import Generic, TypeVar

from schemas.ids import ModelId, ReplicaId

T = TypeVar("T", bound=Hashable)


class SampledSet(Generic[T]):
    """Its order depends only on what was added and discarded."""

    def __init__(self) -> None:
        self._things: list[T] = []
        self._places: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._things)

    def __contains__(self, thing: T) -> bool:
        return thing in self._places

    def __iter__(self) -> Iterator[T]:
        return iter(self._things)

    def add(self, thing: T) -> None:
        if thing not in self._places:
            self._places[thing] = len(self._things)
            self._things.append(thing)

    def discard(self, thing: T) -> None:
        place = self._places.pop(thing, None)
        if place is None:
            return
        last = self._things.pop()
        if last != thing:
            self._things[place], self._places[last] = last, place

    def draw(self, most: int, dice: Random) -> list[T]:
        """All of them if there are no more than `most`, else so many draws with replacement."""
        if len(self._things) <= most:
            return self._things.copy()
        return dice.choices(self._things, k=most)


Member = TypeVar("Member")

ALL_MAX = 64  # replicas of a model that are all examined
HOLDERS_MAX = 16
IDLE_MAX = 16
OTHERS_MAX = 48


class ModelReplicas(Generic[Member]):
    """The replicas of one model."""

    def __init__(self) -> None:
        self.members: dict[ReplicaId, Member] = {}
        self.idle: SampledSet[ReplicaId] = SampledSet()
        self._listed: list[ReplicaId] | None = None  # the members, until one comes or goes

    def enter(self, name: ReplicaId, member: Member) -> None:
        self.members[name] = member
        self._listed = None

    def leave(self, name: ReplicaId) -> None:
        self.members.pop(name, None)
        self.idle.discard(name)
        self._listed = None

    def some(self, first: Iterable[str], dice: Random) -> list[Member]:
        """The members among `first`, some idle ones, and some of all; none twice."""
        if not self.members:
            return []
        if self._listed is None:
            self._listed = list(self.members)
        members = self.members
        named = filter(members.__contains__, map(ReplicaId, first))
        # Others are drawn with replacement: a few coincide, and it takes a quarter of the time.
        others = dice.choices(self._listed, k=OTHERS_MAX)
        names = dict.fromkeys((*named, *self.idle.draw(IDLE_MAX, dice), *others))
        return list(map(members.__getitem__, names))


class ReplicaSampler(Generic[Member]):
    """The replicas of all models."""

    def __init__(self) -> None:
        self._by_model: dict[ModelId, ModelReplicas[Member]] = {}
        self._none: ModelReplicas[Member] = ModelReplicas()

    def models(self) -> Collection[ModelId]:
        return self._by_model.keys()

    def replicas_of(self, model: ModelId) -> ModelReplicas[Member]:
        return self._by_model.get(model, self._none)

    def enter(self, name: ReplicaId, models: Iterable[ModelId], member: Member) -> None:
        for model in models:
            self._by_model.setdefault(model, ModelReplicas()).enter(name, member)

    def leave(self, name: ReplicaId, models: Iterable[ModelId]) -> None:
        for model in models:
            replicas = self._by_model.get(model)
            if replicas is not None:
                replicas.leave(name)
                if not replicas.members:
                    del self._by_model[model]

    def settle(self, name: ReplicaId, models: Iterable[ModelId], *, is_idle: bool) -> None:
        """Note whether it is idle; it serves these models."""
        for model in models:
            idle = self._by_model[model].idle
            if is_idle:
                idle.add(name)
            else:
                idle.discard(name)
