"""The file of a study: every field of a replay's, and the twin's own."""

from pathlib import Path

import orjson

from mesh.replay.report import write_report
from mesh.sim.study.results import out_file
from tests.mesh.sim.study.small import settings, study

REPLAYED = {
    *("requests", "ok", "shed", "failed", "ttft_s", "e2e_s", "itl_s", "output_tokens_per_s"),
    *("cached_token_ratio", "failures", "late_s", "prompt_tokens", "output_tokens", "regions"),
    "duration_s",
}
TWIN = {
    *("decisions", "decisions_per_s", "gpu_busy_s", "batch_occupancy", "forwarded", "digest"),
    "trie_bytes_per_s",
    *("policy", "topology", "pushing", "load", "speed", "seed", "replicas", "profiles", "workload"),
}


def test_the_file_holds_every_run(tmp_path: Path) -> None:
    given = settings(policy="round-robin,least-load")
    reports = {name: played.report for name, played in study(given).items()}
    write_report(tmp_path / "out.json", out_file(given, reports))
    found = orjson.loads((tmp_path / "out.json").read_bytes())
    assert list(found["policies"]) == ["round-robin", "least-load"]
    for report in found["policies"].values():
        assert report.keys() == REPLAYED | TWIN
        assert report["ok"] + report["shed"] + report["failed"] == report["requests"] == 12
        assert report["profiles"] == {name: {"l4-llama3.1-8b": 1} for name in ("us", "eu")}
    assert found["study"]["limit"] == 12
    assert not {"out", "jobs"} & found["study"].keys()
