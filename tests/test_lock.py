"""requirements.lock holds what pyproject.toml asks for, each with its hashes, and no address."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINNED = re.compile(r"(?m)^([a-z0-9-]+)==(\S+)[^\n]*\\$")
HASH = re.compile(r"(?m)^    --hash=sha256:[0-9a-f]{64}( \\)?$")


def test_every_dependency_is_locked_at_a_version_that_it_may_have():
    lock = dict(PINNED.findall((ROOT / "requirements.lock").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    locked = {one: lock.get(canonicalize_name(one.name), "0") for one in wanted}
    unmet = [str(one) for one, version in locked.items() if not one.specifier.contains(version)]
    assert not unmet, "make lock"


def test_each_line_is_a_pin_or_a_hash():
    text = (ROOT / "requirements.lock").read_text()
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == len(PINNED.findall(text)) + len(HASH.findall(text))
    for pin in re.split(r"\n(?=[a-z])", text):
        assert HASH.search(pin), pin
    assert "://" not in text
