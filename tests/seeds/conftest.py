import gc

import pytest


@pytest.fixture(autouse=True, scope="package")
def frozen():
    """What was there before is no garbage of a world: each collects its own at its end."""
    gc.freeze()
    yield
    gc.unfreeze()
