"""`mesh batch`: what it prints and where, how it ends, what scripts get."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from mesh.batch_client.job_answers import read_file, read_job
from mesh.batch_client.job_end import Estimate
from mesh.cli import batch_view as view
from mesh.cli.batch import command
from tests.mesh.batch_client.test_input_file import line
from tests.support.batch_endpoint import (
    CREATED_AT,
    FILE,
    JOB,
    BatchEndpoint,
    batch_endpoint,
    job_fields,
)
from tests.support.until import until

NOW_AT = CREATED_AT + 100.0
COUNTS = {"total": 4, "completed": 2, "failed": 1}
COMPLETED = job_fields(
    status="completed", request_counts=COUNTS, output_file_id="file-out", error_file_id="file-err"
)
FAILED = job_fields(
    status="failed", errors={"data": [{"code": "x", "message": "no valid JSON", "line": 7}]}
)


async def mesh_batch(*arguments: str) -> Result:
    """The command in a thread, beside the endpoint that it calls."""
    return await asyncio.to_thread(CliRunner().invoke, command, arguments)


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line(f"{n}") + "\n" for n in range(4)))
    return path


async def test_submit_prints_the_id_alone_and_makes_the_job_that_was_asked_for(input_file):
    async with batch_endpoint() as there:
        ended = await mesh_batch(
            *("submit", str(input_file), "--endpoint", there.url, "--api-key", "key-1"),
            *("--window", "30m", "--metadata", "team=a=b", "--metadata", "night="),
        )
    assert (ended.exit_code, ended.stdout) == (0, f"{JOB}\n")
    assert there.created == [
        {
            "input_file_id": FILE,
            "endpoint": "/v1/chat/completions",
            "completion_window": "30m",
            "metadata": {"team": "a=b", "night": ""},
        }
    ]
    assert there.files[FILE] == input_file.read_bytes()
    assert there.keys == {"Bearer key-1"}


async def test_a_wrong_file_is_not_sent_unless_that_is_asked_for(input_file):
    with input_file.open("a") as file:
        file.write("{broken\n")
    async with batch_endpoint() as there:
        refused = await mesh_batch("submit", str(input_file), "--endpoint", there.url)
        assert there.requests == []
        sent = await mesh_batch("submit", str(input_file), "--endpoint", there.url, "--no-check")
    assert refused.exit_code == 2 and "line 5: The line is no valid JSON" in refused.stderr
    assert "--no-check" in refused.stderr
    assert sent.exit_code == 0 and FILE in there.files


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--window", "25x"), "like 24h"),
        (("--metadata", "night"), "KEY=TEXT"),
        (("--metadata", "a=1", "--metadata", "a=2"), "KEY=TEXT"),
        (("--metadata", "a=" + "x" * 513), "512"),
        (tuple(word for n in range(17) for word in ("--metadata", f"{n}=x")), "16"),
        (("--timeout", "5"), "--wait"),
        (("--wait", "--timeout", "nan"), "above 0"),
        (("--endpoint", "127.0.0.1:8101"), "http://"),
        (("--api-key", "a\nb"), "one line"),
        (("--endpoint-path", "/v1/images"), "/v1/chat/completions"),
    ],
)
async def test_a_wrong_option_is_explained_and_nothing_is_sent(input_file, arguments, said):
    ended = await mesh_batch("submit", str(input_file), *arguments)
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert ended.stdout == ""


async def test_submit_and_wait_end_with_the_job(input_file):
    jobs = [job_fields(status="validating"), COMPLETED]
    async with batch_endpoint(BatchEndpoint(jobs=jobs)) as there:
        ended = await mesh_batch("submit", str(input_file), "--wait", "--endpoint", there.url)
    assert (ended.exit_code, ended.stdout) == (0, f"{JOB}\n")
    assert f"{JOB} completed: 2 of 4 lines answered, 1 with an error" in ended.stderr


@pytest.mark.parametrize(
    ("job", "status", "said"),
    [
        (COMPLETED, 0, f"mesh batch output {JOB}"),
        (FAILED, 1, "line 7: no valid JSON"),
        (job_fields(status="expired"), 1, "expired"),
        (job_fields(status="cancelled"), 1, "cancelled"),
    ],
)
async def test_the_exit_code_of_wait_is_what_became_of_the_job(job, status, said):
    async with batch_endpoint(BatchEndpoint(jobs=[job])) as there:
        ended = await mesh_batch("wait", JOB, "--endpoint", there.url)
        as_json = await mesh_batch("wait", JOB, "--endpoint", there.url, "--json")
    assert ended.exit_code == as_json.exit_code == status
    assert said in ended.stderr and ended.stdout == ""
    assert json.loads(as_json.stdout)["status"] == job["status"]


async def test_wait_ends_at_its_timeout_and_the_job_goes_on():
    async with batch_endpoint(BatchEndpoint(jobs=[job_fields()])) as there:
        ended = await mesh_batch("wait", JOB, "--endpoint", there.url, "--timeout", "0.3")
    assert ended.exit_code == 3
    assert "not over after 0.3 s; it goes on" in ended.stderr
    assert {method for method, _ in there.requests} == {"GET"}


async def test_ctrl_c_ends_the_wait_and_not_the_job(tmp_path):
    printed = tmp_path / "printed"
    async with (
        batch_endpoint(BatchEndpoint(jobs=[job_fields()])) as there,
        waiting(there.url, printed) as process,
    ):
        await until(lambda: b"0 of 4 lines" in printed.read_bytes())
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    assert f"The job goes on: `mesh batch wait {JOB}` follows it" in printed.read_text()
    assert {method for method, _ in there.requests} == {"GET"}


@contextlib.asynccontextmanager
async def waiting(url: str, printed: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`mesh batch wait`, as a shell starts it at a prompt. A shell without one starts what is to
    run in the background with SIGINT ignored, this test too, and children inherit that."""
    with printed.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mesh.cli.main", "batch", "wait", JOB, "--endpoint", url),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_status_shows_the_job_and_json_has_the_same(tmp_path):
    mesh = {"estimated_end_at": time.time() + 90, "late": False, "tokens": 12_345}
    job = job_fields(request_counts=COUNTS, mesh=mesh, metadata={"team": "[red]a"})
    async with batch_endpoint(BatchEndpoint(jobs=[job])) as there:
        shown = await mesh_batch("status", JOB, "--endpoint", there.url)
        as_json = await mesh_batch("status", JOB, "--endpoint", there.url, "--json")
    for text in ("3 of 4", "in_progress", "(the mesh's estimate)", "12,345", "team=[red]a"):
        assert text in shown.stdout
    assert json.loads(as_json.stdout)["mesh"] == mesh


async def test_list_shows_jobs_and_cancel_names_the_new_status():
    jobs = [job_fields(f"batch_{n:032x}") for n in range(30)]
    async with batch_endpoint(BatchEndpoint(listed=jobs)) as there:
        listed = await mesh_batch("list", "--endpoint", there.url)
        as_json = await mesh_batch("list", "--endpoint", there.url, "--json", "--limit", "25")
        cancelled = await mesh_batch("cancel", JOB, "--endpoint", there.url)
        there.listed = []
        none = await mesh_batch("list", "--endpoint", there.url)
    assert listed.stdout.count("batch_") == 20
    assert [job["id"] for job in json.loads(as_json.stdout)] == [job["id"] for job in jobs[:25]]
    assert cancelled.stdout == f"{JOB} is cancelling\n"
    assert none.stdout == f"no jobs at {there.url}\n"


async def test_output_writes_both_files_and_replaces_none_unasked(tmp_path):
    files = {"file-out": b'{"a":1}\n' * 3, "file-err": b'{"b":2}\n'}
    out = tmp_path / "answers.jsonl"
    there = BatchEndpoint(jobs=[COMPLETED], files=files)
    async with batch_endpoint(there):
        command = ("output", JOB, "-o", str(out), "--endpoint", there.url)
        first = await mesh_batch(*command)
        again = await mesh_batch(*command)
        forced = await mesh_batch(*command, "--force", "--json")
    assert first.exit_code == 0, first.output
    assert out.read_bytes() == files["file-out"]
    assert (tmp_path / "answers.errors.jsonl").read_bytes() == files["file-err"]
    assert again.exit_code == 2 and "--force" in again.stderr
    assert json.loads(forced.stdout)["output"] == {
        "file_id": "file-out",
        "path": str(out),
        "bytes": 24,
    }


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (job_fields(), f"no output yet; `mesh batch wait {JOB}`"),
        (FAILED, "failed without output: line 7: no valid JSON"),
    ],
)
async def test_a_job_without_output_says_why(job, said):
    async with batch_endpoint(BatchEndpoint(jobs=[job])) as there:
        ended = await mesh_batch("output", JOB, "--endpoint", there.url)
    assert ended.exit_code == 1
    assert said in ended.stderr


async def test_what_is_not_there_is_named():
    async with batch_endpoint() as there:
        unknown = await mesh_batch("status", "batch_../x", "--endpoint", there.url)
    assert unknown.exit_code == 2 and "mesh batch list" in unknown.stderr
    assert there.requests == [("GET", "/v1/batches/batch_../x")]  # as one segment, decoded here


async def test_files_are_listed_and_deleted():
    files = {f"file-{n}": b"x" * 1024 * 1024 for n in range(3)}
    async with batch_endpoint(BatchEndpoint(files=files)) as there:
        at = ("--endpoint", there.url)
        listed = await mesh_batch("files", *at)
        newest = await mesh_batch("files", "--limit", "2", "--json", *at)
        deleted = await mesh_batch("delete", "file-0", "file-2", *at)
        unknown = await mesh_batch("delete", "file-1", "file-0", *at, "--json")
        none = await mesh_batch("files", *at)
    assert "3 files, 3.0 MiB" in listed.stdout and "1,048,576" in listed.stdout
    assert "in.jsonl" in listed.stdout and listed.stderr == ""
    assert [file["id"] for file in json.loads(newest.stdout)] == ["file-0", "file-1"]
    assert "there are more" in newest.stderr
    assert deleted.stdout == "file-0 is deleted\nfile-2 is deleted\n"
    assert unknown.exit_code == 2 and "mesh batch files" in unknown.stderr
    assert json.loads(unknown.stdout) == {"id": "file-1", "deleted": True}
    assert none.stdout == f"no files at {there.url}\n"


def test_ids_of_files_are_whole_on_a_narrow_terminal(tmp_path):
    file = {"id": FILE, "bytes": 2**33, "filename": "x" * 200, "purpose": "batch_output"}
    fields = {**file, "created_at": CREATED_AT, "expires_at": CREATED_AT + 86_400}
    with (tmp_path / "printed").open("w") as printed:
        files = [read_file(orjson.dumps(fields))]
        Console(file=printed, width=80).print(view.files_table(files, NOW_AT))
    text = (tmp_path / "printed").read_text()
    assert FILE in text and "8192.0 MiB" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("changed", "waited_s", "end", "has_more"),
    [
        ({"status": "validating"}, 29, "not known before its file is checked", False),
        ({"status": "validating"}, 31, "for 31 s now: `mesh doctor`", True),
        ({"status": "finalizing"}, 29, "its output is being written", False),
        ({"status": "finalizing"}, 31, "waits for room in the store", True),
    ],
)
def test_a_step_that_takes_long_is_said_with_what_it_may_wait_for(changed, waited_s, end, has_more):
    fields = job_fields(**changed, finalizing_at=CREATED_AT, mesh={})
    now_at = CREATED_AT + waited_s
    text = view.end_text(read_job(orjson.dumps(fields)), Estimate(None, False, None), now_at)
    assert end in text and ("`" in text) == has_more
    elsewhere = read_job(orjson.dumps({**fields, "mesh": None}))
    assert "`" not in view.end_text(elsewhere, Estimate(None, False, None), now_at)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"status": "failed", "request_counts": None}, "none: the file was refused"),
        ({"status": "validating", "request_counts": None}, "not counted yet"),
        ({"request_counts": COUNTS}, "3 of 4"),
    ],
)
def test_lines_are_counted_or_it_is_said_why_not(changed, text):
    assert view.lines_text(read_job(orjson.dumps(job_fields(**changed)))) == text


async def test_status_promises_no_end_where_the_mesh_knows_none():
    mesh = {"estimated_end_at": None, "late": False, "tokens": 1}
    began_at = int(time.time()) - 3
    job = job_fields(request_counts=COUNTS, mesh=mesh, in_progress_at=began_at)
    stale = {**job, "mesh": {**mesh, "estimated_end_at": time.time() - 1}}
    elsewhere = {**job, "mesh": None}
    async with batch_endpoint(BatchEndpoint(jobs=[job, stale, elsewhere])) as there:
        for said in ("not known yet", "not known yet", "(at the pace seen)"):
            assert said in (await mesh_batch("status", JOB, "--endpoint", there.url)).stdout


def look_at(at: float, **changed: object) -> tuple[str, str]:
    """When the job ends, and whether that is late, by an estimate of the mesh."""
    job = read_job(orjson.dumps(job_fields(**changed)))
    expected = Estimate(at, True, 0.25)
    return view.end_text(job, expected, NOW_AT), view.late_text(job, expected, NOW_AT)


def test_an_end_beyond_the_window_is_called_late():
    assert look_at(NOW_AT + 60)[1] == ""
    [end, late] = look_at(CREATED_AT + 86_400 + 7200)
    assert "in 1 d 2 h (the mesh's estimate)" in end
    assert late.startswith("late by 2 h 0 min: its window ends")
    reported = {"estimated_end_at": None, "late": True}
    assert look_at(NOW_AT + 60, mesh=reported)[1].startswith("late: lines not answered by")
    assert look_at(NOW_AT + 60, mesh=reported, status="completed")[1] == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0.2, "1 s"),
        (59.5, "1 min 0 s"),
        (3599.9, "1 h 0 min"),
        (3601, "1 h 1 min"),
        (86_399, "1 d 0 h"),
        (90_061, "1 d 2 h"),
    ],
)
def test_lengths_of_time_have_two_units(seconds, text):
    assert view.span_text(seconds) == text


@pytest.mark.parametrize(
    ("lines_per_s", "text"),
    [(None, "-"), (12.345, "12.3 lines/s"), (0.5, "30 lines/min"), (0.001, "3.6 lines/h")],
)
def test_paces_are_readable_numbers(lines_per_s, text):
    assert view.pace_text(lines_per_s) == text


def test_times_of_another_day_have_their_day():
    assert view.time_text(None, NOW_AT) == "-"
    assert view.time_text(NOW_AT, NOW_AT) == datetime.fromtimestamp(NOW_AT).strftime("%H:%M:%S")
    assert view.time_text(NOW_AT + 2e5, NOW_AT).startswith("20")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_few_lines_elsewhere(is_terminal, tmp_path):
    with (tmp_path / "printed").open("w") as file:
        screen = Console(file=file, width=160, force_terminal=is_terminal)
        with view.JobProgress(screen) as progress:
            for second in range(25):
                counts = {"total": 100, "completed": second, "failed": 0}
                job = read_job(orjson.dumps(job_fields(request_counts=counts)))
                look = view.Look(job, Estimate(NOW_AT + 60, False, 1.0))
                progress.show(look, second, NOW_AT + second)
    printed = (tmp_path / "printed").read_text()
    assert "24 of 100 lines" in printed if is_terminal else printed.count("\n") == 3
    assert ("\x1b[" in printed) == is_terminal
