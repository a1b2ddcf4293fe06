"""A region's forecast of its online load, kept over restarts of its batch runners.

All of a region's runners see the same heartbeats, so one entry serves them, whoever wrote it last.
"""

from mesh.batch.connection import Connection
from schemas.batch import BUCKET_JOBS, STREAM_JOBS

KEY = f"$KV.{BUCKET_JOBS}.forecast"


class KeptForecast:
    """An entry of the bucket of jobs; its bytes are the caller's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get(self) -> bytes | None:
        """What was put last. Raises StoreUnavailable."""
        stored = await self._connection.last(STREAM_JOBS, KEY)
        return None if stored is None or not stored.data else stored.data

    async def put(self, data: bytes) -> None:
        """Raises TooLarge, StoreFull, StoreUnavailable."""
        await self._connection.publish(KEY, data)
