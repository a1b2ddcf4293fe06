"""Which replica was given a prompt's beginning last: a guess at what its cache holds.

Agents take it for what a prompt costs, so what was refused, or lost with its replica, is forgotten:
else a prompt that nobody computed would count as cached the second time. What a replica has taken
and given back for online requests stays, though it may not have computed it: forgotten too, the
first prompts of a kind would fit no iteration again and again, and their neighbours wait for them.
"""

from collections.abc import Sequence

from schemas.ids import ReplicaId

BLOCKS_MAX = 65_536
PROMPT_BLOCKS_MAX = 512  # of one prompt that are remembered: 32,000 tokens


class PrefixMemory:
    """Of offline prompts; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._holders: dict[int, ReplicaId] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def given(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        holders = self._holders
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            holders.pop(block, None)
            holders[block] = replica
        while len(holders) > BLOCKS_MAX:
            del holders[next(iter(holders))]

    def given_back(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """Blocks that it was given and may not have computed."""
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            if self._holders.get(block) == replica:
                del self._holders[block]

    def lost(self, replica: ReplicaId) -> None:
        """Another process runs there now, or none."""
        self._holders = {block: one for block, one in self._holders.items() if one != replica}

    def holders(self, hashes: Sequence[int]) -> list[ReplicaId]:
        """Replicas that were given some of this prompt's beginning, the longest one first."""
        found: dict[ReplicaId, None] = {}
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            holder = self._holders.get(block)
            if holder is None:
                break
            found.pop(holder, None)
            found[holder] = None
        return list(reversed(found))

    def held_blocks(self, replica: ReplicaId, hashes: Sequence[int]) -> int:
        """Leading blocks that this replica was given last."""
        held = 0
        for block in hashes[:PROMPT_BLOCKS_MAX]:
            if self._holders.get(block) != replica:
                break
            held += 1
        return held
