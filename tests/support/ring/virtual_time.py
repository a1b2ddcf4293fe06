"""An event loop without sockets, whose time jumps to whatever is due next."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Accept = Callable[[str, asyncio.Protocol], asyncio.Transport]


class VirtualLoop(asyncio.BaseEventLoop):
    """`accept` is given the host's name and the protocol of every connection that is opened; it
    raises OSError where nobody listens."""

    def __init__(self, accept: Accept) -> None:
        super().__init__()
        self._accept = accept
        self._now = 0.0
        self._selector = self  # what the base class asks for events, which there are none
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, problem: self.problems.append(problem))

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> tuple[()]:
        assert timeout is not None, "nothing will ever happen"
        self._now += timeout
        return ()

    def _process_events(self, event_list: tuple[()]) -> None:
        assert not event_list

    async def create_connection(
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: Any = None,
        **options: Any,
    ) -> Any:
        protocol = protocol_factory()
        transport = self._accept(host, protocol)
        protocol.connection_made(transport)
        return transport, protocol


def play(accept: Accept, main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run `main` to its end in a loop of its own; all else is then cancelled."""
    loop = VirtualLoop(accept)
    try:
        loop.run_until_complete(main(loop))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
    assert not loop.problems, loop.problems
