"""The command `mesh explain`: what happened to one request, and where its time passed."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from mesh.adapters.ended_requests import NOT_FAILED
from mesh.cli.mesh_options import find_mesh, mesh_options
from mesh.cli.unusable import Unusable
from mesh.explain.files import FileUnusable, in_log, in_recording
from mesh.explain.question import WITHIN_S, RegionAnswers, ask_all
from mesh.explain.story import stories, went_on
from mesh.explain.terminal import clock, printable
from mesh.explain.text import as_json, story_lines, table_lines
from schemas.explain import ID_CHARS_MAX, SLOWEST_MAX, RequestLife, RequestQuestion

EXIT_NOT_FOUND = 1
SLOWEST = 10


@dataclass(slots=True)
class Found:
    """What was found, where it was looked for, and what kept some of it from being found."""

    lives: list[RequestLife] = field(default_factory=list)
    searched: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_answers(self, regions: Sequence[RegionAnswers]) -> None:
        for region in regions:
            for answer in region.answers:
                self.lives += answer.requests
                reach = "" if answer.since is None else f", back to {clock(answer.since)}"
                router = f"{answer.region}/{answer.router}"
                self.searched.append(f"{router}: {answer.kept} requests kept{reach}")
                if answer.left_out:
                    self.problems.append(f"{router}: {answer.left_out} more did not fit")
            if region.problem is not None:
                self.problems.append(f"{region.region} was not asked in full: {region.problem}")


@click.command()
@click.argument("request", required=False)
@click.option(
    "--slowest",
    type=click.IntRange(1, SLOWEST_MAX),
    is_flag=False,
    flag_value=SLOWEST,
    metavar="[N]",
    help=f"Instead of one request: list the N (without a number {SLOWEST}) that failed, whose "
    "stream broke and went on elsewhere, or that waited longest; none that was refused as it came.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Read a router's access log instead of asking. Once for each file.",
)
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Read what a router recorded (`mesh router --record`) instead of asking.",
)
@mesh_options("The directory that `mesh infra nats --out` wrote, or some regions' part of it.")
@click.option(
    "--within-s",
    type=click.FloatRange(0.1, 60),
    default=WITHIN_S,
    help="How long to wait for routers, in seconds.",
)
@click.option("--json", "for_programs", is_flag=True, help="Print JSON.")
def command(
    request: str | None,
    slowest: int | None,
    logs: tuple[Path, ...],
    recordings: tuple[Path, ...],
    config: Path | None,
    credentials: Path,
    within_s: float,
    for_programs: bool,
) -> None:
    """Explain what happened to REQUEST, by its x-request-id or its trace id.

    Asks the routers of every region of which there are observer's credentials; they keep the last
    requests in memory. Prints one timeline of all that had the request, each decision with its
    candidates and the terms of their prices in seconds, and what the wait for the first token
    consisted of. Exit code 0: found; 1: not found; 2: nobody could be asked.
    """
    if (request is None) == (slowest is None):
        raise click.UsageError("give a request's id, or --slowest")
    if slowest is not None and (logs or recordings):
        raise click.UsageError("--slowest asks routers; it reads no files")
    if request is not None and not 0 < len(request) <= ID_CHARS_MAX:
        raise click.UsageError(f"an id has 1 to {ID_CHARS_MAX} characters")
    if request is not None and (logs or recordings):
        found = _read(request, logs, recordings)
    else:
        question = RequestQuestion(request=request, slowest=slowest)
        found = _ask(question, config, credentials, within_s)
    requests = stories(found.lives)
    if for_programs:
        click.echo(as_json(requests, [*found.searched, *found.problems]))
    elif slowest is not None:
        _list(found, slowest)
    else:
        _print(found, request or "")
    if not requests and request is not None:
        sys.exit(EXIT_NOT_FOUND)


def _read(name: str, logs: Sequence[Path], recordings: Sequence[Path]) -> Found:
    found = Found()
    try:
        for path in logs:
            found.lives += in_log(path, name)
        for path in recordings:
            found.lives += in_recording(path, name)
    except FileUnusable as error:
        raise Unusable(str(error)) from error
    found.searched = [str(path) for path in (*logs, *recordings)]
    return found


def _ask(
    question: RequestQuestion, config: Path | None, credentials: Path, within_s: float
) -> Found:
    logging.basicConfig(level=logging.CRITICAL)  # of the connections; what fails is in the answer
    mesh = find_mesh(config, credentials)
    answers = asyncio.run(ask_all(mesh.topology, mesh.logins(), question, within_s))
    found = Found()
    found.add_answers(answers)
    if not any(one.answers for one in answers):
        raise Unusable(f"no router answered: {printable('; '.join(found.problems))}")
    return found


def _list(found: Found, slowest: int) -> None:
    for line in table_lines(_worst(found.lives, slowest)):
        click.echo(line)
    _note_problems(found)


def _worst(lives: Sequence[RequestLife], number: int) -> list[RequestLife]:
    """Failed ones first, then those whose stream broke and went on, then by their wait."""

    def badness(life: RequestLife) -> tuple[bool, bool, float]:
        until = life.started_at or life.ended_at or life.arrived_at
        return life.outcome not in NOT_FAILED, went_on(life), until - life.arrived_at

    return sorted(lives, key=badness, reverse=True)[:number]


def _print(found: Found, name: str) -> None:
    requests = stories(found.lives)
    if not requests:
        click.echo(f"no request {printable(name)} was found. Searched:")
        for line in (*found.searched, *found.problems):
            click.echo(f"  {printable(line)}")
        click.echo("Older requests are in the routers' access logs: --log FILE.")
        return
    for line in story_lines(requests[-1]):
        click.echo(line)
    if len(requests) > 1:
        click.echo(f"\n{len(requests) - 1} other requests had this id (all of each: --json):")
        others = (life for story in requests[:-1] for life in story.lives[:1])
        for line in table_lines(list(others)):
            click.echo(line)
    _note_problems(found)


def _note_problems(found: Found) -> None:
    for line in found.problems:
        click.echo(printable(line), err=True)
