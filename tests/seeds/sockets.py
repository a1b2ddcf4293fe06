"""TCP connections in memory: bytes arrive late, in order, cut anywhere, or not read at all."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any

from tests.seeds.loop import Process, VirtualLoop, this_process

DELAY_S = 0.0002
KERNEL_BYTES = 64 * 1024  # that a connection takes before its writer notices
READ_BYTES = 64 * 1024


class Socket(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, net: "Sockets", protocol: asyncio.Protocol, process: Process | None) -> None:
        super().__init__()
        self._net, self._loop = net, net.loop
        self.protocol, self.process = protocol, process
        self.other: Socket
        self._under_way: deque[bytes | None] = deque()  # None: the end
        self._arrived: deque[bytes | None] = deque()  # and not read
        self._unread = 0
        self._high = KERNEL_BYTES
        self._is_reading = True
        self._is_pausing = False  # its writer was told to wait
        self.is_over = False
        if process is not None:
            process.at_kill.append(self.abort)

    def _do(self, delay_s: float, call: Any, *args: Any) -> None:
        outside = self._net.outside  # and not where the other end runs
        context = outside if self.process is None else self.process.context
        self._loop.call_at(self._loop.time() + delay_s, call, *args, context=context)

    def write(self, data: Any) -> None:
        if self.is_over or not data:
            return
        data, other = bytes(data), self.other
        other._unread += len(data)
        cut = self._net.dice.randrange(len(data)) if self._net.dice.random() < 0.05 else 0
        for piece in (data[:cut], data[cut:]):
            if piece:
                other._will_arrive(piece)
        if not self._is_pausing and other._unread > KERNEL_BYTES + self._high:
            self._is_pausing = True
            self._do(0.0, self.protocol.pause_writing)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def _will_arrive(self, data: bytes | None) -> None:
        self._under_way.append(data)
        self._do(DELAY_S, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._under_way.popleft())
        self._read()

    def _read(self) -> None:
        while self._arrived and self._is_reading and not self.is_over:
            data = self._arrived.popleft()
            if data is None:
                self.protocol.eof_received()
                self._lost(None)
                return
            while self._arrived and self._arrived[0] and len(data) < READ_BYTES:
                data += self._arrived.popleft() or b""  # one read takes all that is there
            self._unread -= len(data)
            other = self.other
            if other._is_pausing and self._unread <= KERNEL_BYTES:
                other._is_pausing = False
                other._do(0.0, other.protocol.resume_writing)
            self.protocol.data_received(data)

    def _lost(self, problem: Exception | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._do(0.0, self.protocol.connection_lost, problem)
            if self.process is not None and self.abort in self.process.at_kill:
                self.process.at_kill.remove(self.abort)

    def _reset(self) -> None:
        self._lost(ConnectionResetError("reset"))

    def close(self) -> None:
        if not self.is_over:
            self._lost(None)
            self.other._will_arrive(None)

    def abort(self) -> None:
        if not self.is_over:
            self._lost(None)
            self.other._do(DELAY_S, self.other._reset)

    def write_eof(self) -> None:
        """The rest is read until the other end closes."""

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._read()

    def get_write_buffer_size(self) -> int:
        return 0 if self.is_over else max(0, self.other._unread - KERNEL_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = KERNEL_BYTES if high is None else high


class Sockets:
    """All connections of a world."""

    def __init__(self, loop: VirtualLoop, dice: Random) -> None:
        self.loop, self.dice = loop, dice
        self.outside = contextvars.copy_context()
        loop.connect = self.connect

    def connect(self, host: str, protocol: asyncio.Protocol) -> Socket:
        """Raises OSError where nobody listens."""
        if host not in self.loop.listening:
            raise ConnectionRefusedError(111, f"nobody listens at {host}")
        factory, process = self.loop.listening[host]
        here = Socket(self, protocol, this_process())
        there = Socket(self, asyncio.Protocol(), process)
        here.other, there.other = there, here

        def accept() -> None:
            if there.is_over:
                return
            there.protocol = factory()
            there.protocol.connection_made(there)

        there._do(0.0, accept)
        protocol.connection_made(here)
        return here
