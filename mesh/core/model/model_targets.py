"""Which model serves a request, by the name that its client asked for, and which get a copy of it.

mesh.toml's `[models."NAME"]` maps names: an alias to one model, a canary to several with shares.
A share is of conversations, not of requests: a conversation keeps its model, because the other one
has nothing of it in its caches and may answer in another tone. A conversation is what its client
names as its session, or else how its prompt begins, up to the end of the first user's turn; it is
hashed with its tenant, so that every router of every region chooses alike, without
messages between them.

The choice is weighted rendezvous hashing (Schindelhauer and Schomaker, Weighted Distributed Hash
Tables, SPAA 2005): each target draws -ln(u) / share with u of (conversation, alias, target), and
the least wins. A target that nothing serves is left out, and only its own conversations move, to
the others by their shares; they return with it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b

from schemas.ids import ModelId
from schemas.settings import ContinueStreams, PolicyName

Shares = tuple[tuple[ModelId, float], ...]
IsServed = Callable[[ModelId], bool]

HASH_BYTES = 8
BEGINNING_BYTES = 1024  # of a prompt without turns: four blocks of the prefix index
USER_TURN = b"\x00user\x00"  # as prompts are written (`prompt`, `prompt_shapes`)
LISTED_MAX = 10  # models in an error: a mesh may have thousands
COMPARED_MAX = 64  # names that a wrong one is compared with: 3 ms of the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    """What mesh.toml says of one model; `to`: of an alias, its targets and their shares."""

    name: ModelId
    to: Shares = ()
    shadow: Shares = ()
    slo_ttft_s: float | None = None
    policy: PolicyName | None = None
    queue_delay_s_max: float | None = None
    hold_max: int | None = None
    continue_streams: ContinueStreams = ContinueStreams.EXACT


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for that was mapped to another model. `conversation`: its hash."""

    model: ModelId
    conversation: int


def conversation_of(tenant: str, session: str | None, text: bytes, request: str) -> int:
    """The hash of a conversation, equal in all routers. `text`: of the prompt. `request`: the
    request's id, for one that has neither session nor text."""
    if session is not None:
        kind, named = b"session", session.encode("utf-8", "surrogatepass")
    elif text:
        kind, named = b"prompt", _beginning(text)
    else:
        kind, named = b"request", request.encode()
    return _hash(kind, tenant.encode(), named)


def _beginning(text: bytes) -> bytes:
    """How a prompt begins: what later turns of the same conversation begin with too."""
    user_at = text.find(USER_TURN)
    if user_at < 0:
        return text[:BEGINNING_BYTES]
    end = text.find(b"\x00", user_at + len(USER_TURN))
    return text if end < 0 else text[:end]


def _hash(*parts: bytes) -> int:
    state = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return int.from_bytes(state.digest(), "big")


def _draw(conversation: int, *names: str) -> float:
    """A number of (0, 1), by these alone."""
    drawn = _hash(conversation.to_bytes(HASH_BYTES, "big"), *(name.encode() for name in names))
    return (drawn + 0.5) / 2.0 ** (8 * HASH_BYTES)


class ModelTargets:
    """All rules of one mesh.toml; false where there are none."""

    def __init__(self, rules: Collection[ModelRule] = ()) -> None:
        self.rules = {rule.name: rule for rule in rules}
        self.aliases: Mapping[ModelId, Shares] = {rule.name: rule.to for rule in rules if rule.to}
        # Limits of single models, in place of those of all.
        delays = {rule.name: rule.queue_delay_s_max for rule in rules}
        most = {rule.name: rule.hold_max for rule in rules}
        self.queue_delay_s = {name: limit for name, limit in delays.items() if limit is not None}
        self.hold_max = {name: limit for name, limit in most.items() if limit is not None}

    def rule(self, model: ModelId) -> ModelRule | None:
        return self.rules.get(model)

    def choose(
        self,
        asked: ModelId,
        conversation: int,
        is_served: IsServed,
        without: ModelId | None = None,
    ) -> ModelId | None:
        """The target of an alias for that conversation; None if none of them `is_served`."""
        best: tuple[float, ModelId] | None = None
        for target, share in self.aliases[asked]:
            if share <= 0.0 or target == without or not is_served(target):
                continue
            drawn = -math.log(_draw(conversation, asked, target)) / share, target
            if best is None or drawn < best:
                best = drawn
        return None if best is None else best[1]

    def shadows(self, asked: ModelId, served: ModelId, conversation: int) -> Iterator[ModelId]:
        """The models that get a copy: by the rule of the name that was asked for, and of the model
        that serves."""
        for name in dict.fromkeys((asked, served)):
            rule = self.rules.get(name)
            for target, share in () if rule is None else rule.shadow:
                if target != served and _draw(conversation, "copy", name, target) < share:
                    yield target

    def slo_ttft_s(self, asked: ModelId, served: ModelId) -> float | None:
        """The objective of requests that name none: the alias's, or else the model's."""
        for name in (asked, served):
            rule = self.rules.get(name)
            if rule is not None and rule.slo_ttft_s is not None:
                return rule.slo_ttft_s
        return None

    def known(self, models: Collection[ModelId]) -> tuple[ModelId, ...]:
        """These models, and the aliases with a target among them, in order."""
        if not self.aliases:
            return tuple(models)
        there = set(models)
        named = (
            alias
            for alias, shares in self.aliases.items()
            if any(share > 0.0 and target in there for target, share in shares)
        )
        return tuple(sorted(there.difference(self.aliases).union(named)))


def unknown_model(asked: str, known: Collection[str]) -> str:
    """The error for a model that is not there: which are, those of similar names first."""
    names, meant = listed(asked, known)
    return f"the model {asked!r} is not served here{f'; known: {names}' if names else ''}{meant}"


def listed(asked: str, known: Collection[str]) -> tuple[str, str]:
    """A few of these names, those similar to that one first, and whether the nearest was meant."""
    near = get_close_matches(asked, list(known)[:COMPARED_MAX], LISTED_MAX, cutoff=0.6)
    some = list(dict.fromkeys((*near, *known)))[:LISTED_MAX]
    more = f" and {len(known) - len(some)} more" if len(known) > len(some) else ""
    return f"{', '.join(some)}{more}", f"; did you mean {near[0]!r}?" if near else ""
