"""`mesh infra nats --tls` with an operator's own authority: with its key, or without it and beside
certificates that were signed elsewhere."""

import asyncio
import shutil

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra import bus, topology
from infra.certificates import CA, CA_KEY, keep_authority
from infra.nats import bundle
from mesh.cli.main import main
from schemas import subjects
from schemas.ids import RegionId
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.until import PATIENCE_S

REGIONS = ("us", "eu")
FILES = [f"{name}/{each}" for name in REGIONS for each in ("nats.pem", "router.pem")]


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text(mesh_toml(REGIONS))
    return path


@pytest.fixture
def authority(tmp_path):
    """The operator's, somewhere else."""
    folder = tmp_path / "operators"
    folder.mkdir()
    keep_authority(folder, "the operator's own")
    return folder


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "rendered"
    folder.mkdir()
    return folder


def render(toml, out, *words: str):
    return CliRunner().invoke(
        main, ["infra", "nats", "--config", str(toml), "--out", str(out), *words]
    )


def contents(folder, names):
    return [(folder / name).read_bytes() for name in names]


def test_an_authority_with_its_key_signs_what_is_rendered(toml, out, authority):
    """Its folder alone says that there is TLS."""
    for name in (CA, CA_KEY):
        shutil.copy(authority / name, out)
    before = contents(out, (CA, CA_KEY))
    assert render(toml, out).exit_code == 0
    assert contents(out, (CA, CA_KEY)) == before == contents(authority, (CA, CA_KEY))
    [own] = x509.load_pem_x509_certificates(before[0])
    for name in FILES:
        x509.load_pem_x509_certificate((out / name).read_bytes()).verify_directly_issued_by(own)
    signed = contents(out, FILES)
    assert render(toml, out).exit_code == 0 and contents(out, FILES) == signed


def test_a_key_that_can_not_sign_for_it_is_told(toml, out, authority, tmp_path):
    shutil.copy(authority / CA, out)
    of_rsa = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "other").mkdir()
    keep_authority(tmp_path / "other", "another")
    of_another = (tmp_path / "other" / CA_KEY).read_bytes()
    for key, told in (
        (of_rsa, "a key of an elliptic curve is needed"),
        (of_another, "is not the key of the certificate in ca.pem"),
        (b"nothing", "no key in PEM"),
    ):
        (out / CA_KEY).write_bytes(key)
        refused = render(toml, out)
        assert (refused.exit_code, told in refused.stderr) == (2, True), refused.output
    (out / CA).unlink()
    refused = render(toml, out, "--tls")
    assert refused.exit_code == 2 and "its ca.pem is missing" in refused.stderr


def test_without_its_key_what_it_signed_is_used_as_it_is(toml, out, authority, tmp_path):
    """Rendering says which is missing, one after the other, and for which names."""
    signed = tmp_path / "signed"
    bundle.write(topology.load(toml), authority, tls=True)
    shutil.copytree(authority, signed)
    shutil.copy(signed / CA, out)
    for name in FILES:
        refused = render(toml, out)
        assert refused.exit_code == 2, refused.output
        key = name.replace(".pem", ".key")
        assert f"{name} and " in refused.stderr and f"{key}: missing" in refused.stderr
        assert "put a certificate for 127.0.0.1" in refused.stderr
        for each in (name, key):
            shutil.copy(signed / each, out / each)
    assert render(toml, out).exit_code == 0
    assert contents(out, FILES) == contents(signed, FILES)
    assert not (out / CA_KEY).exists()


@pytest.fixture
def regions(toml, out, authority):
    """Running, with certificates that the operator's authority signed elsewhere."""
    bundle.write(topology.load(toml), authority, tls=True)
    for name in (CA, *FILES, *(name.replace(".pem", ".key") for name in FILES)):
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copy(authority / name, out / name)
    with running_regions(out, toml=toml.read_text(), tls=True) as running:
        yield running


async def test_clients_and_links_take_what_it_signed(regions, authority):
    assert regions.address("us", "router").ca == keep_authority(authority, "test").base64
    got = []
    receiver, sender = [await regions.connect(name, "router") for name in ("eu", "us")]
    digest = subjects.digest(RegionId("us"))
    await receiver.listen(digest, lambda msg: got.append(msg.data))
    await receiver.flush()
    async with asyncio.timeout(PATIENCE_S):
        while not got:  # interest crosses after the subscription
            await sender.publish(digest, b"1")
            await asyncio.sleep(0.05)
    for client in (receiver, sender):
        await bus.close(client)
