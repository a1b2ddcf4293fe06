"""Region-local: what most operators run, and what SkyWalker is measured against (its Figure 10).

Every region serves its own clients with its own replicas: SkyWalker's rule inside the region, and
nothing ever leaves it. When no replica is free the request waits, however idle the peers are.
"""

from collections.abc import Sequence
from typing import ClassVar

from mesh.core.policies.base import Choice, Target
from mesh.core.policies.skywalker import SkyWalker
from mesh.core.requests.request import Request
from schemas.decision import CandidateKind


class RegionLocal(SkyWalker):
    """Never forwards. Joint, because it has to refuse the peers that it is shown."""

    joint: ClassVar[bool] = True

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """A replica of this region, or none."""
        local = [target for target in targets if target.kind is CandidateKind.REPLICA]
        if not local:
            return Choice(None, "no replica of this region is free, and nothing leaves it")
        return super().choose(request, local, now)
