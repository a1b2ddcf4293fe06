"""The two versions that the tests of this folder bring together."""

from collections.abc import Iterator

import pytest

from tests.upgrade.fleet import Version, install_last, this_version


@pytest.fixture(scope="session")
def last(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    """The last release, installed in a folder of its own."""
    yield install_last(tmp_path_factory.mktemp("last"))


@pytest.fixture(scope="session")
def new() -> Version:
    """This checkout."""
    return this_version()
