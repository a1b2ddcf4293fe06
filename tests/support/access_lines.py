"""What a router has written of requests that ended, as tests wait for it."""

import asyncio

from mesh.explain.files import read_line
from tests.support.until import PATIENCE_S


class Lines:
    """What the router has written to standard output so far, by request."""

    def __init__(self, capfd) -> None:
        self._capfd, self.text = capfd, ""

    async def of(self, **wanted: str) -> dict[str, str]:
        """The one line that says this; waits until it is written."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.text += self._capfd.readouterr().out
                lines = [read_line(line) for line in self.text.splitlines()]
                found = [one for one in lines if one and wanted.items() <= one.items()]
                if found:
                    assert len(found) == 1, found
                    return found[0]
                await asyncio.sleep(0.02)
