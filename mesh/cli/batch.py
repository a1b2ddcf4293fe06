"""`mesh batch`: hand in batch jobs, follow them, fetch their output; at any OpenAI endpoint."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from operator import methodcaller
from pathlib import Path

import click
import orjson

from mesh.batch_client.download import download
from mesh.batch_client.endpoint import FILES_LISTED_MAX, Endpoint
from mesh.batch_client.input_file import check
from mesh.batch_client.job_answers import JobAnswer
from mesh.batch_client.job_end import estimate, pace_of_whole
from mesh.batch_client.watch import watch
from mesh.cli import batch_view as view
from mesh.cli.batch_endpoint import ENDPOINT_OPTIONS, run_at
from mesh.cli.modelled import with_options
from mesh.cli.unusable import Unusable
from schemas.batch import (
    ENDPOINTS,
    METADATA_CHARS_MAX,
    METADATA_KEY_CHARS_MAX,
    METADATA_MAX,
    JobStatus,
    window_s,
)
from schemas.http import CHAT

EXIT_NOT_COMPLETED = 1
EXIT_UNDER_WAY = 3
EXIT_INTERRUPTED = 130
LISTED, LISTED_MAX, FILES_LISTED = 20, 1000, 100


@click.group()
def command() -> None:
    """Batch jobs: many requests in a file, answered when there is room.

    They work over HTTP, at a mesh or any other endpoint with OpenAI's Files and Batch API.
    """


def _metadata(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for each in values:
        key, equals, text = each.partition("=")
        if not equals or not 0 < len(key) <= METADATA_KEY_CHARS_MAX or key in found:
            raise click.BadParameter(
                f"{each!r:.80} is not KEY=TEXT with a new KEY of 1 to {METADATA_KEY_CHARS_MAX} "
                "characters"
            )
        if len(text) > METADATA_CHARS_MAX:
            raise click.BadParameter(f"{key}'s text has more than {METADATA_CHARS_MAX} characters")
        found[key] = text
    if len(found) > METADATA_MAX:
        raise click.BadParameter(f"more than {METADATA_MAX} of them")
    return found


def _window(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        window_s(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


def _positive(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise click.BadParameter("must be a number of seconds above 0")
    return value


TIMEOUT_OPTION = click.option(
    "--timeout",
    "timeout_s",
    type=float,
    callback=_positive,
    metavar="SECONDS",
    help="How long to wait at most; the job goes on.",
)


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--endpoint-path",
    type=click.Choice(sorted(ENDPOINTS)),
    default=CHAT,
    help="What every line of the file asks for.",
)
@click.option(
    "--window",
    default="24h",
    callback=_window,
    help="How long the job may take, like 30m, 24h or 7d; lines not answered by then get an error.",
)
@click.option(
    "--metadata",
    multiple=True,
    callback=_metadata,
    metavar="KEY=TEXT",
    help="Kept with the job. Repeat it for more.",
)
@click.option(
    "--check/--no-check", "checks", default=True, help="Check the file before it is sent."
)
@click.option("--wait", "waits", is_flag=True, help="Then wait for the end, as `mesh batch wait`.")
@TIMEOUT_OPTION
@with_options(ENDPOINT_OPTIONS)
def submit(
    file: Path,
    endpoint_path: str,
    window: str,
    metadata: Mapping[str, str],
    checks: bool,
    waits: bool,
    timeout_s: float | None,
    endpoint: str,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Upload FILE (JSON lines) and make a job of it; prints the job's id.

    Only the id, or with --json the job, is written to stdout.
    """
    if timeout_s is not None and not waits:
        raise click.UsageError("--timeout is of --wait")
    if checks:
        _check(file, endpoint_path)

    async def run(api: Endpoint) -> JobAnswer:
        size = file.stat().st_size
        with view.BytesProgress("uploading", size, view.console(stderr=True)) as bar:
            uploaded = await api.upload(file, bar.show)
        return await api.create_job(uploaded.id, endpoint_path, window, metadata)

    job = run_at(endpoint, api_key, run)
    if not (as_json and waits):
        click.echo(_json(job) if as_json else job.id)
    if waits:
        _wait(job.id, endpoint, api_key, timeout_s, as_json)


@command.command()
@click.argument("job_id", metavar="ID")
@with_options(ENDPOINT_OPTIONS)
def status(job_id: str, endpoint: str, api_key: str | None, as_json: bool) -> None:
    """Show a job: its lines, its pace, when it will end, what is wrong."""
    job = run_at(endpoint, api_key, lambda api: api.job(job_id), job_id)
    if as_json:
        click.echo(_json(job))
        return
    now_at = time.time()
    screen = view.console()
    # One look does not say when the last line was answered; a mesh's own estimate knows it.
    pace = pace_of_whole(job, now_at)
    expected = estimate(job, pace, now_at, answers_lately=job.mesh is None)
    screen.print(view.job_table(job, expected, now_at))
    view.print_errors(job, screen)


@command.command()
@click.argument("job_id", metavar="ID")
@TIMEOUT_OPTION
@with_options(ENDPOINT_OPTIONS)
def wait(
    job_id: str, timeout_s: float | None, endpoint: str, api_key: str | None, as_json: bool
) -> None:
    """Wait for a job's end, through losses of the connection; Ctrl-C leaves the job alone.

    Exit code 0: completed; 1: failed, expired or cancelled; 2: there is no such job, or no such
    endpoint; 3: not over after --timeout; 130: Ctrl-C.
    """
    _wait(job_id, endpoint, api_key, timeout_s, as_json)


@command.command()
@click.argument("job_id", metavar="ID")
@with_options(ENDPOINT_OPTIONS)
def cancel(job_id: str, endpoint: str, api_key: str | None, as_json: bool) -> None:
    """Cancel a job; lines that are answered by then stay in its output."""
    job = run_at(endpoint, api_key, lambda api: api.cancel(job_id), job_id)
    click.echo(_json(job) if as_json else f"{job.id} is {job.status}")


@command.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1, LISTED_MAX),
    default=LISTED,
    help="The newest so many jobs.",
)
@with_options(ENDPOINT_OPTIONS)
def list_jobs(limit: int, endpoint: str, api_key: str | None, as_json: bool) -> None:
    """List jobs, the newest first."""
    jobs = run_at(endpoint, api_key, lambda api: api.jobs(limit))
    if as_json:
        click.echo(orjson.dumps(jobs))
    elif jobs:
        view.console().print(view.jobs_table(jobs, time.time()))
    else:
        click.echo(f"no jobs at {endpoint}")


@command.command()
@click.argument("job_id", metavar="ID")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the answers.  [default: ID.jsonl]",
)
@click.option(
    "--errors-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the lines with an error.  [default: as --out, with .errors in its name]",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@with_options(ENDPOINT_OPTIONS)
def output(
    job_id: str,
    out: Path | None,
    errors_out: Path | None,
    force: bool,
    endpoint: str,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Download a job's output file and error file.

    A download that was cut off goes on where it ended, also when the command is run again.
    """
    answers = out or Path(f"{Path(job_id).name}.jsonl")
    failures = errors_out or answers.with_name(f"{answers.stem}.errors{answers.suffix}")

    async def run(api: Endpoint) -> dict[str, dict[str, object]]:
        job = await api.job(job_id)
        wanted = {
            name: (file_id, path)
            for name, file_id, path in (
                ("output", job.output_file_id, answers),
                ("errors", job.error_file_id, failures),
            )
            if file_id is not None
        }
        if not wanted:
            raise click.ClickException(_no_output(job))
        taken = [str(path) for _, path in wanted.values() if path.exists() and not force]
        if taken:
            raise Unusable(f"{', '.join(taken)} exists: choose another name, or give --force")
        done: dict[str, dict[str, object]] = {}
        for name, (file_id, path) in wanted.items():
            with view.BytesProgress(str(path), None, view.console(stderr=True)) as bar:
                size = await download(api, file_id, path, bar.show)
            done[name] = {"file_id": file_id, "path": str(path), "bytes": size}
        return done

    done = run_at(endpoint, api_key, run, job_id)
    if as_json:
        click.echo(orjson.dumps(done))
        return
    for name, each in done.items():
        click.echo(f"{name}: {each['path']}, {each['bytes']} bytes")


@command.command("files")
@click.option(
    "--limit",
    type=click.IntRange(1, FILES_LISTED_MAX),
    default=FILES_LISTED,
    help="The newest so many files.",
)
@with_options(ENDPOINT_OPTIONS)
def list_files(limit: int, endpoint: str, api_key: str | None, as_json: bool) -> None:
    """List uploaded files and outputs of jobs, the newest first."""
    files, has_more = run_at(endpoint, api_key, lambda api: api.files(limit))
    if as_json:
        click.echo(orjson.dumps(files))
    elif files:
        view.console().print(view.files_table(files, time.time()))
    else:
        click.echo(f"no files at {endpoint}")
    if has_more:
        click.echo(f"there are more: --limit {FILES_LISTED_MAX}", err=True)


@command.command()
@click.argument("file_ids", metavar="FILE...", nargs=-1, required=True)
@with_options(ENDPOINT_OPTIONS)
def delete(file_ids: Sequence[str], endpoint: str, api_key: str | None, as_json: bool) -> None:
    """Delete files by their ids; ends at the first that can't be deleted.

    A job that has read its input file goes on; one whose file is not checked yet fails.
    """
    for file_id in file_ids:
        run_at(endpoint, api_key, methodcaller("delete_file", file_id), file_id=file_id)
        deletion = orjson.dumps({"id": file_id, "deleted": True}).decode()
        click.echo(deletion if as_json else f"{file_id} is deleted")


def _no_output(job: JobAnswer) -> str:
    if not job.is_over:
        return f"{job.id} is {job.status}: it has no output yet; `mesh batch wait {job.id}`"
    why = f": {job.listed_errors[0]}" if job.listed_errors else ""
    return f"{job.id} {job.status} without output{why}"


def _check(file: Path, endpoint_path: str) -> None:
    try:
        findings = check(file, endpoint_path)
    except OSError as error:
        raise Unusable(f"can't read {file}: {error.strerror}") from error
    if findings.errors:
        raise Unusable(view.file_problem(file, findings.errors))


def _wait(
    job_id: str, endpoint: str, api_key: str | None, timeout_s: float | None, as_json: bool
) -> None:
    """Wait, show the progress on stderr, and exit with what became of the job."""
    screen = view.console(stderr=True)

    async def run(api: Endpoint) -> JobAnswer | None:
        try:
            async with asyncio.timeout(timeout_s), aclosing(watch(api, job_id)) as looks:
                with view.JobProgress(screen) as shown:
                    async for look in looks:
                        shown.show(look, time.monotonic(), time.time())
                        job = look.job
            return job
        except TimeoutError:
            return None

    try:
        job = run_at(endpoint, api_key, run, job_id)
    except KeyboardInterrupt:
        click.echo(
            f"\nNot waiting any more. The job goes on: `mesh batch wait {job_id}` follows it, "
            f"`mesh batch cancel {job_id}` ends it.",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)
    if job is None:
        click.echo(f"{job_id} is not over after {timeout_s:g} s; it goes on", err=True)
        sys.exit(EXIT_UNDER_WAY)
    if as_json:
        click.echo(_json(job))
    else:
        click.echo(f"{job.id} {job.status}: {_summary(job)}", err=True)
        view.print_errors(job, screen)
    sys.exit(0 if job.status is JobStatus.COMPLETED else EXIT_NOT_COMPLETED)


def _summary(job: JobAnswer) -> str:
    lines = job.lines
    text = f"{lines.completed} of {lines.total} lines answered, {lines.failed} with an error"
    return f"{text}; `mesh batch output {job.id}`" if job.output_file_id else text


def _json(job: JobAnswer) -> str:
    return orjson.dumps(job).decode()
