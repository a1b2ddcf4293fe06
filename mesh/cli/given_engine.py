"""`--engine` of `mesh up`: a server that runs already, and what its agent is to know of it."""

from collections.abc import Sequence
from dataclasses import replace

import click

from agents.config import (
    BATCH_MAX_MOST,
    checked_engine_url,
    checked_metrics_url,
    checked_models,
)
from mesh.demo.options import GivenEngine

FORM = "REGION=URL[,METRICS_URL][,batch-max=N][,model=NAME]…"
METRICS, BATCH_MAX, MODEL = "metrics", "batch-max", "model"
NAMES = (METRICS, BATCH_MAX, MODEL)


def given_engine(text: str) -> GivenEngine:
    """Read one. Raises BadParameter that says what to write."""
    region, _, rest = text.partition("=")
    url, *more = rest.split(",")
    said: dict[str, list[str]] = {name: [] for name in NAMES}
    for number, item in enumerate(more):
        name, equals, value = item.partition("=")
        if equals and name in NAMES:
            said[name].append(value)
        elif number == 0 and (not equals or "://" in name):
            said[METRICS].append(item)
        else:
            raise click.BadParameter(f"{text!r}: {item!r} is not one of {', '.join(NAMES)}")
    if any(len(said[name]) > 1 for name in (METRICS, BATCH_MAX)):
        raise click.BadParameter(f"{text!r}: {METRICS} and {BATCH_MAX} may be given once each")
    for given in (url, *said[METRICS]):
        if not given:
            raise click.BadParameter(f"{text!r}: write {FORM}")
        if "://" not in given:
            raise click.BadParameter(f"{text!r}: http:// is missing before {given}")
    return _checked(text, GivenEngine(region, url), said)


def _checked(text: str, engine: GivenEngine, said: dict[str, list[str]]) -> GivenEngine:
    try:
        return replace(
            engine,
            url=checked_engine_url(engine.url),
            metrics_url=next(map(checked_metrics_url, said[METRICS]), None),
            batch_max=next(map(_batch_max, said[BATCH_MAX]), None),
            models=checked_models(said[MODEL]),
        )
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from error


def _batch_max(text: str) -> int:
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(BATCH_MAX_MOST))
    if not plain or not 1 <= int(text) <= BATCH_MAX_MOST:
        raise ValueError(f"{BATCH_MAX} must be a number from 1 to {BATCH_MAX_MOST}")
    return int(text)


def given_engines(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> tuple[GivenEngine, ...]:
    """A callback of click."""
    return tuple(given_engine(value) for value in values)
