"""The `nats` command, built from its source by Go; kept in build/tools.

python -m tests.tools.natscli
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = "github.com/nats-io/natscli/nats"
VERSION = "v0.5.1"
BINARY = ROOT / "build" / "tools" / f"nats-{VERSION}" / "nats"
WITHIN_S = 1500.0  # two minutes of computing, more to fetch its modules


def install() -> None:
    """Build it, if it isn't there whole. Ends the program with a message if that fails."""
    if BINARY.exists():
        return
    if shutil.which("go") is None:
        sys.exit("make test-tools builds the `nats` command with Go: install go 1.25 or newer")
    print(f"building {MODULE} {VERSION} into {BINARY.parent}, which takes minutes", flush=True)
    began = time.monotonic()
    part = BINARY.parent.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    built = subprocess.run(
        ["go", "install", f"{MODULE}@{VERSION}"],
        cwd=part,
        env={**os.environ, "GOBIN": str(part)},
        timeout=WITHIN_S,
        check=False,
    )
    if built.returncode != 0:
        sys.exit(f"go install {MODULE}@{VERSION} failed, see above")
    shutil.rmtree(BINARY.parent, ignore_errors=True)
    part.rename(BINARY.parent)
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    install()
