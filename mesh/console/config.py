"""What the console of one router is made with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.address import Address
from infra.topology import Topology
from mesh.core.model.settings import RouterSettings
from mesh.doctor.logins import Logins
from mesh.http.tls import ServerTls
from schemas.ids import RegionId, RouterId

KEY_CHARS_MIN, KEY_CHARS_MAX = 16, 256


class KeyUnusable(ValueError):
    """The file holds no admin key; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """`logins`: the observers of the regions that are watched, and the admins of those that may be
    changed. Without `admin_key` nothing may. `settings`: of its own router, as configured now;
    `tls`: the same of its certificate, where it serves https."""

    address: Address
    topology: Topology
    region: RegionId
    router: RouterId
    settings: Callable[[], RouterSettings]
    logins: Mapping[RegionId, Logins]
    admin_key: str | None = None
    tls: Callable[[], ServerTls] | None = None


def read_admin_key(path: Path) -> str:
    """The key in a file of one line. Raises KeyUnusable."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise KeyUnusable(f"{path}: can't be read ({reason})") from error
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if not is_plain or not KEY_CHARS_MIN <= len(key) <= KEY_CHARS_MAX:
        raise KeyUnusable(
            f"{path}: the key must be one line of {KEY_CHARS_MIN} to {KEY_CHARS_MAX} printable "
            "ASCII characters without spaces; make one with `openssl rand -hex 32`"
        )
    return key
