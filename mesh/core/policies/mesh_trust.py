"""Which estimates of what replicas hold their answers have contradicted, time after time.

Whether a replica keeps what the router takes for kept is a property of its engine: it may have no
prefix cache, salt it, put a date before each prompt, or keep a line that the router leaves out
(Claude Code's billing, `mesh.core.model.prompt_shapes`). Its answers tell: much was estimated to be
held and next to nothing was cached, though the engine had computed the same beginning before and
too little came since to displace it. After a few such answers in a row nothing is taken for held
there any more: for prompts with the same first block, or for all, once that happened to some that
begin differently. Answers go on being compared, so a doubt ends with the first hit.
"""

from mesh.core.policies.mesh_price import HeldPrefix

ALIKE_TIMES = 3  # contradictions in a row, of prompts with the same first block
KINDS_TIMES = 4  # first blocks contradicted in a row, until no prompt is believed
KINDS_MAX = 4096  # first blocks of replicas; the one contradicted longest ago goes first
NO_KINDS: frozenset[int] = frozenset()


class CacheTrust:
    """One router's. Holds nothing of replicas whose answers confirm the estimates."""

    def __init__(self) -> None:
        # Contradictions in a row, by replica and first block; the latest last.
        self.times: dict[tuple[str, int], int] = {}
        self._kinds: dict[str, set[int]] = {}  # first blocks contradicted since the last hit
        self.mistrusted: set[str] = set()  # replicas some of whose estimates don't count

    def believes(self, name: str, first_block: int) -> bool:
        """Whether an estimate of that replica counts, for prompts with this first block."""
        if name not in self.mistrusted:
            return True
        alike = self.times.get((name, first_block), 0)
        return alike < ALIKE_TIMES and len(self._kinds.get(name, NO_KINDS)) < KINDS_TIMES

    def keep_believed(self, held: dict[str, HeldPrefix], first_block: int) -> None:
        """Remove from what replicas are taken to hold of a prompt all that is mistrusted."""
        for name in held.keys() & self.mistrusted:
            if not self.believes(name, first_block):
                del held[name]

    def contradicted(self, name: str, first_block: int) -> bool:
        """An answer had next to nothing cached, and no eviction explains it. Returns whether it is
        this one that makes estimates of such prompts count no more."""
        believed = self.believes(name, first_block)
        kind = name, first_block
        times = self.times[kind] = min(self.times.pop(kind, 0) + 1, ALIKE_TIMES)
        kinds = self._kinds.setdefault(name, set())
        if len(kinds) < KINDS_TIMES:
            kinds.add(first_block)
        if times >= ALIKE_TIMES or len(kinds) >= KINDS_TIMES:
            self.mistrusted.add(name)
        if len(self.times) > KINDS_MAX:
            self._drop(next(iter(self.times)))
        return believed and not self.believes(name, first_block)

    def confirmed(self, name: str, first_block: int) -> None:
        """An answer had cached what was estimated, or would have been without a doubt."""
        self._kinds.pop(name, None)
        if (name, first_block) in self.times:
            self._drop((name, first_block))
        elif name in self.mistrusted:
            self._settle(name)

    def forget(self, name: str) -> None:
        """The replica is gone."""
        if name in self._kinds or name in self.mistrusted:
            self.times = {kind: times for kind, times in self.times.items() if kind[0] != name}
            self._kinds.pop(name, None)
            self.mistrusted.discard(name)

    def go_on_from(self, earlier: "CacheTrust") -> None:
        """Know what another one knows."""
        self.times, self.mistrusted = {**earlier.times}, {*earlier.mistrusted}
        self._kinds = {name: {*kinds} for name, kinds in earlier._kinds.items()}

    def _drop(self, kind: tuple[str, int]) -> None:
        name, first_block = kind
        del self.times[kind]
        if (kinds := self._kinds.get(name)) is not None:
            kinds.discard(first_block)
            if not kinds:
                del self._kinds[name]
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Whether some of a replica's estimates are still mistrusted."""
        if len(self._kinds.get(name, NO_KINDS)) >= KINDS_TIMES or any(
            kind[0] == name and times >= ALIKE_TIMES for kind, times in self.times.items()
        ):
            return
        self.mistrusted.discard(name)
