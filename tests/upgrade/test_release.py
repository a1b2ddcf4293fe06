"""The wheel of the last release is what was released. CONTRIBUTING says how it is renewed."""

import hashlib
import tomllib

from tests.support.pages import ROOT
from tests.upgrade.fleet import WHEEL

SHA256 = "cc92dea25752be0383cef5959d95797a4be4ff41abd76935199d4446b5dce3ce"
BYTES_MAX = 2 * 1024 * 1024  # every clone has it


def test_the_wheel_is_the_one_that_was_released():
    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() == SHA256
    assert WHEEL.stat().st_size < BYTES_MAX


def test_it_is_of_the_version_before():
    now = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    major, minor, _ = map(int, now.split("."))
    assert WHEEL.name.startswith(f"inference_mesh-{major}.{minor - 1}.")
