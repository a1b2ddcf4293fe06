"""Operators' tools, built from their source by Go; kept in build/tools.

python -m tests.tools.go_tools [NAME...]
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tools"
WITHIN_S = 2400.0  # minutes of computing, more to fetch modules


class GoTool(NamedTuple):
    """One program of a Go module."""

    name: str
    module: str
    version: str
    package: str
    minutes: float  # to build it on two cores, nothing being there

    @property
    def binary(self) -> Path:
        return FOLDER / f"{self.name}-{self.version}" / self.name

    def install(self, **environment: str) -> None:
        """Build it, if it isn't there whole. Ends the program with a message if that fails."""
        if self.binary.exists():
            return
        if shutil.which("go") is None:
            sys.exit(f"the tests build {self.name} with Go: install go 1.25 or newer")
        where = self.binary.parent
        print(f"building {self.name} {self.version}, about {self.minutes:g} minutes", flush=True)
        began = time.monotonic()
        part = where.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        # Inside its module: `go install` refuses one whose go.mod replaces a module.
        found = _go("mod", "download", "-json", f"{self.module}@{self.version}", at=part)
        source = Path(json.loads(found)["Dir"])
        made = ("-buildvcs=false", "-o", str(part / self.name), self.package)
        _go("build", *made, at=source, **environment)
        shutil.rmtree(where, ignore_errors=True)
        part.rename(where)
        print(f"built in {time.monotonic() - began:.0f} s", flush=True)


def _go(*words: str, at: Path, **environment: str) -> str:
    done = subprocess.run(
        ["go", *words],
        cwd=at,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"go {' '.join(words)} failed, see above\n{done.stdout}")
    return done.stdout


NATS = GoTool("nats", "github.com/nats-io/natscli", "v0.5.1", "./nats", 2)
# The last release that is one program with its storage; its web pages are not in the module.
JAEGER = GoTool("jaeger", "github.com/jaegertracing/jaeger", "v1.62.0", "./cmd/all-in-one", 4)

if __name__ == "__main__":
    for tool in (NATS, JAEGER):
        if not sys.argv[1:] or tool.name in sys.argv[1:]:
            tool.install()
