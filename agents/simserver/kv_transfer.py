"""A simulated engine's part in pairs: what vLLM's NixlConnector and SGLang's bootstrap do.

A prefill engine keeps the KV cache of a prompt that it was asked to hand out until the decode
engine has fetched it, or until `timeout_s` have passed. The fetch is a request of the decode engine
to `/sim/kv/…` of the prefill engine, which lasts as long as the transfer would: `base_s` and
`s_per_token`. With nixl the prefill engine answers with `kv_transfer_params`, which the decode
engine requires whole and valid. With sglang both engines have the room's number; each waits for the
other one `timeout_s` at most. A fetch that fails is the decode engine's error 500, as vLLM's with
`kv_load_failure_policy: fail`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from agents.sim.kv_cache import BLOCK_TOKENS
from agents.simserver.driver import Driver
from agents.simserver.requests import ApiError, invalid
from infra.address import Address
from schemas.kv_transfer import ROOM_MAX, KvRole, TransferKind

FETCH_PATH = "/sim/kv/{handle}"
REMOTE_FIELDS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
TRANSFER_FAILED = "the KV cache could not be fetched from the prefill engine"


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Which part an engine has, and how long transfers take, in its own seconds."""

    role: KvRole
    kind: TransferKind
    timeout_s: float = 480.0  # VLLM_NIXL_ABORT_REQUEST_TIMEOUT; SGLang's are 300 s
    s_per_token: float = 1e-5
    base_s: float = 0.005


@dataclass(slots=True)
class HandedOut:
    """The KV cache of one prompt, kept for a decode engine."""

    tokens: int
    pinned: Sequence[int] = ()
    fetched: asyncio.Event | None = None


class KvPeer:
    """One engine's. Serve `routes`; `prefilling` and `fetch` are the stages of requests."""

    def __init__(self, settings: KvSettings, driver: Driver, time_scale: float) -> None:
        self._settings = settings
        self._driver = driver
        self._scale = time_scale
        self._engine_id = secrets.token_hex(8)
        self._kept: dict[str, HandedOut] = {}  # by handle: a request's id, or a room
        self._arrived = asyncio.Condition()
        self._timers: set[asyncio.TimerHandle] = set()

    def routes(self) -> list[web.RouteDef]:
        return [web.post(FETCH_PATH, self._fetched)]

    def read(self, raw: bytes) -> Mapping[str, Any]:
        """The fields of a body that direct a transfer. Raises ApiError for what can't be done."""
        fields = orjson.loads(raw)
        if self._settings.kind is TransferKind.SGLANG:
            return _room(fields)
        params = fields.get("kv_transfer_params") or {}
        if not isinstance(params, dict):
            raise invalid("kv_transfer_params must be an object", "kv_transfer_params")
        return params

    @property
    def is_prefill(self) -> bool:
        return self._settings.role is KvRole.PREFILL

    # The prefill engine.

    async def handed_out(
        self, params: Mapping[str, Any], keys: Sequence[int], tokens: int, here: Address
    ) -> Mapping[str, Any] | None:
        """Keep a prompt's KV cache after its token. What the answer says of it, if anything.

        `here`: where this engine listens. Of sglang returns when the decode engine has it. Raises
        ApiError where none comes.
        """
        prompt_keys = keys[: tokens // BLOCK_TOKENS]
        if self._settings.kind is TransferKind.SGLANG:
            await self._hand_to_room(str(params["bootstrap_room"]), prompt_keys, tokens)
            return None
        if not params.get("do_remote_decode") or not prompt_keys:
            return None
        handle = secrets.token_hex(8)
        self._keep(handle, HandedOut(tokens, self._driver.pin(prompt_keys)))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": handle,
            "remote_block_ids": [[number for number, _ in enumerate(prompt_keys)]],
            "remote_host": here.host,
            "remote_port": here.port,
            "tp_size": 1,
        }

    def _keep(self, handle: str, kept: HandedOut) -> None:
        self._kept[handle] = kept
        loop, timers = asyncio.get_running_loop(), self._timers

        def expire() -> None:
            timers.discard(timer)
            self._release(handle)

        timer = loop.call_later(self._settings.timeout_s / self._scale, expire)
        timers.add(timer)

    def _release(self, handle: str) -> None:
        kept = self._kept.pop(handle, None)
        if kept is not None:
            self._driver.unpin(kept.pinned)

    async def _hand_to_room(self, room: str, keys: Sequence[int], tokens: int) -> None:
        kept = HandedOut(tokens, self._driver.pin(keys), asyncio.Event())
        self._kept[room] = kept
        assert kept.fetched is not None
        try:
            async with self._arrived:
                self._arrived.notify_all()
            async with asyncio.timeout(self._settings.timeout_s / self._scale):
                await kept.fetched.wait()
        except TimeoutError:
            raise ApiError(500, f"no decode engine came to room {room}") from None
        finally:
            self._release(room)

    async def _fetched(self, request: web.Request) -> web.Response:
        """A decode engine fetches a KV cache; the answer comes when the transfer is over."""
        handle = request.match_info["handle"]
        if self._settings.kind is TransferKind.SGLANG:
            await self._room_to_open(handle)
        kept = self._kept.get(handle)
        if kept is None:
            raise ApiError(404, f"no KV cache is kept as {handle}")
        seconds = self._settings.base_s + self._settings.s_per_token * kept.tokens
        try:
            await asyncio.sleep(seconds / self._scale)
        finally:
            if kept.fetched is None:
                self._release(handle)
            else:
                kept.fetched.set()
        return web.Response()

    async def _room_to_open(self, room: str) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_s / self._scale), self._arrived:
                await self._arrived.wait_for(lambda: room in self._kept)
        except TimeoutError:
            raise ApiError(404, f"room {room} was never opened") from None

    # The decode engine.

    async def fetch(self, params: Mapping[str, Any], keys: Sequence[int], tokens: int) -> None:
        """Get the prompt's KV cache, if another engine has it. Raises ApiError."""
        if self._settings.kind is TransferKind.SGLANG:
            host, port = params["bootstrap_host"], params["bootstrap_port"]
            await self._fetch_from(host, port, str(params["bootstrap_room"]))
        elif not params.get("do_remote_prefill"):
            return
        else:
            missing = [name for name in REMOTE_FIELDS if params.get(name) in (None, "", [])]
            if missing:
                raise invalid(f"kv_transfer_params lacks {', '.join(missing)}")
            handle = str(params.get("remote_request_id", ""))
            await self._fetch_from(params["remote_host"], params["remote_port"], handle)
        self._driver.receive(keys[: tokens // BLOCK_TOKENS])

    async def _fetch_from(self, host: str, port: int, handle: str) -> None:
        url = f"http://{host}:{port}" + FETCH_PATH.format(handle=handle)
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s / self._scale)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ApiError(500, f"{TRANSFER_FAILED}: {error or 'it took too long'}") from None
        if status != 200:
            raise ApiError(500, f"{TRANSFER_FAILED}: it answers HTTP {status}")

    async def closing(self, app: web.Application) -> AsyncIterator[None]:
        """Until the server ends: its timers end with it."""
        yield
        for timer in self._timers:
            timer.cancel()


def _room(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    host, port, room = (fields.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
    good = isinstance(host, str) and type(port) is int and type(room) is int
    if not good or not 0 <= int(room or 0) <= ROOM_MAX:
        raise invalid(
            "a disaggregated engine needs bootstrap_host, bootstrap_port and bootstrap_room"
        )
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
