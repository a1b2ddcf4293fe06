"""Simulated engines with a part in pairs, beside agents of a small mesh."""

import asyncio

from aiohttp import web

from agents.sim.profiles import L4_LLAMA
from agents.simserver.kv_transfer import KvSettings
from agents.simserver.server import SimConfig, SimServer
from schemas.kv_transfer import KvRole, TransferKind
from tests.support.aborted import abort
from tests.support.small_mesh import SmallMesh

MODEL = "sim/tiny"
TIMEOUT_S = 480.0  # of engines, in their own seconds


class PairEngine:
    """An engine on this test's event loop; None of `role` answers whole requests."""

    def __init__(
        self,
        role: KvRole | None = None,
        kind: TransferKind = TransferKind.NIXL,
        *,
        time_scale: float = 20.0,
        timeout_s: float = TIMEOUT_S,
        s_per_token: float = 1e-5,
    ) -> None:
        kv = None if role is None else KvSettings(role, kind, timeout_s, s_per_token)
        self.role, self.kind = role, kind
        self._config = SimConfig(models=(MODEL,), profile=L4_LLAMA, time_scale=time_scale, kv=kv)
        self.server: SimServer | None = None
        self.runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_address(self) -> str | None:
        needs = self.kind is TransferKind.SGLANG and self.role is KvRole.PREFILL
        return f"127.0.0.1:{self.port}" if needs else None

    async def start(self) -> None:
        self.server = SimServer(self._config)
        self.runner = web.AppRunner(
            self.server.app(), handler_cancellation=True, shutdown_timeout=0.1
        )
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Closes every connection at once, as a process that dies does."""
        if self.runner is None:
            return
        runner, self.runner = self.runner, None
        await abort(runner)

    @property
    def busy(self) -> tuple[int, int]:
        """Requests in the engine, and tokens of its memory that they, or kept caches, take."""
        assert self.server is not None
        stats = self.server._driver.stats()
        return stats.running + stats.waiting, stats.kv_used_tokens

    @property
    def served(self) -> int:
        """Requests that it has ended."""
        assert self.server is not None
        return self.server._driver.stats().finished

    def slowed(self, factor: float) -> None:
        assert self.server is not None
        self.server._driver.set_slowdown(factor)


async def add(mesh: SmallMesh, region: str, replica: str, engine: PairEngine) -> PairEngine:
    """The engine and its agent; both end with the mesh."""
    await engine.start()
    mesh.stack.push_async_callback(engine.stop)
    options: dict[str, object] = {}
    if engine.role is not None:
        options = {
            "role": engine.role,
            "kv_transfer": engine.kind,
            "kv_address": engine.kv_address,
            "engine_kind": "sglang" if engine.kind is TransferKind.SGLANG else "vllm",
        }
    await mesh.agent(region, replica, engine, **options)
    return engine


async def until(condition, what: str, wait_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(wait_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {wait_s:g} s for {what}") from None
