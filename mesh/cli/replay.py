"""`mesh replay`: play a recorded trace against running endpoints, and report the results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console

from mesh.cli.modelled import validated, with_options
from mesh.cli.unusable import Unusable
from mesh.replay.client import EndpointError
from mesh.replay.play import ReplayResult, play, prepare
from mesh.replay.report import RunReport, print_report, table_console, write_report
from mesh.replay.schedule import ASSIGNMENTS
from mesh.replay.settings import ReplaySettings
from mesh.replay.trace_formats import FORMATS

EXIT_ALL_FAILED = 1
EXIT_SIGNAL = 128  # and the signal's number, as shells do


def _option(name: str, help: str, **kwargs: Any) -> Callable[..., Any]:
    """An option named and defaulted after its field in Settings."""
    field = ReplaySettings.model_fields[name.strip("-").replace("-", "_")]
    if not kwargs.get("multiple") and not field.is_required() and field.default is not None:
        kwargs |= {"default": field.default, "show_default": field.default != ""}
    return click.option(name, help=help, **kwargs)


_OPTIONS = (
    _option(
        "--url",
        "An endpoint to play against. Repeat for more regions.",
        metavar="REGION=URL",
        multiple=True,
        required=True,
    ),
    _option("--trace", "The recorded trace.", type=click.Path(path_type=Path), required=True),
    _option("--format", f"How the trace is written: {', '.join(FORMATS)}."),
    _option("--speed", "How many times as fast as recorded."),
    _option("--limit", "Play only this many requests, the first ones.", type=int),
    _option("--out", "Write the results as JSON to this file.", type=click.Path(path_type=Path)),
    _option("--model", "Model to ask for.  [default: the first that /v1/models names]"),
    _option(
        "--assign",
        f"How requests are given to regions: {', '.join(ASSIGNMENTS)}. `hash` keeps a "
        "conversation in one region, `round-robin` splits it.",
    ),
    _option(
        "--weight",
        "A region's share of the requests, where it is not 1.",
        metavar="REGION=NUMBER",
        multiple=True,
    ),
    _option("--scale-lengths", "Shrink prompts and answers by this factor, for small engines."),
    _option("--bytes-per-token", "Prompt text per token, to fit the engines' tokenizer."),
    _option("--salt", "Any word: makes all prompts new to caches that are warm."),
    _option("--seed", "Fixes what chance decides: arrivals inside a coarse timestamp."),
    _option("--timeout-s", "A request that takes longer has failed."),
    _option("--max-in-flight", "Requests due while so many are open count as failed."),
    _option("--api-key", "Sent as a bearer token.", envvar="MESH_REPLAY_API_KEY", show_envvar=True),
)


@click.command()
@with_options(_OPTIONS)
@click.pass_context
def command(
    ctx: click.Context, /, url: Sequence[str], weight: Sequence[str], **rest: object
) -> None:
    """Play a recorded trace against running OpenAI endpoints.

    Requests leave when the trace says, whatever the endpoints do (an open loop). Every request
    ends as ok (a complete answer), shed (429 or 503) or failed (anything else). Times are those
    of complete answers.

    Exit code 0: the trace was played, though single requests may have failed; 1: all of them
    failed, or the results can't be written; 2: bad input, nothing was sent; 130, 143:
    interrupted, the results so far are given.
    """
    settings = validated(
        ReplaySettings,
        {
            **rest,
            "url": _pairs("--url", "REGION=URL", url),
            "weight": _pairs("--weight", "REGION=NUMBER", weight),
        },
    )
    played = _played(settings)
    _show_and_write(played.report, settings.out)
    if played.stopped_by is not None:
        ctx.exit(EXIT_SIGNAL + played.stopped_by)
    if played.report["failed"] == played.report["requests"]:
        ctx.exit(EXIT_ALL_FAILED)


def _pairs(option: str, form: str, values: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for value in values:
        region, is_pair, text = value.partition("=")
        if not is_pair or "://" in region:  # a URL alone may have a = of its own
            raise Unusable(f"{option} {value}: name the region before it, as {form}")
        if region in pairs:
            raise Unusable(f"{option} names region {region} twice")
        pairs[region] = text
    return pairs


def _played(settings: ReplaySettings) -> ReplayResult:
    try:
        job = prepare(settings)
    except ValueError as error:
        raise Unusable(str(error)) from error
    try:
        return uvloop.run(play(job, Console(stderr=True)))
    except EndpointError as error:
        raise Unusable(str(error)) from error


def _show_and_write(report: RunReport, out: Path | None) -> None:
    print_report(report, table_console())
    if out is None:
        return
    try:
        write_report(out, report)
    except OSError as error:
        raise click.ClickException(f"can't write {out}: {error.strerror}") from error
    click.echo(f"wrote {out}")
