"""What a router has recorded explains a request too; what is no recording or log is an error."""

import pytest
from click.testing import CliRunner

from mesh.adapters.recorder import RecordTo
from mesh.cli.main import main
from mesh.explain.files import FileUnusable, RecordedRequest, in_log, in_recording
from tests.support.small_mesh import PATIENT, chat, one_replica, post


async def test_a_recorded_request_is_explained(nats_server, tmp_path):
    path = tmp_path / "us.jsonl"
    async with one_replica(nats_server, record=RecordTo(path=path), **PATIENT) as mesh:
        for name in ("mine", "another"):
            status, _, _ = await post(mesh, chat(stream=True), **{"x-request-id": name})
            assert status == 200
    [life] = in_recording(path, "mine")
    assert (life.region, life.router, life.served_by_replica) == ("us", "r1", "us-0")
    assert life.outcome == "ok" and life.started_at is not None
    assert life.arrived_at <= life.started_at <= life.ended_at
    [step] = life.steps
    assert step.decision is not None
    assert [one.name for one in step.decision.candidates] == ["us-0"]
    shown = CliRunner().invoke(main, ["explain", "mine", "--recording", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "placed on us-0" in shown.output
    missing = CliRunner().invoke(main, ["explain", "nobody", "--recording", str(path)])
    assert missing.exit_code == 1
    assert "no request nobody was found" in missing.output and str(path) in missing.output


@pytest.mark.parametrize("before", ["", "Nov 23 20:00:00 host mesh[7]: "])
@pytest.mark.parametrize(
    "line",
    [
        "ts=2023-11-14T22:13:20.250Z router=us/r1 id=r outcome=ok duration_s=0.5",
        '{"ts":"2023-11-14T22:13:20.250Z","router":"us/r1","id":"r","outcome":"ok","duration_s":0.5}',
    ],
)
def test_a_line_is_read_whatever_the_journal_wrote_before_it(tmp_path, before, line):
    path = tmp_path / "journal"
    path.write_text(f"{before}{line}\n")
    [life] = in_log(path, "r")
    assert (life.router, life.outcome) == ("r1", "ok")


def test_a_line_of_a_log_names_both_replicas_of_a_pair(tmp_path):
    path = tmp_path / "log"
    placed = "placement=local region=us replica=us-1 prefill_replica=us-0"
    path.write_text(
        f"ts=2023-11-14T22:13:20.250Z router=us/r1 id=r outcome=ok duration_s=0.5 {placed}\n"
    )
    [life] = in_log(path, "r")
    assert (life.prefill_replica, life.steps[0].decision.prefill) == ("us-0", "us-0")


def test_a_recorded_request_that_went_on_to_a_peer_was_computed_there():
    recorded = RecordedRequest({"request_id": "r"}, 1.0)
    made = {"request": "r", "region": "us", "policy": "mesh", "reason": "because"}
    pair = made | {"placement": "local", "replica": "us-1", "prefill": "us-0"}
    recorded.effect("Decided", {"decision": pair}, 1.0)
    recorded.event("PrefillEnded", {}, 1.5)
    assert (recorded.about["prefill_replica"], recorded.about["prefill_s"]) == ("us-0", 0.5)
    recorded.event("AttemptFailed", {"detail": "lost"}, 2.0)
    recorded.effect("Decided", {"decision": made | {"placement": "peer", "peer": "eu"}}, 2.0)
    assert (recorded.about["prefill_replica"], recorded.about["prefill_s"]) == (None, None)


def test_files_that_are_none(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("ts=1 id=r router=us/r1 duration_s=x\n{}\nid=r\n")
    assert in_log(wrong, "r") == []
    with pytest.raises(FileUnusable, match="wrong"):
        in_recording(wrong, "r")
    with pytest.raises(FileUnusable, match="No such file"):
        in_log(tmp_path / "absent", "r")


@pytest.mark.parametrize(
    "given", [[], ["r", "--slowest", "3"], ["--slowest", "3", "--log", "x"], ["x" * 200]]
)
def test_wrong_use_is_said(given):
    found = CliRunner().invoke(main, ["explain", *given])
    assert found.exit_code == 2 and "Error" in found.output


def test_nobody_to_ask_is_said(tmp_path):
    found = CliRunner().invoke(main, ["explain", "r", "--credentials", str(tmp_path)])
    assert found.exit_code == 2 and "no credentials" in found.output


def test_all_requests_that_had_one_id_are_listed(tmp_path):
    path = tmp_path / "journal"
    line = "ts=2023-11-14T22:13:2{0}.250Z router=us/r1 id=r outcome={1} duration_s=0.5\n"
    path.write_text("".join(line.format(*each) for each in enumerate(("ok", "failed", "shed"))))
    shown = CliRunner().invoke(main, ["explain", "r", "--log", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "2 other requests had this id" in shown.output
    listed = [line for line in shown.output.splitlines() if line.startswith("2023-11-14 22:13:")]
    assert [outcome for line in listed for outcome in ("ok", "failed") if outcome in line] == [
        "ok",
        "failed",
    ]
