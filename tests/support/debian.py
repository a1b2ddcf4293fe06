"""What tests take from Debian's archive by mmdebstrap, once each; kept in build/.

No image is pulled: tests that need one make it of these packages. Python packages are fetched by
this machine, with its own settings of pip, so that what is built of them needs no index.
"""

import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = ROOT / "build" / "debian-12.tar"
WHEELS = ROOT / "build" / "debian-12-wheels"
COMPOSE = ROOT / "build" / "tools" / "docker-compose-debian-13" / "docker-compose"
PROXIES = ROOT / "build" / "tools" / "debian-12-proxies"
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "curl", "procps")
PYTHON = "3.11"  # Debian 12's
INSTALLS_FROM_WHEELS = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def command(*words: str | Path, **more: object) -> None:
    """Run it; fails with what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


def need(tools: Mapping[str, str]) -> None:
    """Fail unless these commands are there; the values are packages that have them."""
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    assert not missing, f"apt-get install {' '.join(missing)}"


def make_base() -> None:
    """A minimal Debian 12 with PACKAGES, as BASE."""
    if BASE.exists():
        return
    need({"mmdebstrap": "mmdebstrap"})
    BASE.parent.mkdir(exist_ok=True)
    part = BASE.with_suffix(".part.tar")
    included = f"--include={','.join(PACKAGES)}"
    command("mmdebstrap", "--quiet", "--variant=minbase", included, "bookworm", part)
    part.rename(BASE)


def make_wheels() -> None:
    """All that installing this checkout on BASE needs, as WHEELS."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    pip = (ROOT / ".venv" / "bin" / "python", "-m", "pip", "download", "--quiet")
    only = ("--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp")
    command(*pip, *only, "--dest", WHEELS, *needed)


def make_compose() -> None:
    """Compose v2 (2.26.1), as COMPOSE: Debian 13's, because Debian 12 has v1 only, which does not
    know `name:`. Building it from its Go modules takes ten minutes."""
    if COMPOSE.exists():
        return
    need({"mmdebstrap": "mmdebstrap"})
    folder = COMPOSE.parent.with_suffix(".part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    package = "--include=docker-compose"
    command("mmdebstrap", "--quiet", "--variant=extract", package, "trixie", folder)
    COMPOSE.parent.mkdir(exist_ok=True)
    (folder / "usr/libexec/docker/cli-plugins/docker-compose").rename(COMPOSE)
    shutil.rmtree(folder)


def make_proxies() -> None:
    """nginx 1.22 and HAProxy 2.6 with the libraries that they need, as PROXIES."""
    if PROXIES.exists():
        return
    need({"mmdebstrap": "mmdebstrap"})
    part = PROXIES.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    packages = "--include=nginx,haproxy"
    command("mmdebstrap", "--quiet", "--variant=extract", packages, "bookworm", part)
    part.rename(PROXIES)


def make_all(*makers: Callable[[], None]) -> None:
    """Several of these at once: most of their time is the archive's."""
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(maker) for maker in makers]:
            made.result()
