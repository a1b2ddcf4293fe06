"""A mesh's own certificate authority, and the certificates of its servers.

    DIR/ca.pem                   who is trusted: the authority that signs, first; during a change of
                                 authorities the other one too
    DIR/ca.key                   the key that signs; needed where certificates are made alone
    DIR/ca-next.key              while a change of authorities is prepared

An operator with an authority puts its `ca.pem` and `ca.key` there, or `ca.pem` alone, and the
servers' certificates where this module would put them: then these are used as they are.

A change of authorities has three steps, with the files handed out after each: both are trusted; the
new one signs; the old one is trusted no more. At no moment does a process meet a certificate that
it can't check.

Keys are of P-256: as fast as any for handshakes, and in every library.
"""

import base64
import datetime as dt
import ipaddress
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from infra.private_files import write_private

CA, CA_KEY, NEXT_KEY = "ca.pem", "ca.key", "ca-next.key"
CA_DAYS = 3650
SERVER_DAYS = 397
RENEW_DAYS = 130  # a certificate that ends sooner is made anew
BACKDATED = dt.timedelta(hours=1)  # for clocks that are late


class CertificatesUnusable(ValueError):
    """Files of an authority that can't be used; the message says how to go on."""


@dataclass(frozen=True, slots=True)
class Authority:
    """`trusted`: the one that signs, first. Without `key` it signs nothing here."""

    trusted: tuple[x509.Certificate, ...]
    key: ec.EllipticCurvePrivateKey | None

    @property
    def pem(self) -> str:
        return "".join(map(_pem, self.trusted))

    @property
    def base64(self) -> str:
        """Who is trusted, as `infra.bus` reads it: DER in base64, with commas between."""
        return ",".join(base64.b64encode(_der(one)).decode() for one in self.trusted)


def keep_authority(directory: Path, name: str) -> Authority:
    """The authority of that folder, which is made where there is none. Raises
    CertificatesUnusable."""
    ca, key_file = directory / CA, directory / CA_KEY
    if not ca.exists():
        if key_file.exists():
            raise CertificatesUnusable(f"{key_file}: its {CA} is missing; put it back, or remove")
        key = ec.generate_private_key(ec.SECP256R1())
        _write_authority(directory, [_self_signed(key, name)], key)
    trusted = _read_certificates(ca)
    return Authority(trusted, _read_key(key_file, trusted[0]) if key_file.exists() else None)


def change_authority(directory: Path, name: str) -> str:
    """Take the next step of a change of authorities; what it was, for people. Raises
    CertificatesUnusable."""
    current, next_file = keep_authority(directory, name), directory / NEXT_KEY
    if current.key is None:
        raise CertificatesUnusable(f"{directory / CA_KEY}: is missing; change {CA} by hand")
    if next_file.exists():
        key = _read_key(next_file, current.trusted[-1])
        _write_authority(directory, current.trusted[::-1], key)
        next_file.unlink()
        return "2 of 3: the new authority signs; both are trusted"
    if len(current.trusted) > 1:
        _write_authority(directory, current.trusted[:1], current.key)
        return "3 of 3: the old authority is trusted no more"
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(next_file, _key_text(key))
    _write_authority(directory, [*current.trusted, _self_signed(key, name)], current.key)
    return "1 of 3: the new authority is trusted too; the old one signs"


def keep_certificate(
    authority: Authority, cert: Path, key_file: Path, hosts: Iterable[str], *, renew: bool = False
) -> None:
    """Have a certificate for these names and addresses there. One that names them all, has its key,
    is signed by the authority and does not end soon is left as it is, unless `renew`.

    Raises CertificatesUnusable.
    """
    wanted = dict.fromkeys(hosts)
    if not renew and cert.exists() and key_file.exists() and _is_good(authority, cert, wanted):
        return
    if authority.key is None:
        if cert.exists() and key_file.exists():
            return  # the operator's, who knows what is in it
        raise CertificatesUnusable(
            f"{cert} and {key_file}: missing, and {CA} has no {CA_KEY} here to sign with; put a "
            f"certificate for {', '.join(wanted)} there, for servers and clients, and its key"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.trusted[0]
    made = (
        _builder(key, next(iter(wanted)), SERVER_DAYS)
        .issuer_name(issuer.subject)
        .add_extension(x509.SubjectAlternativeName(list(map(_name, wanted))), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    write_private(key_file, _key_text(key))
    write_private(cert, _pem(made))


def _is_good(authority: Authority, cert: Path, wanted: Collection[str]) -> bool:
    found = _read_certificates(cert)[0]
    try:
        found.verify_directly_issued_by(authority.trusted[0])
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    ends = found.not_valid_after_utc - dt.timedelta(days=RENEW_DAYS)
    return set(map(_name, wanted)) <= set(names) and dt.datetime.now(dt.UTC) < ends


def _self_signed(key: ec.EllipticCurvePrivateKey, name: str) -> x509.Certificate:
    common = f"{name} mesh authority"
    builder = _builder(key, common, CA_DAYS)
    return (
        builder.issuer_name(_subject(common))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _builder(key: ec.EllipticCurvePrivateKey, common: str, days: int) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(common))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _subject(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _write_authority(
    directory: Path, trusted: Sequence[x509.Certificate], key: ec.EllipticCurvePrivateKey
) -> None:
    write_private(directory / CA_KEY, _key_text(key))
    write_private(directory / CA, "".join(map(_pem, trusted)))


def _read_certificates(path: Path) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise CertificatesUnusable(f"{path}: no certificates in PEM ({error})") from error


def _read_key(path: Path, of: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise CertificatesUnusable(
            f"{path}: no key in PEM without a pass phrase ({error})"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificatesUnusable(f"{path}: a key of an elliptic curve is needed here")
    if key.public_key() != of.public_key():
        raise CertificatesUnusable(f"{path}: is not the key of the certificate in {CA}")
    return key
