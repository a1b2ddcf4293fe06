"""In a process of its own: a limit that was raised can't be put back for other tests."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from infra.process import raise_limit
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"), [(256, 900, "900 900 900"), (300, 300, "300 300 300")]
)
def test_the_soft_limit_becomes_the_hard_one(soft, hard, becomes):
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert found.stdout.strip() == becomes
