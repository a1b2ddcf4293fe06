"""The options and failures of the commands that speak with an endpoint of files and batches."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

from agents.config import KEY_CHARS_MAX
from infra.credentials_file import credentials_option
from mesh.batch_client.endpoint import Endpoint, EndpointError, NotConnected, Refused
from mesh.cli.unusable import Unusable

DEMO_ENDPOINT = "http://127.0.0.1:8101/v1"
NOT_FOUND = 404

T = TypeVar("T")

ENDPOINT_OPTIONS = (
    credentials_option(),
    click.option(
        "--endpoint",
        envvar="MESH_ENDPOINT",
        default=DEMO_ENDPOINT,
        help="The OpenAI API of the job's region.  [env MESH_ENDPOINT]",
    ),
    click.option(
        "--api-key",
        envvar="MESH_API_KEY",
        help="Sent as a bearer token. Best in env MESH_API_KEY or a --credentials file.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, for scripts."),
)


def run_at(
    url: str,
    api_key: str | None,
    work: Callable[[Endpoint], Coroutine[Any, Any, T]],
    job_id: str | None = None,
    file_id: str | None = None,
) -> T:
    """Do the work with an endpoint; its failures end the command with one line."""
    if "://" not in url:
        raise Unusable(f"--endpoint: write http:// or https:// before {url!r:.80}")
    if api_key is not None and not (
        0 < len(api_key) <= KEY_CHARS_MAX and api_key.isascii() and api_key.isprintable()
    ):
        raise Unusable("the API key must be one line of printable ASCII characters")

    async def run() -> T:
        async with Endpoint(url, api_key) as api:
            return await work(api)

    try:
        return asyncio.run(run())
    except NotConnected as error:
        raise Unusable(f"{error}: is it running? --endpoint names another") from error
    except Refused as error:
        if error.status == NOT_FOUND and job_id is not None:
            raise Unusable(f"{error}; `mesh batch list` shows the jobs of {url}") from error
        if error.status == NOT_FOUND and file_id is not None:
            raise Unusable(f"{error}; `mesh batch files` shows the files of {url}") from error
        raise click.ClickException(str(error)) from error
    except EndpointError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
