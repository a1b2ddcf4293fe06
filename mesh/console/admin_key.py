"""Who may change something: whoever sends the admin key.

Wrong keys are limited by the address that sent them and in all. The right key is accepted even
then: many users may share one address (a tunnel, a proxy), and none of them may lock the others
out. Against guessing the key's length protects, not the limit.
"""

import hmac
from collections import OrderedDict, deque
from collections.abc import Callable
from hashlib import sha256

COUNTED_S = 60.0
WRONG_MAX = 5  # keys of one address in that time
ALL_WRONG_MAX = 60  # of all addresses together
ADDRESSES_MAX = 256
SCHEME = "Bearer "


class KeyRefused(Exception):
    """`retry_after_s`: too many were wrong; wrong ones get this answer for so long."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdminKey:
    """The key, and the wrong ones of late by the address that sent them."""

    def __init__(self, key: str | None, clock: Callable[[], float]) -> None:
        self._digest = None if key is None else _digest(key)
        self._clock = clock
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()
        self._all_wrong: deque[float] = deque(maxlen=ALL_WRONG_MAX)

    def require(self, authorization: str | None, address: str) -> None:
        """Return if that header has the key. Raises KeyRefused."""
        if self._digest is None:
            raise KeyRefused("this console is read-only: its router has no admin key")
        if authorization is None or not authorization.startswith(SCHEME):
            raise KeyRefused("send the admin key as a bearer token")
        if hmac.compare_digest(_digest(authorization.removeprefix(SCHEME)), self._digest):
            return
        now = self._clock()
        of_address = self._wrong.setdefault(address, deque(maxlen=WRONG_MAX))
        self._wrong.move_to_end(address)
        while len(self._wrong) > ADDRESSES_MAX:
            self._wrong.popitem(last=False)
        for counted in (of_address, self._all_wrong):
            if len(counted) == counted.maxlen and (left_s := counted[0] + COUNTED_S - now) > 0.0:
                raise KeyRefused("too many wrong keys; wait a minute", left_s)
        of_address.append(now)
        self._all_wrong.append(now)
        raise KeyRefused("that is not the admin key")


def _digest(key: str) -> bytes:
    """Of one length, so that comparing two takes one time."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
