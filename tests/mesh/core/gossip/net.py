"""Regions that gossip over links which lose, repeat and reorder, are cut, and restart.

`Net` is a small world of `Gossip`s in virtual time, from one seed; `equal` says what differs.
As a module it plays seeds: `python -m tests.mesh.core.gossip.net 1000`.
"""

import sys
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from mesh.core import effects as fx
from mesh.core.gossip.gossip import Gossip
from mesh.core.gossip.told import Origin
from mesh.core.settings import RouterSettings
from schemas.gossip import TrieAsk, TrieDelta, TriePart, size_bytes
from schemas.ids import RegionId, RouterId

TICK_S = 0.05
ONE_WAY_S = 0.11  # half of the widest round trip that we plan for
HEAL_S = 2.0
STORM_S = 6.0  # of trouble


class Node:
    """One router: its gossip, and the blocks that its region really holds."""

    def __init__(self, region: str, router: str, settings: RouterSettings) -> None:
        self.origin = Origin(RegionId(region), RouterId(router))
        self.settings = settings
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.effects: list[fx.Effect] = []
        self.gossip = Gossip(self.origin, self.epoch, self.settings, self.effects)
        self.held: list[tuple[int, ...]] = []


class Net:
    """Some regions of one router each, or two."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.dice = Random(seed)
        fields = {"trie_s": 0.25, "trie_blocks_max": self.dice.choice((50, 2000))} | settings
        known = RouterSettings(**fields)
        names = [("us", "r1"), ("eu", "r1"), ("ap", "r1"), ("eu", "r2")]
        self.nodes = [Node(*name, known) for name in names[: self.dice.randint(2, 4)]]
        self.loss = self.repeat = self.late = 0.0
        self.cuts: set[frozenset[RegionId]] = set()
        self.now = 0.0
        self.sent_bytes = 0
        self._numbers = count()
        self._due: list[tuple[float, int, Any]] = []

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
            if dice.random() < 0.05:
                pair = frozenset(n.origin.region for n in dice.sample(self.nodes, 2))
                self.cuts ^= {pair}
            self.step()
        self.loss = self.repeat = self.late = 0.0
        self.cuts.clear()

    def live(self, node: Node) -> None:
        """A prompt is served, or one is evicted."""
        if node.held and self.dice.random() < 0.3:
            gone = node.held.pop(self.dice.randrange(len(node.held)))
            kept = {block for path in node.held for block in path}
            for block in reversed(gone):
                if block not in kept:
                    node.gossip.news.lost(block)
        else:
            start = self.dice.choice(node.held)[:3] if node.held else ()
            path = (*start, *(self.dice.getrandbits(64) for _ in range(self.dice.randint(1, 12))))
            node.held.append(path)
            node.gossip.news.used(path, self.now)

    def rest(self, seconds: float) -> None:
        """Time passes."""
        end = self.now + seconds
        while self.now < end:
            self.step()

    def step(self) -> None:
        """One tick of everybody, and what arrives until the next."""
        for node in self.nodes:
            node.gossip.tick(self.now)
            self._perform(node)
        self.now += TICK_S
        while self._due and self._due[0][0] <= self.now:
            _, _, deliver = heappop(self._due)
            deliver()

    def differences(self) -> list[str]:
        """Where a listener's set is not what its origin told, or is not trusted."""
        found = []
        for node in self.nodes:
            for other in self.nodes:
                if other.origin.region == node.origin.region:
                    continue
                told = node.gossip.told
                if set(told.blocks(other.origin)) != set(other.gossip.news.told):
                    found.append(f"{node.origin}: set of {other.origin}")
                if not told.is_trusted(other.origin):
                    found.append(f"{node.origin}: trust in {other.origin}")
        return found

    def _perform(self, node: Node) -> None:
        effects, node.effects[:] = list(node.effects), []
        for effect in effects:
            if isinstance(effect, fx.PublishTrie):
                for other in self.nodes:
                    self._send(node, other, effect.delta)
            elif isinstance(effect, fx.AskTrie):
                for other in self.nodes:
                    if other.origin.region == effect.region:
                        self._send(node, other, effect.ask)
            elif isinstance(effect, fx.AnswerTrie):
                [asker] = [n for n in self.nodes if str(n.origin) == effect.inbox]
                self._send(node, asker, effect.answer)

    def _send(self, node: Node, to: Node, message: TrieDelta | TrieAsk | TriePart) -> None:
        pair = frozenset((node.origin.region, to.origin.region))
        if len(pair) == 1:
            return
        self.sent_bytes += size_bytes(message)
        copies = 1 + (self.dice.random() < self.repeat)
        for _ in range(copies):
            if pair in self.cuts or self.dice.random() < self.loss:
                continue
            delay_s = ONE_WAY_S + (self.dice.random() if self.dice.random() < self.late else 0.0)
            entry = (self.now + delay_s, next(self._numbers), self._arrival(node, to, message))
            heappush(self._due, entry)

    def _arrival(self, node: Node, to: Node, message: TrieDelta | TrieAsk | TriePart) -> Any:
        def arrive() -> None:
            if isinstance(message, TrieAsk):
                to.gossip.asked(message, node.origin.region, str(node.origin))
            elif isinstance(message, TriePart):
                to.gossip.hear_part(message, self.now)
            else:
                to.gossip.hear(message, self.now)

        return arrive


def heals(seed: int) -> list[str]:
    """What still differs so long after a storm; nothing, it is hoped."""
    net = Net(seed)
    net.storm()
    net.rest(HEAL_S)
    return net.differences()


def main(seeds: int) -> int:
    """How many seeds did not heal; each is named."""
    bad = {seed: left for seed in range(seeds) if (left := heals(seed))}
    for seed, left in bad.items():
        print(f"seed {seed}: {left}")
    print(f"{seeds - len(bad)} of {seeds} seeds healed within {HEAL_S:g} s")
    return len(bad)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]))))
