"""The API keys that operators made on the bus, as one router knows them.

What a router has read stays in force as long as it runs: records only join (`schemas.keys`), so a
stream that was emptied, or put back to an older state, neither lets a revoked key in again nor
locks one out that was made. The router says so until the stream has all of them again. One that
starts has read nothing; what follows from that is for `mesh.http.callers` to say.
"""

import logging
import time
from collections.abc import Callable

from nats.aio.msg import Msg

from infra.process import LimitedLog
from mesh.runtime.control_plane import H_STREAM, H_SUBJECT
from schemas import subjects
from schemas.ids import RegionId
from schemas.keys import KEYS_MAX, KeyRecord, decode_keys, joined
from schemas.wire import WireError

log = logging.getLogger(__name__)

KEPT_MAX = 2 * KEYS_MAX  # of several records joined; those that are over go first
KEYS_LOST = (
    "the stream of API keys lacks some that are in force here, and that a router which starts "
    "would not know: `mesh keys sync` writes them again as other regions have them, else restore a "
    "backup"
)
KEYS_UNREAD = (
    "the API keys of this region's bus could not be read yet, and are required, or may be of a "
    "tenant with residency; was `mesh infra streams` run, and is its nats-server rendered anew "
    "since an upgrade?"
)


class KeysInForce:
    """One router's. `changed` is called with all keys after each record."""

    def __init__(
        self,
        region: RegionId,
        changed: Callable[[tuple[KeyRecord, ...]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._region, self._changed, self._clock = region, changed, clock
        self._log = LimitedLog(log)
        self._keys: tuple[KeyRecord, ...] = ()
        self.is_read = False
        self.is_lost = False  # whether the stream lacks some that are in force

    @property
    def problem(self) -> str | None:
        """What is wrong with the stream, as far as a router sees it."""
        return KEYS_LOST if self.is_lost else None

    def receive(self, msg: Msg) -> None:
        """The stream has taken a record."""
        headers = msg.headers or {}
        place = (subjects.STREAM_KEYS, subjects.keys(self._region))
        if (headers.get(H_STREAM), headers.get(H_SUBJECT)) != place:
            self._log.warning("keys", "sender", "%s: dropped, no stream's", msg.subject)
            return
        self.read(1, msg.data)

    def read(self, seq: int, data: bytes) -> None:
        """The last record of the stream; `seq` 0: it has none."""
        try:
            record = decode_keys(data).keys if seq else ()
        except WireError as error:
            text = "the API keys can't be read, those before hold: %.300s"
            self._log.warning("keys", "unreadable", text, error)
            return
        self.is_read = True
        now, there = self._clock(), {key.id for key in record}
        was_lost = self.is_lost
        self.is_lost = any(key.ends_at_unix_s > now and key.id not in there for key in self._keys)
        if self.is_lost and not was_lost:
            log.warning("%s", KEYS_LOST)
        keys = joined(self._keys, record)
        if len(keys) > KEPT_MAX:
            keys = tuple(sorted(keys, key=lambda key: key.ends_at_unix_s)[-KEPT_MAX:])
        if keys != self._keys:
            valid = sum(key.ends_at_unix_s > now for key in keys)
            log.info("API keys read from the bus: %d, of which %d are valid", len(keys), valid)
        self._keys = keys
        self._changed(keys)
