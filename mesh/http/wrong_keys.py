"""How many wrong API keys an address may try.

Each address has a few tries, and regains them with time; beyond, its wrong keys are not looked at
any more. A right key is served even then: many clients may share one address (a proxy, a tunnel),
and none of them may lock the others out. So this bounds what guesses cost the router; against a
guess that is right, the length of keys protects.
"""

from collections import OrderedDict
from ipaddress import ip_network

TRIES = 20.0  # at once
TRIES_PER_S = 1.0
ADDRESSES_MAX = 4096
V6_SITE_BITS = 64  # of an IPv6 address: a host has all that follow


class WrongKeys:
    """The wrong keys of late, by the address that sent them; all times on one clock."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tries, and when

    def is_over(self, address: str, now: float) -> bool:
        """Whether it has no try left."""
        return self._tries(_site(address), now) < 1.0

    def count(self, address: str, now: float) -> None:
        """One of its keys was wrong."""
        site = _site(address)
        self._left[site] = max(0.0, self._tries(site, now) - 1.0), now
        self._left.move_to_end(site)
        while len(self._left) > ADDRESSES_MAX:
            self._left.popitem(last=False)

    def _tries(self, site: str, now: float) -> float:
        left, seen_at = self._left.get(site, (TRIES, now))
        return min(TRIES, left + (now - seen_at) * TRIES_PER_S)

    def __len__(self) -> int:
        return len(self._left)


def _site(address: str) -> str:
    """Who has that address: of IPv6, one host may have 2^64."""
    if ":" not in address:
        return address
    try:
        return str(ip_network(f"{address.partition('%')[0]}/{V6_SITE_BITS}", strict=False))
    except ValueError:
        return address
