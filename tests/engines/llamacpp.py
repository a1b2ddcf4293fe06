"""llama.cpp's server with the tiny model `tiny.gguf` of its folder (`tiny_gguf.write`)."""

import sys

from tests.engines import llamacpp_server
from tests.engines.engine import RealEngine


class LlamaCpp(RealEngine):
    kind = "llamacpp"
    running = "llamacpp:requests_processing"
    waiting = "llamacpp:requests_deferred"
    batch_max = 2
    context_tokens = 8192
    listed_route = "/apply-template"
    options: tuple[str, ...] = ()

    async def _start(self, log: str) -> list[int]:
        pid = await self.processes.start(
            log,
            (
                *(sys.executable, llamacpp_server.__file__, str(self.directory / "tiny.gguf")),
                *(str(self.port), str(self.batch_max), str(self.context_tokens)),
                *self.options,
                *([self.api_key] if self.api_key else []),
            ),
            ready=self.processes.answers(f"{self.url}/health"),
        )
        return [pid]
