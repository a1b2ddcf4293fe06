"""Builds Ollama from its Go module.

Modules leave out folders named `vendor`, and with it three headers that llama.cpp, of which Ollama
has a copy, includes from there. A Python package with llama.cpp's sources has them.
"""

import shutil
import subprocess
import sys
import tarfile

from tests.tools.go_tools import FOLDER, GoTool

OLLAMA = GoTool("ollama", "github.com/ollama/ollama", "v0.17.4", ".", 12)
SOURCES = "llama-cpp-python==0.3.36"
HEADERS = FOLDER / "llama.cpp-headers"
VENDOR = "/vendor/llama.cpp/vendor/"
WANTED = ("miniaudio/", "nlohmann/", "stb/")
WITHIN_S = 600.0


def install() -> None:
    """Build it, if it isn't there whole. Ends the program with a message if that fails."""
    if OLLAMA.binary.exists():
        return
    _headers()
    OLLAMA.install(CPATH=str(HEADERS))


def _headers() -> None:
    shutil.rmtree(HEADERS, ignore_errors=True)
    HEADERS.mkdir(parents=True)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(HEADERS))
    source = ("--no-binary", SOURCES.partition("==")[0], SOURCES)
    done = subprocess.run((*pip, *source), timeout=WITHIN_S, check=False)
    if done.returncode != 0:
        sys.exit(f"can't fetch the sources of {SOURCES}, see above")
    [archive] = HEADERS.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition(VENDOR)
            file = tar.extractfile(member) if path.startswith(WANTED) else None
            if file is not None:
                target = HEADERS / path
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(file.read())
    archive.unlink()
