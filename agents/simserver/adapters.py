"""vLLM's calls to load and unload LoRA adapters, of a simulated engine."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from agents.sim.adapters import AdapterRefused, LoadedAdapters
from agents.simserver.faults import FaultSwitchboard
from agents.simserver.requests import ApiError, Part


class _Unload(Part):
    lora_name: str


class _Load(_Unload):
    lora_path: str


class AdapterRoutes:
    """Serves both calls. `loaded` holds what the engine has."""

    def __init__(self, loaded: LoadedAdapters, load_s: float, faults: FaultSwitchboard) -> None:
        """`load_s`: how long one load takes, in seconds of the wall clock."""
        self.loaded = loaded
        self._load_s = load_s
        self._faults = faults

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/load_lora_adapter", self._load),
            web.post("/v1/unload_lora_adapter", self._unload),
        ]

    def rows(self, base: str) -> list[dict[str, object]]:
        """Of `/v1/models`."""
        return [
            {"id": name, "object": "model", "root": path, "parent": base}
            for name, path in self.loaded.paths.items()
        ]

    async def _load(self, request: web.Request) -> web.Response:
        asked = _Load.read(await request.read())
        path: str | None = None
        self._checked(self.loaded.begin, asked.lora_name)
        try:
            await asyncio.sleep(self._load_s)
            if self._faults.now.adapter_loads_fail:
                raise ApiError(404, f"No adapter found for '{asked.lora_path}'")
            path = asked.lora_path
        finally:
            self.loaded.finish(asked.lora_name, path)
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = _Unload.read(await request.read()).lora_name
        self._checked(self.loaded.unload, name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    @staticmethod
    def _checked(call: Callable[[str], None], name: str) -> None:
        try:
            call(name)
        except AdapterRefused as refused:
            raise ApiError(refused.status, str(refused)) from None
