"""One `host:port`, as configuration files and people write it.

The host is what *others* dial, so `0.0.0.0` is an error. Where it is a name (not an IP address),
the process behind it listens on every interface: a public name often resolves to an address that
the machine itself doesn't carry.
"""

import ipaddress
from typing import NamedTuple

PORT_MAX = 65535
SERVERS = 3  # of a region's bus, where it is more than one: R3 streams outlive the loss of any


class Address(NamedTuple):
    """Where a process listens and others dial it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def listen(self) -> "Address":
        """The address to bind: this one, or every interface when the host is a name."""
        return self if _is_ip(self.host) else Address("0.0.0.0", self.port)


def parse_address(text: object) -> Address:
    """The address in `text`. Raises ValueError whose message says what one looks like."""
    if isinstance(text, Address):
        return text
    if not isinstance(text, str):
        raise ValueError(f'write an address as "host:port", got {text!r}')
    host, colon, port = text.rpartition(":")
    host = _plain(host)
    if not (colon and _is_host(host)):
        raise ValueError(f'write an address as "host:port", got "{text}"')
    if host in ("0.0.0.0", "::"):
        raise ValueError(f'"{text}" can\'t be dialled: write the name or address that others reach')
    # isdecimal alone admits digits of other scripts.
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= PORT_MAX):
        raise ValueError(f'the port of "{text}" must be a number from 1 to {PORT_MAX}')
    return Address(host, int(port))


def parse_addresses(given: object) -> tuple[Address, ...]:
    """The one address, or the SERVERS of a list. Raises ValueError as `parse_address` does."""
    if isinstance(given, list) and len(given) != SERVERS:
        raise ValueError("write one address, or a list of three")
    if isinstance(given, list | tuple) and not isinstance(given, Address):
        return tuple(map(parse_address, given))
    return (parse_address(given),)


def _plain(host: str) -> str:
    """One spelling per host, so that two spellings of one port are seen to overlap."""
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1]
    return "127.0.0.1" if host == "localhost" else host


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_host(host: str) -> bool:
    if _is_ip(host):
        return True
    labels = host.split(".")
    return len(host) <= 253 and all(
        label.isascii() and label.replace("-", "").isalnum() for label in labels
    )
