"""Who serves which model, and who of them is idle: kept up to date so that a few can be drawn.

Looking at a thousand replicas for every request costs more than all else about placing it, and
gains little: the best of a few random ones is nearly as good as the best of all, and each further
one gains less (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
Where the news is old it is even better: routers that see the same heartbeats all send their next
requests to the same least loaded replica (Mitzenmacher, "How useful is old information?", 2000;
seen live in ai-dynamo/dynamo, issue 589), but their samples differ. A random few would miss two
kinds that matter: the holders of a long prefix, which the policy names, and the last idle ones of
a busy fleet, which are drawn apart.

Rejected: a heap of all by load. It finds the least loaded one, which is what everybody rushes to.

A set that is drawn from at random, in constant time.

A list holds the things and a dict says where each is; whoever leaves is replaced by the last one.
A dict alone would have to be walked through to reach its n-th thing.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator
from random import Random
from typing import Generic, TypeVar

from schemas.ids import ModelId, ReplicaId

T = TypeVar("T", bound=Hashable)


class SampledSet(Generic[T]):
    """Its order depends on what came and went, and on nothing else."""

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
        """Put it in, if it isn't there."""
        if thing not in self._places:
            self._places[thing] = len(self._things)
            self._things.append(thing)

    def discard(self, thing: T) -> None:
        """Take it out, if it is there."""
        place = self._places.pop(thing, None)
        if place is None:
            return
        last = self._things.pop()
        if last != thing:
            self._things[place], self._places[last] = last, place

    def draw(self, most: int, dice: Random) -> list[T]:
        """All of them if there are no more than `most`, else so many draws.

        They are not taken out, and the same one may be drawn again.
        """
        if len(self._things) <= most:
            return self._things.copy()
        return dice.choices(self._things, k=most)


Member = TypeVar("Member")

ALL_MAX = 64  # replicas of a model that are all looked at
HOLDERS_MAX = 16
IDLE_MAX = 16
OTHERS_MAX = 48


class ModelReplicas(Generic[Member]):
    """Those of one model."""

    def __init__(self) -> None:
        self.members: dict[ReplicaId, Member] = {}
        self.idle: SampledSet[ReplicaId] = SampledSet()
        self._listed: list[ReplicaId] | None = None  # the members, until one comes or goes

    def enter(self, name: ReplicaId, member: Member) -> None:
        """It serves the model."""
        self.members[name] = member
        self._listed = None

    def leave(self, name: ReplicaId) -> None:
        """It serves it no longer."""
        self.members.pop(name, None)
        self.idle.discard(name)
        self._listed = None

    def some(self, first: Iterable[str], dice: Random) -> list[Member]:
        """Those of `first` who are members, some idle ones, and some of all; nobody twice."""
        if not self.members:
            return []
        if self._listed is None:
            self._listed = list(self.members)
        named = (ReplicaId(name) for name in first)
        # Others are drawn with replacement: a few coincide, and it takes a quarter of the time.
        others = dice.choices(self._listed, k=OTHERS_MAX)
        names = dict.fromkeys((*named, *self.idle.draw(IDLE_MAX, dice), *others))
        return [self.members[name] for name in names if name in self.members]


class ReplicaSampler(Generic[Member]):
    """The crews of all models."""

    def __init__(self) -> None:
        self._crews: dict[ModelId, ModelReplicas[Member]] = {}
        self._nobody: ModelReplicas[Member] = ModelReplicas()

    def models(self) -> Collection[ModelId]:
        """Those that somebody serves, or would if it were ready."""
        return self._crews.keys()

    def replicas_of(self, model: ModelId) -> ModelReplicas[Member]:
        """To be read."""
        return self._crews.get(model, self._nobody)

    def enter(self, name: ReplicaId, models: Iterable[ModelId], member: Member) -> None:
        """It serves these models from now on."""
        for model in models:
            self._crews.setdefault(model, ModelReplicas()).enter(name, member)

    def leave(self, name: ReplicaId, models: Iterable[ModelId]) -> None:
        """It serves these no longer."""
        for model in models:
            crew = self._crews.get(model)
            if crew is not None:
                crew.leave(name)
                if not crew.members:
                    del self._crews[model]

    def settle(self, name: ReplicaId, models: Iterable[ModelId], *, is_idle: bool) -> None:
        """Whether it has work may have changed; it serves these."""
        for model in models:
            idle = self._crews[model].idle
            if is_idle:
                idle.add(name)
            else:
                idle.discard(name)
