"""Certificates of an authority that a test makes, and what trusts them."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from infra.certificates import CA, keep_authority, keep_certificate
from mesh.http.tls import ServerTls, read_tls


@dataclass(frozen=True, slots=True)
class MadeCertificate:
    """A certificate for 127.0.0.1, its key, and the authority that signed it."""

    cert: Path
    key: Path
    ca: Path

    @property
    def tls(self) -> ServerTls:
        return read_tls(self.cert, self.key)

    @property
    def client(self) -> ssl.SSLContext:
        """Trusts that authority alone."""
        return ssl.create_default_context(cafile=self.ca)


def made_certificate(folder: Path, name: str = "server") -> MadeCertificate:
    """Signed by the authority of that folder, which is made if there is none."""
    made = MadeCertificate(folder / f"{name}.pem", folder / f"{name}.key", folder / CA)
    keep_certificate(keep_authority(folder, "test"), made.cert, made.key, ["127.0.0.1"], renew=True)
    return made
