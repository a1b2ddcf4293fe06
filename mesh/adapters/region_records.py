"""Records that operators give a region by a stream of its bus, with the login `admin`.

The stream holds one record, which each command writes anew; those before it are the history. A
write names the number of the record that it changes, so of two operators who change it at once one
reads again and repeats its change: neither undoes the other's unseen.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from infra.bus import H_EXPECTED, WRONG_LAST
from schemas.ids import RegionId
from schemas.wire import WireError

T = TypeVar("T")

REQUEST_S = 5.0
TRIES = 10  # against operators who write at the same moment


class RecordsUnavailable(Exception):
    """The stream could not be read or written; the message says what to do."""


class Numbered(NamedTuple, Generic[T]):
    """A record and its number in the stream; 0: none was written yet."""

    seq: int
    record: T


@dataclass(frozen=True, slots=True)
class RegionRecords(Generic[T]):
    """One kind of record. `subject`: where a region's is written; `nothing`: what holds where none
    was."""

    stream: str
    subject: Callable[[RegionId], str]
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    nothing: Callable[[RegionId], T]

    async def read(self, client: Client, region: RegionId) -> Numbered[T]:
        """The record that holds now. Raises RecordsUnavailable."""
        manager = client.jsm(timeout=REQUEST_S)
        try:
            last = await manager.get_last_msg(self.stream, self.subject(region), direct=True)
            return Numbered(last.seq or 0, self.decode(last.data or b""))
        except nats.js.errors.NotFoundError:
            return Numbered(0, self.nothing(region))
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError, WireError) as error:
            raise self._unavailable(region, error) from error

    async def change(
        self, client: Client, region: RegionId, change: Callable[[T], T], kept: T | None = None
    ) -> Numbered[T]:
        """Apply the change to the record that holds, and write it, unless it is returned as it is.
        `kept`: the one that holds where the stream has lost it. Raises RecordsUnavailable."""
        for _ in range(TRIES):
            last, known = await self.read(client, region)
            holding = known if kept is None else kept
            wanted = change(holding)
            if kept is None and wanted == holding:
                return Numbered(last, known)
            if (seq := await self.write(client, region, wanted, last)) is not None:
                return Numbered(seq, wanted)
            kept = None  # who was faster has written it
        raise RecordsUnavailable(f"{region}: others change {self.stream} all the time; try again")

    async def history(self, client: Client, region: RegionId, most: int) -> list[Numbered[T]]:
        """The last records, newest first. Raises RecordsUnavailable."""
        manager, found = client.jsm(timeout=REQUEST_S), []
        try:
            state = (await manager.stream_info(self.stream)).state
            first = max(state.first_seq, state.last_seq - most + 1)
            for seq in range(state.last_seq, first - 1, -1) if state.messages else ():
                record = await manager.get_msg(self.stream, seq)
                found.append(Numbered(seq, self.decode(record.data or b"")))
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError, WireError) as error:
            raise self._unavailable(region, error) from error
        return found

    async def write(self, client: Client, region: RegionId, record: T, after: int) -> int | None:
        """The number that the record got; None if another one was written after `after`."""
        try:
            answer = await client.request(
                self.subject(region),
                self.encode(record),
                timeout=REQUEST_S,
                headers={H_EXPECTED: str(after)},
            )
            reply = json.loads(answer.data)
            error = reply.get("error")
            if error is None:
                return int(reply["seq"])
            if error.get("err_code") in WRONG_LAST:
                return None
        except (nats.errors.Error, TimeoutError) as problem:
            raise self._unavailable(region, problem) from problem
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            why = f"its answer can't be read: {answer.data[:200]!r}"
            raise self._unavailable(region, why) from problem
        raise self._unavailable(region, error.get("description"))

    def _unavailable(self, region: RegionId, why: object) -> RecordsUnavailable:
        text = str(why) or type(why).__name__
        return RecordsUnavailable(
            f"{region}: the stream {self.stream} gives no answer ({text}); was `mesh infra "
            "streams` run, and is its nats-server rendered anew since an upgrade? If its disk is "
            "or was full: make room there, then restart that nats-server. `mesh doctor` says"
        )
