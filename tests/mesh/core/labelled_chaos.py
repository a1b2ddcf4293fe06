"""Chaos with labels: a random map, random claims, and an onlooker who knows the rules by heart.

Another router of the region tells what it placed, secrets too, and now and then starts anew.

The onlooker's rules are written anew from the text of `schemas.residency`, and ask nothing of the
code under test.
"""

from dataclasses import replace

from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from schemas import subjects
from schemas.exchange import Refusal
from schemas.gossip import EVERYTHING, PEERS, SIBLINGS, TrieAsk, TrieDelta
from schemas.http import Fault
from schemas.ids import RegionId, RouterId
from schemas.residency import ground
from schemas.state import Digest, Heartbeat, ModelCapacity
from tests.mesh.core import build
from tests.mesh.core.chaos import MODELS, REPLICAS, Chaos
from tests.mesh.core.chaos import PEERS as PEER_REGIONS

LABELS = ("a", "b", "c")
REGIONS = (build.US, *map(RegionId, PEER_REGIONS))
SIBLING = RouterId("r2")


class LabelledChaos(Chaos):
    """Every request, heartbeat and digest of a chaos, with labels put on."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        carried = {region: self._some() for region in REGIONS}
        home = carried[build.US]
        confined = self.dice.choice(((), (), home[:1]))
        self.carried, self.confined = carried, set(confined)
        self.settings |= {"ground": ground(carried, {build.US: confined})}
        self.ledger.core = self.core = build.core(seed, **self.settings)
        self.ledger.settings = RouterSettings(**self.settings)
        self.beats: dict[str, Heartbeat] = {}
        self.digests: dict[str, Digest] = {}
        self.asked: dict[int, ev.RequestArrived] = {}
        self.open_blocks: set[int] = set()
        self.sibling = Sibling(self)
        names = ("placed", "forwarded", "forbidden", "secret", "told", "refused")
        names += ("inherited", "shared")
        self.counts = dict.fromkeys(names, 0)

    def _some(self) -> tuple[str, ...]:
        return tuple(label for label in LABELS if self.dice.random() < 0.5)

    def feed(self, event: ev.Event) -> None:
        super().feed(self._labelled(event))
        for effect in self.effects[-1]:
            self._look_at(effect)
        if self.dice.random() < 0.04:
            stream = self.dice.choice((PEERS, SIBLINGS))
            after = self.dice.choice((EVERYTHING, 0, 1, 10**6))
            self._ask(RegionId("eu"), TrieAsk(build.ROUTER, 1, after, stream))
            self._ask(build.US, TrieAsk(build.ROUTER, 1, after, SIBLINGS, SIBLING))
        if self.dice.random() < 0.1:
            for event in self.sibling.places():
                self._tell(event)

    def _ask(self, region: RegionId, ask: TrieAsk) -> None:
        self._tell(ev.TrieAsked(ask, region, f"_INBOX.{region}.{SIBLING}.trie-1"))

    def _tell(self, event: ev.Event) -> None:
        super().feed(event)
        for effect in self.effects[-1]:
            self._look_at(effect)

    def _labelled(self, event: ev.Event) -> ev.Event:
        if isinstance(event, ev.RequestArrived):
            labels = self._some() if self.dice.random() < 0.7 else ()
            event = ev.RequestArrived(replace(event.request, residency=labels))
            self.asked[event.request.key] = event
        elif isinstance(event, ev.HeartbeatSeen):
            told = self.dice.choice((None, None, self._some()))
            event = ev.HeartbeatSeen(replace(event.heartbeat, residency=told))
            self.beats[event.heartbeat.replica] = event.heartbeat
        elif isinstance(event, ev.DigestSeen):
            most = max(capacity.free for capacity in event.digest.models.values())
            free = self.dice.randint(0, most)
            few = {model: ModelCapacity(ready=1 + free, free=free) for model in MODELS}
            told = self.dice.choice((None, self._some(), LABELS, LABELS))
            by_label = {label: few for label in told or () if self.dice.random() < 0.3}
            said = replace(event.digest, residency=told, models_by_label=by_label)
            event = ev.DigestSeen(said)
            self.digests[said.region] = said
        return event

    # The onlooker.

    def _wanted(self, key: int) -> list[set[str]]:
        """Sets of which a place must carry one each."""
        request = self.asked[key].request
        said = [set(request.residency)] if request.residency else []
        return said + ([self.confined] if self.confined and not request.hops else [])

    def _look_at(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Dispatch):
            self.counts["placed"] += 1
            beat = self.beats[effect.replica]
            here = set(self.carried[build.US])
            self._check(effect.key, here if beat.residency is None else here & set(beat.residency))
            self._count_open(effect.key)
        elif isinstance(effect, fx.Forward):
            self.counts["forwarded"] += 1
            there, said = set(self.carried[effect.peer]), self.digests[effect.peer].residency
            assert not self.confined or there & self.confined, "out of a confined region"
            self._check(effect.key, there & set(said or ()))
        elif isinstance(effect, fx.PublishTrie):
            self._check_told(effect.delta.gained)
        elif isinstance(effect, fx.AnswerTrie):
            answer = effect.answer
            blocks = getattr(answer, "blocks", None) or getattr(answer, "gained", ())
            if effect.inbox.startswith(subjects.inbox_prefix(build.US, SIBLING)):
                self.counts["shared"] += len(self.sibling.secrets.intersection(blocks))
            else:
                heard_by = set(self.carried[RegionId("eu")])
                assert not self.confined or heard_by & self.confined, (
                    "published to a region that may not know"
                )
                self._check_told(blocks)
        elif isinstance(effect, fx.Fail) and effect.fault is Fault.RESIDENCY:
            self.counts["forbidden"] += 1
            assert self._wanted(effect.key), "only who wants something can be denied it"
        elif isinstance(effect, fx.RefusePeer) and effect.reason is Refusal.RESIDENCY:
            self.counts["refused"] += 1

    def _check(self, key: int, carries: set[str]) -> None:
        for wanted in self._wanted(key):
            assert wanted & carries, f"{wanted} on ground that carries {carries}"

    def _count_open(self, key: int) -> None:
        """Its blocks may be published if every receiving region may know."""
        listeners = [set(self.carried[RegionId(peer)]) for peer in PEER_REGIONS]
        if self.confined:
            listeners = [there for there in listeners if there & self.confined]
        if all(wanted & there for wanted in self._wanted(key) for there in listeners):
            self.open_blocks.update(self.asked[key].request.prompt.hashes)
        else:
            self.counts["secret"] += 1

    def _check_told(self, blocks: tuple[int, ...]) -> None:
        self.counts["told"] += len(blocks)
        self.counts["inherited"] += len(self.sibling.open_blocks.intersection(blocks))
        known = self.open_blocks | self.sibling.open_blocks
        assert known.issuperset(blocks), "a prefix was published outside its labels"


class Sibling:
    """What another router publishes: prompts of its own, those that begin with S secret."""

    def __init__(self, chaos: LabelledChaos) -> None:
        self._chaos = chaos
        self._epoch = 1
        self._seqs = {PEERS: 0, SIBLINGS: 0}
        self.secrets: set[int] = set()
        self.open_blocks: set[int] = set()  # all published to peers

    def places(self) -> list[ev.Event]:
        """A prompt on some replica: to us at once, and to peers if they may know."""
        dice = self._chaos.dice
        if dice.random() < 0.1:
            self._epoch += 1
            self._seqs = {PEERS: 0, SIBLINGS: 0}
        text = dice.choice("ST") + "".join(dice.choice("AB") for _ in range(dice.randint(0, 4)))
        blocks = build.prompt(text).hashes
        placed = self._delta(SIBLINGS, blocks, dice.choice(REPLICAS))
        told = self._delta(PEERS, blocks if text.startswith("T") else ())
        known = self.open_blocks if text.startswith("T") else self.secrets
        known.update(blocks)
        return [ev.SiblingSeen(placed), ev.TrieSeen(told)]

    def _delta(self, stream: int, blocks: tuple[int, ...], replica: str = "") -> TrieDelta:
        self._seqs[stream] += bool(blocks)
        number = self._seqs[stream]
        return TrieDelta(build.US, SIBLING, self._epoch, number, blocks, (), replica)
