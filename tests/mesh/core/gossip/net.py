"""Routers that gossip over links which lose, repeat and reorder, are cut, and restart.

`Net` is a small world of `Gossip`s in virtual time, from one seed; `differences` says who does not
know what. Between regions everything may happen to a message. Inside a region the bus is a TCP
connection to one server: it keeps order, and a router loses what is said while it is away. Part of
the prompts is secret: no other region may hear of their blocks, and the siblings' stream crosses no
link; `leaks` says where that was broken.
As a module it plays seeds: `python -m tests.mesh.core.gossip.net 1000`.
"""

import sys
from collections import Counter
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model.settings import RouterSettings
from mesh.core.prefixes.prefix_index import PrefixIndex
from schemas.gossip import SIBLINGS, TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RegionId, RouterId

TICK_S = 0.05
ONE_WAY_S = 0.11  # half of the widest round trip that we plan for
HEAL_S = 2.0
STORM_S = 6.0  # of trouble
SECRETS = 0.3  # of a storm's prompts
SETTLE_S = 2.0  # all are up by then
NAMES = [("us", "r1"), ("eu", "r1"), ("ap", "r1"), ("eu", "r2"), ("us", "r2"), ("eu", "r3")]
REPLICAS = ("0", "1")

Message = TrieDelta | TrieAsk | TriePart


class Node:
    """One router: its gossip, and the index of its policy."""

    def __init__(self, region: str, router: str, settings: RouterSettings) -> None:
        self.origin = Origin(RegionId(region), RouterId(router))
        self.settings = settings
        self.epoch = 0
        self.is_away = False
        self.restart()

    @property
    def region(self) -> RegionId:
        return self.origin.region

    def restart(self) -> None:
        self.epoch += 1
        self.effects: list[fx.Effect] = []
        self.gossip = Gossip(self.origin, self.epoch, self.settings, self.effects.append)
        self.index: PrefixIndex[str] = PrefixIndex(65_536)
        self.index.outgoing = self.gossip.outgoing
        self.gossip.siblings.join(self.index)


class Net:
    """Some routers of up to three regions."""

    def __init__(self, seed: int, nodes: int | None = None, **settings: Any) -> None:
        self.dice = Random(seed)
        self._secret_dice = Random(f"{seed} secrets")
        fields = {"trie_s": 0.25, "trie_blocks_max": self.dice.choice((50, 2000))} | settings
        known = RouterSettings(**fields)
        chosen = NAMES[: nodes or self.dice.randint(2, len(NAMES))]
        self.nodes = [Node(*name, known) for name in chosen]
        self.loss = self.repeat = self.late = 0.0
        self.cuts: set[frozenset[RegionId]] = set()
        self.now = 0.0
        self.secrets: set[int] = set()  # blocks of secret prompts only
        self._open: set[int] = set()  # of others
        self.leaks: list[str] = []
        self.sent_bytes: Counter[tuple[RegionId, RegionId]] = Counter()
        self._numbers = count()
        self._due: list[tuple[float, int, Any]] = []
        self._nearby: list[Any] = []

    def storm(self) -> None:
        """Everything that may go wrong, for a while."""
        dice = self.dice
        self.loss, self.repeat, self.late = dice.random() / 2, dice.random() / 4, dice.random() / 2
        end = self.now + STORM_S
        while self.now < end:
            node = dice.choice(self.nodes)
            self.live(node)
            if dice.random() < 0.02:
                node.restart()
            if dice.random() < 0.02:
                self.leave_or_return(node)
            if dice.random() < 0.05:
                pair = frozenset(n.region for n in dice.sample(self.nodes, 2))
                self.cuts ^= {pair}
            self.step()
        self.loss = self.repeat = self.late = 0.0
        self.cuts.clear()
        for node in self.nodes:
            if node.is_away:
                self.leave_or_return(node)

    def live(self, node: Node) -> None:
        """A prompt is placed, or a replica loses all it has, which all its routers see."""
        dice = self.dice
        replica = f"{node.region}-{dice.choice(REPLICAS)}"
        if dice.random() < 0.05:
            for other in self.nodes:
                if other.region == node.region:
                    other.index.forget(replica)
            return
        known = node.index.held(replica)
        start = tuple(block for block, _ in known[-3:][::-1])
        path = (*start, *(dice.getrandbits(64) for _ in range(dice.randint(1, 12))))
        self.place(node, replica, path, is_secret=self._secret_dice.random() < SECRETS)

    def place(
        self, node: Node, replica: str, path: tuple[int, ...], *, is_secret: bool = False
    ) -> None:
        """A prompt is placed, as the placer would: secret prefixes are not noted for peers."""
        if is_secret:
            self.secrets.update(set(path) - self._open)
        else:
            self._open.update(path)
            self.secrets.difference_update(path)
        assert node.gossip.outgoing is not None
        node.gossip.outgoing.is_paused = is_secret
        node.index.insert(replica, path, self.now)
        node.gossip.outgoing.is_paused = False
        self._perform(node)
        self._deliver_nearby()

    def leave_or_return(self, node: Node) -> None:
        """Its connection to the bus breaks, or is there again."""
        node.is_away = not node.is_away
        if not node.is_away:
            node.gossip.siblings.bus_returned()

    def rest(self, seconds: float) -> None:
        """Time passes."""
        end = self.now + seconds
        while self.now < end:
            self.step()

    def step(self) -> None:
        """One tick of all, and what arrives until the next."""
        for node in self.nodes:
            node.index.expire(self.now)
            node.gossip.tick(self.now)
            self._perform(node)
        self.now += TICK_S
        self._deliver_nearby()
        while self._due and self._due[0][0] <= self.now:
            _, _, deliver = heappop(self._due)
            deliver()
            self._deliver_nearby()

    def differences(self) -> list[str]:
        """Where a receiver does not have what an origin published, siblings not the same index, or
        a router what it may not."""
        found = list(self.leaks)
        for node in self.nodes:
            for other in self.nodes:
                if other is node:
                    continue
                told = node.gossip.remote
                if set(told.blocks(other.origin)) != set(other.gossip.outgoing.published):
                    found.append(f"{node.origin}: set of {other.origin}")
                if not told.is_trusted(other.origin):
                    found.append(f"{node.origin}: trust in {other.origin}")
                if node.region == other.region and placed(node) != placed(other):
                    found.append(f"{node.origin}: index of {other.origin}")
        return found

    def _perform(self, node: Node) -> None:
        effects, node.effects[:] = list(node.effects), []
        for effect in effects:
            if isinstance(effect, fx.PublishTrie | fx.PublishToSiblings):
                self._publish(node, effect)
            elif isinstance(effect, fx.AskTrie):
                for other in self.nodes:
                    if other.region == effect.region and other is not node:
                        self._send(node, other, effect.ask, effect.ask.stream)
            elif isinstance(effect, fx.AnswerTrie):
                name, stream = effect.inbox.split("/")
                [asker] = [n for n in self.nodes if str(n.origin) == name]
                self._send(node, asker, effect.answer, int(stream))

    def _publish(self, node: Node, effect: fx.PublishTrie | fx.PublishToSiblings) -> None:
        """To all regions or our own; a link carries it once, however many listen behind it."""
        stream = int(isinstance(effect, fx.PublishToSiblings))
        others = [n for n in self.nodes if n is not node]
        listeners = [n for n in others if not stream or n.region == node.region]
        for region in {listener.region for listener in listeners}:
            self.sent_bytes[node.region, region] += size_bytes(effect.delta)
        for listener in listeners:
            self._carry(node, listener, effect.delta, stream)

    def _send(self, node: Node, to: Node, message: Message, stream: int) -> None:
        self.sent_bytes[node.region, to.region] += size_bytes(message)
        self._carry(node, to, message, stream)

    def _carry(self, node: Node, to: Node, message: Message, stream: int) -> None:
        if node.region != to.region:
            self._look_at(node, message, stream)
        if node.is_away or to.is_away:
            return
        arrive = self._arrival(node, to, message, stream)
        if node.region == to.region:
            self._nearby.append(arrive)
            return
        pair = frozenset((node.region, to.region))
        copies = 1 + (self.dice.random() < self.repeat)
        for _ in range(copies):
            if pair in self.cuts or self.dice.random() < self.loss:
                continue
            delay_s = ONE_WAY_S + (self.dice.random() if self.dice.random() < self.late else 0.0)
            heappush(self._due, (self.now + delay_s, next(self._numbers), arrive))

    def _look_at(self, node: Node, message: Message, stream: int) -> None:
        """What leaves a region. Blocks that are lost were published before."""
        blocks: set[int] = set()
        if isinstance(message, TrieDelta):
            blocks.update(message.gained, message.lost)
        elif isinstance(message, TriePart):
            blocks.update(message.blocks)
        if stream == SIBLINGS and not isinstance(message, TrieAsk):
            self.leaks.append(f"{node.origin}: tells another region what is for siblings")
        elif leaked := blocks & self.secrets:
            self.leaks.append(f"{node.origin}: tells {len(leaked)} secret blocks")

    def _deliver_nearby(self) -> None:
        while self._nearby:
            self._nearby.pop(0)()

    def _arrival(self, node: Node, to: Node, message: Message, stream: int) -> Any:
        def arrive() -> None:
            gossip, now = to.gossip, self.now
            ear = gossip.siblings if stream == SIBLINGS else gossip
            if isinstance(message, TrieAsk):
                gossip.asked(message, node.region, f"{node.origin}/{stream}", now)
            elif isinstance(message, TriePart):
                ear.receive_part(message, now)
            else:
                ear.receive(message, now)

        return arrive


def placed(node: Node) -> dict[str, set[int]]:
    """What the router believes its region's replicas to hold."""
    index = node.index
    held = {owner: {block for block, _ in index.held(owner)} for owner in index.owners}
    return {owner: blocks for owner, blocks in held.items() if blocks}


def healed(seed: int) -> tuple[list[str], int]:
    """What still differs so long after a storm, nothing it is hoped; and the busiest link's bytes
    while it healed."""
    net = Net(seed)
    net.rest(SETTLE_S)
    net.storm()
    net.sent_bytes.clear()
    net.rest(HEAL_S)
    links = [sent for (one, other), sent in net.sent_bytes.items() if one != other]
    return net.differences(), max(links, default=0)


def main(seeds: int) -> int:
    """How many seeds did not heal; each is named."""
    played = {seed: healed(seed) for seed in range(seeds)}
    bad = {seed: left for seed, (left, _) in played.items() if left}
    for seed, left in bad.items():
        print(f"seed {seed}: {left}")
    links = sorted(sent for _, sent in played.values())
    print(f"{seeds - len(bad)} of {seeds} seeds healed within {HEAL_S:g} s")
    print(f"bytes of the busiest link meanwhile: median {links[len(links) // 2]}, most {links[-1]}")
    return len(bad)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]))))
