"""A router's second connection to its region's server: to the store of files and batches.

It is its own connection so that uploads never queue in front of control messages. The router
starts, and is ready, without it.
"""

import asyncio
import logging

from infra.bus import BusUnreachable
from infra.process import LimitedLog
from infra.tenant_table import Caller
from mesh.adapters.metrics import BatchMetrics
from mesh.adapters.refused import RequestRefused
from mesh.batch.records import StoreError
from mesh.batch.store import BatchStore
from mesh.http.batch_api import BatchApi
from mesh.http.batch_requests import AWAY, BatchDoor
from mesh.runtime.config import BatchAccess, RouterConfig
from mesh.runtime.request_manager import RequestManager
from schemas.http import Fault
from schemas.residency import Labels

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # between two looks at a connection that was refused, or given up


class BatchStoreDoor(BatchDoor):
    """Opens the store, and opens it again, while `keep_open` runs."""

    def __init__(
        self,
        access: BatchAccess,
        config: RouterConfig,
        requests: RequestManager,
        metrics: BatchMetrics,
    ) -> None:
        self.api = BatchApi(self, access.limits, metrics)
        self._access = access
        self._name = f"batch of router {config.region}/{config.router}"
        self._requests = requests
        self._store: BatchStore | None = None
        self._log = LimitedLog(log)

    async def keep_open(self) -> None:
        """Have a connection, always, and log what is wrong with the store."""
        while True:
            if self._store is None or self._store.is_closed:
                await self._open()
            if self._store is not None and self._store.is_connected:
                await self._check(self._store)
            await asyncio.sleep(AGAIN_S)

    async def _check(self, store: BatchStore) -> None:
        """Look for the streams, which somebody may have deleted, or made by now; and read the
        store's clock."""
        try:
            await store.check()
        except StoreError as error:
            self._log.warning("batch", "store", "files and batches are refused: %s", error)

    async def close(self) -> None:
        await self.api.close()
        await self._close_store()

    def batch_store(self) -> BatchStore:
        store = self._store
        if store is None or not store.is_connected:
            raise RequestRefused(Fault.STORE_AWAY, AWAY)
        return store

    def residency(self, wanted: Labels, caller: Caller | None) -> Labels:
        return self._requests.residency(wanted, caller)

    def refuse_new(self) -> None:
        self._requests.refuse_new()

    async def _open(self) -> None:
        await self._close_store()
        store = BatchStore(self._access.address, self._name, self._access.limits)
        try:
            await store.open()
        except BusUnreachable as error:
            self._log.warning("batch", "unreachable", "files and batches are refused: %s", error)
            return
        self._store = store

    async def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()
