"""llama.cpp's server with the tiny model `tiny.gguf` of its folder (`tiny_gguf.write`)."""

import asyncio
import itertools
import sys
import time

from tests.engines import llamacpp_server
from tests.engines.engine import RealEngine
from tests.programs.bench.processes import Absent

PORT_WITHIN_S, PORT_RETRY_S = 20.0, 0.5
PORT_TAKEN = "Failed to init server"  # the last words of a server that can't listen


class LlamaCpp(RealEngine):
    kind = "llamacpp"
    running = "llamacpp:requests_processing"
    waiting = "llamacpp:requests_deferred"
    batch_max = 2
    context_tokens = 8192
    listed_route = "/apply-template"
    options: tuple[str, ...] = ()

    async def _start(self, log: str) -> list[int]:
        """Start it again while its port is not free yet, as after the end of a busy process."""
        deadline = time.monotonic() + PORT_WITHIN_S
        for attempt in itertools.count(1):
            try:
                return [await self._started(f"{log}-{attempt}")]
            except Absent as problem:
                if PORT_TAKEN not in str(problem) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(PORT_RETRY_S)
        raise AssertionError("never")

    async def _started(self, log: str) -> int:
        return await self.processes.start(
            log,
            (
                *(sys.executable, llamacpp_server.__file__, str(self.directory / "tiny.gguf")),
                *(str(self.port), str(self.batch_max), str(self.context_tokens)),
                *self.options,
                *([self.api_key] if self.api_key else []),
            ),
            ready=self.processes.answers(f"{self.url}/health"),
        )
