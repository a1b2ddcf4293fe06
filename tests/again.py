"""Runs the few tests that failed among all others once more, alone.

    python -m tests.again STATUS [OPTIONS]

STATUS is pytest's, OPTIONS are for it. Thousands of tests start processes, and whoever else works
on the machine may stop one of those for longer than anything waits. What fails alone too has
failed; what passes alone was printed, and is a fault of the test or the product that is to be
mended. More than FEW are no accident.
"""

import json
import sys

import pytest

from tests.support.pages import ROOT

FEW = 3
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"


def main(status: int, *options: str) -> int:
    """The status of the second run, or the first one's if there is none."""
    failed = list(json.loads(LAST_FAILED.read_bytes())) if LAST_FAILED.exists() else []
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= FEW:
        return status
    print(f"{len(failed)} failed among all others, and run once more, alone:", *failed, sep="\n  ")
    sys.stdout.flush()
    return int(pytest.main([*options, *failed]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
