"""A request's line in the access log and what is kept of it cost little, in bytecodes."""

import json

from mesh.adapters import access_log, ended_requests
from tests.gate import bytecodes

SHARE_MAX = 0.03  # of what the request costs without them
SHARE_ELSEWHERE_MAX = 0.04  # under another minor version than that of the figures
FILES = (access_log.__file__, ended_requests.__file__)


async def test_a_line_and_a_kept_request_cost_little(nats_server):
    ours = await bytecodes.count_edge(nats_server.url, FILES)
    kept = json.loads(bytecodes.FIGURES.read_text())
    whole = kept["figures"]
    most = SHARE_MAX if kept["python"] == bytecodes.python_version() else SHARE_ELSEWHERE_MAX
    for act in ("a plain request", f"a stream of {bytecodes.CHUNKS} chunks"):
        assert 100 < ours[act] < most * (whole[act] - ours[act]), (act, ours, whole)
    assert ours["a heartbeat"] == 0
