"""Writes a process's accounts of tokens into its region's stream, a second after they change.

A process that dies loses what ended in the last FLUSH_S, or, with more than FLUSH_S's pages to
write, in the last seconds that those take: at most 9, of SERIES_MAX accounts. While the stream
takes nothing the sums are kept here, for DAYS_MAX days. A page is written by compare-and-set, with
the number of its last writing. So a writing whose answer was lost is noticed, and so is a stream
that was emptied: then all pages that are kept are written again.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable

import nats.errors

from infra.bus import H_EXPECTED, WRONG_LAST, WRONG_LAST_SEQUENCE
from infra.process import LimitedLog
from mesh.adapters.bus import RouterBus
from mesh.session.usage_book import UsageBook
from schemas import subjects
from schemas.usage import UsagePage, encode_page

log = logging.getLogger(__name__)

FLUSH_S = 1.0
RETRY_S = 5.0
PAGES_AT_ONCE = 16
REQUEST_S = 5.0
CLOSE_S = 5.0  # for what is not written at the end
UNWRITTEN = (
    "accounts of tokens are kept here, as the stream USAGE takes no writes (%s): was `mesh infra "
    "streams` run, and is its nats-server rendered anew since an upgrade?"
)
LOST = (
    "the stream USAGE was emptied: its accounts of days before yesterday are lost, and those of "
    "this process's later ones are written again; restore it from a backup"
)


class UsageWriter:
    """One process's. `run` until cancelled, then `close`."""

    def __init__(
        self, bus: RouterBus, book: UsageBook, unix_s: Callable[[], float] = time.time
    ) -> None:
        self._bus, self.book, self._unix_s = bus, book, unix_s
        self._last: dict[str, int] = {}  # of each subject, the number of its last writing
        self._log = LimitedLog(log)
        self._turn()

    async def run(self) -> None:
        """Write what changes, again and again."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self._turn()
            if self.book.is_due and self._bus.is_connected and not await self._write_some():
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Write what is left, within CLOSE_S."""
        try:
            async with asyncio.timeout(CLOSE_S):
                while self.book.is_due and self._bus.is_connected and await self._write_some():
                    pass
        except TimeoutError:
            pass
        if self.book.is_due:
            log.warning("%d pages of accounts of tokens are not written", len(self.book))

    def _turn(self) -> None:
        self.book.turn(time.strftime("%Y-%m-%d", time.gmtime(self._unix_s())))

    async def _write_some(self) -> bool:
        """Whether the stream has taken any of the pages that wait longest."""
        pages = tuple(self.book.due(PAGES_AT_ONCE))
        try:
            written = await asyncio.gather(*map(self._write, pages))
        except asyncio.CancelledError:
            for page in pages:
                self.book.to_write(page.day, page.number)
            raise
        return any(written)

    async def _write(self, page: UsagePage) -> bool:
        """Whether the stream has answered; what it has not taken is to be written again."""
        token = f"{page.epoch:x}-{page.number}"
        subject = subjects.usage(page.region, page.router, page.day, token)
        last = self._last.get(subject, 0)
        data = b""
        try:
            answer = await self._bus.client.request(
                subject, encode_page(page), timeout=REQUEST_S, headers={H_EXPECTED: str(last)}
            )
            data = answer.data
            reply = json.loads(data)
            if "error" not in reply:
                self._last[subject] = int(reply["seq"])
                return True
            is_wrong, why = reply["error"]["err_code"] in WRONG_LAST, reply["error"]["description"]
            if reply["error"]["err_code"] == WRONG_LAST_SEQUENCE:
                self._is_at(subject, last, int(why.rpartition(" ")[2]))
        except (nats.errors.Error, TimeoutError) as error:
            is_wrong, why = False, str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError):
            is_wrong, why = False, f"its answer can't be read: {data[:200]!r}"
        self.book.to_write(page.day, page.number)
        if not is_wrong:
            self._log.warning("usage", "unwritten", UNWRITTEN, why)
        return is_wrong

    def _is_at(self, subject: str, last: int, found: int) -> None:
        """The page's last writing in the stream is another one than the last that was answered."""
        if found < last and self._last.get(subject) == last:
            self._last.clear()
            self.book.to_write_all()
            log.error(LOST)
        if found:
            self._last[subject] = found
