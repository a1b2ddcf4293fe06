"""One seed, one digest: in this process, in others, under any hash seed."""

import functools
import subprocess
import sys
from pathlib import Path

from mesh.sim.world import run
from tests.mesh.sim.build import AP, EU, US, config, steady
from tests.support.until import PATIENCE_S

ROOT = Path(__file__).parents[3]
SCRIPT = "from tests.mesh.sim.test_same_seed import digest; print(digest(7))"


@functools.cache
def digest(seed):
    result = run(
        steady(150, 0.03, US, US, EU, AP),
        config({US: 1, EU: 2, AP: 1}, seed=seed, jitter_s=0.005, loss=0.1, token_error=0.1),
    )
    return result["digest"]


def test_the_same_seed_gives_the_same_digest_under_any_hash_seed():
    """This process has another one."""
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "4711", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert told.stdout.strip() == digest(7)


def test_another_seed_gives_another_digest():
    assert digest(7) != digest(8)
