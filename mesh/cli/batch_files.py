"""`mesh batch files` and `mesh batch delete`: what an endpoint keeps, and making room there."""

import time
from collections.abc import Sequence
from operator import methodcaller

import click
import orjson

from mesh.batch_client.endpoint import FILES_LISTED_MAX
from mesh.cli import batch_view as view
from mesh.cli.batch_endpoint import ENDPOINT_OPTIONS, run_at
from mesh.cli.modelled import with_options

LISTED = 100


@click.command("files")
@click.option(
    "--limit",
    type=click.IntRange(1, FILES_LISTED_MAX),
    default=LISTED,
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


@click.command("delete")
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
