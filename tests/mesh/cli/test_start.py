"""What a command loads before it does anything: operators wait for that."""

import subprocess
import sys

import pytest

# Of routers, of `mesh infra`, and of parts of nats-py that no command uses.
NOT_LOADED = {
    *("aiohttp", "cryptography", "infra.nats.region_config", "mesh.adapters.streams"),
    *("mesh.core.policies", "mesh.http", "mesh.runtime.config", "schemas.routes"),
}
READ_MESH_TOML = """
from infra.topology import DEFAULT_FILE
from mesh.runtime.mesh_file import load_mesh
load_mesh(DEFAULT_FILE)
"""


@pytest.mark.parametrize("command", ["drain", "keys", "usage"])
def test_what_takes_keys_and_replicas_out_of_use_loads_no_router(command):
    code = f"import sys, mesh.cli.main, mesh.cli.{command}{READ_MESH_TOML}print(*sys.modules)"
    words = [sys.executable, "-c", code]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert f"mesh.cli.{command}" in loaded
    assert not NOT_LOADED.intersection(loaded)
