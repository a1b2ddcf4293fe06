"""`mesh-agent probe URL`: what an agent learns from an engine, and how to install the agent."""

import asyncio
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson

from agents.adapters.engine_kinds import KINDS
from agents.adapters.engine_probe import METRICS_BY, PLAIN, EngineFacts, NoEngine, Trial, examined
from agents.config import checked_engine_url, checked_metrics_url, checked_models
from agents.engine_options import read_engine_key
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS
from schemas.ids import ModelId

# Of each signal: what it is, and what the mesh does without it.
SIGNALS = {
    "waiting": ("requests in its queue", "they are guessed from those without a first byte"),
    "running": ("requests in its batch", "those that the agent sent count"),
    "batch_max": ("most requests in its batch", "give --batch-max"),
    "kv_used_ratio": ("KV cache in use", "no request is kept from a full cache"),
    "kv_capacity_tokens": ("KV cache in tokens", "what prompts need is compared with nothing"),
    "prefix_hit_ratio": ("share of prompt tokens cached", "the agent counts it from answers"),
    "is_asleep": ("whether it was put to sleep", "one that sleeps is given work"),
    "progress": ("counters of computed tokens", "an engine that hangs is found by probes alone"),
}
MODELS_SHOWN = 8
REQUESTS = {CHAT: "a chat", COMPLETIONS: "a completion", EMBEDDINGS: "an embedding"}


def _model(name: str) -> ModelId:
    try:
        return checked_models([name])[0]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("probe")
@click.argument("url", metavar="URL")
@click.option("--metrics-url", default="", help="Its metrics page.", show_default="URL/metrics")
@click.option(
    "--engine-key-file",
    envvar="MESH_ENGINE_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the engine's API key; or set MESH_ENGINE_KEY. [MESH_ENGINE_KEY_FILE]",
)
@click.option(
    "--model",
    metavar="NAME",
    callback=lambda ctx, param, value: value if value is None else _model(value),
    help="Try this one, though the engine may have to load it, or lists none.",
    show_default="one that is loaded",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def command(
    ctx: click.Context,
    url: str,
    metrics_url: str,
    engine_key_file: Path | None,
    model: ModelId | None,
    as_json: bool,
) -> None:
    """Examine the engine at URL: its kind, version, models, limits, routes and signals, whether it
    answers a chat, and the lines with which its agent is installed. It is sent one tiny request for
    each optional route, and one chat; one that loads models on demand, the first for each model
    that it has loaded. Ends with 1 where it answers nobody."""
    key = read_engine_key(engine_key_file)
    try:
        engine = checked_engine_url(url)
        page = checked_metrics_url(metrics_url) if metrics_url else f"{engine}/metrics"
        secret = None if key is None else key.get_secret_value()
        facts = asyncio.run(examined(engine, page, secret, model))
    except ValueError as error:
        raise click.UsageError(f"URL: {error}") from error
    except NoEngine as error:
        raise click.ClickException(str(error)) from error
    lines = [] if facts.serves_nobody else _environment(facts, engine, metrics_url)
    if as_json:
        click.echo(orjson.dumps(_as_object(facts, lines), option=orjson.OPT_INDENT_2))
    else:
        click.echo("\n".join(_as_text(facts, engine, lines)))
    ctx.exit(int(facts.serves_nobody))


def _environment(facts: EngineFacts, url: str, metrics_url: str) -> list[str]:
    """Of the agent's file in /etc/mesh/agents."""
    lines = [f"ENGINE_KIND={facts.kind}", f"ENGINE_URL={url}"]
    lines += [f"METRICS_URL={metrics_url}"] if metrics_url else []
    return lines if facts.is_listed else [*lines, f"MESH_ENGINE_MODELS={facts.models[0]}"]


def _advice(facts: EngineFacts) -> Iterator[str]:
    """What the operator can do so that the mesh learns more."""
    if facts.kind == PLAIN and facts.seen_kind != PLAIN:
        yield (
            f"it looks like {facts.seen_kind} without metrics: start it with "
            f"{METRICS_BY[facts.seen_kind]} and examine it again, or give --metrics-url"
        )
    if facts.reading.batch_max is None:
        option = "vLLM's --max-num-seqs" if facts.kind == "vllm" else "the size of its batch"
        yield f"add MESH_BATCH_MAX=N, {option}"
    if not facts.shown["progress"] and facts.kind != PLAIN:
        yield "some series appear with the first request: examine it again after one"
    if facts.unfinished:
        yield (
            "not found out which routes these models have, as they answered late or may be loaded "
            f"no more: {', '.join(facts.unfinished)}"
        )


def _as_object(facts: EngineFacts, environment: list[str]) -> dict[str, Any]:
    found = asdict(facts)
    return {
        **found,
        "cards": {model: asdict(card) for model, card in facts.cards.items()},
        "outstanding_max": KINDS[facts.kind].outstanding_max,
        "signals": facts.shown,
        "advice": list(_advice(facts)),
        "environment": environment,
    }


def _if_loaded(facts: EngineFacts, model: ModelId) -> str:
    if facts.loaded is None:
        return ""
    return ", loaded" if facts.loaded.get(model) else ", not loaded"


def _tried(trial: Trial | None) -> str:
    if trial is None:
        return "not sent a chat, as it might load a model for it: --model NAME tries one"
    failed = f"{REQUESTS.get(trial.path, trial.path)}: {trial.problem}"
    if trial.answered is not None:
        but = f", but not {failed}" if trial.problem else ""
        return f"{trial.model} answers {REQUESTS.get(trial.answered, trial.answered)}{but}"
    if trial.is_full:
        return f"{trial.model} takes no more at present, {failed}"
    return f"{trial.model} fails {failed}; it serves nobody: read its log"


def _as_text(facts: EngineFacts, url: str, environment: list[str]) -> Iterator[str]:
    what = facts.seen_kind if facts.seen_kind != PLAIN else "an OpenAI-compatible server"
    yield f"{url}: {what}, version {facts.version or 'not shown'}"
    yield _tried(facts.trial)
    yield ""
    yield f"models ({len(facts.models)}):"
    for model in facts.models[:MODELS_SHOWN]:
        card = facts.cards.get(model)
        limit = None if card is None else card.max_model_len
        of_context = f", {limit} tokens of context" if limit else ""
        yield f"  {model}{of_context}{_if_loaded(facts, model)}"
    if facts.serves_nobody:
        return
    yield "routes besides chats and completions:"
    yield f"  {', '.join(facts.paths) or ('none' if not facts.untold else 'none for certain')}"
    if facts.untold:
        yield f"  by model, which a request for it will show: {', '.join(facts.untold)}"
    for model, paths in list(facts.lacking.items())[:MODELS_SHOWN]:
        yield f"  not of {model}: {', '.join(paths)}"
    if unknown := sorted({*facts.unsettled, *facts.failed}):
        yield f"  not found out, which clients' requests will show: {', '.join(unknown)}"
    yield f"signals, as --engine-kind {facts.kind}:"
    for name, (about, without) in SIGNALS.items():
        is_shown = facts.shown[name]
        value = getattr(facts.reading, name)
        shown = f"{len(value)} of them" if name == "progress" else f"{value}"
        yield f"  {'yes' if is_shown else 'no '}  {about}: {shown if is_shown else without}"
    kind = KINDS[facts.kind]
    asks = "yes" if kind.takes_usage_option else "no "
    yield f"  {asks}  token counts of every stream on request"
    yield f"limit: {kind.outstanding_max} requests at once, unless --max-outstanding says otherwise"
    for line in _advice(facts):
        yield f"note: {line}"
    yield ""
    yield "to install its agent (docs/install.md), with REPLICA as a name of mesh.toml:"
    yield f"  printf '%s\\n' {shlex.join(environment)} > /etc/mesh/agents/REPLICA.env"
    yield "  systemctl enable --now mesh-agent@REPLICA"
