"""Whether every port a topology names is free, asked before anything is started; and a free one."""

import errno
import socket

from infra.address import PORT_MAX, Address
from infra.topology import Topology


def unusable(topology: Topology) -> list[str]:
    """A line for each address that can't be listened on: the key, why, and what to do."""
    return [
        f"regions.{name}.{key}: {problem}"
        for name, region in topology.regions.items()
        for key, address in region.addresses()
        if (problem := _problem(address))
    ]


def free(host: str) -> Address:
    """An address on which nobody listens now; whoever binds it first has it."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return Address(host, int(probe.getsockname()[1]))


def free_row(host: str, count: int) -> Address:
    """The first of so many addresses in a row on which nobody listens now."""
    while True:  # nearly always the first try: the kernel picks from thousands
        first = free(host)
        row = [Address(host, first.port + n) for n in range(count)]
        if row[-1].port <= PORT_MAX and not any(map(_problem, row)):
            return first


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _problem(address: Address) -> str | None:
    with socket.socket(_family(address.listen.host), socket.SOCK_STREAM) as attempt:
        # Servers set this too: a port that merely rests after its last connections is free.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(address.listen)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{address} is taken; end what listens there, or give another port"
            reason = f"{address} can't be listened on ({error.strerror})"
            return f"{reason}; give an address of this machine"
    return None
