"""`mesh-agent probe URL`: what an agent learns from an engine, and how to install the agent."""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson

from agents.adapters.engine_kinds import KINDS
from agents.adapters.engine_probe import METRICS_BY, PLAIN, EngineFacts, NoEngine, examined
from agents.config import checked_engine_url, checked_metrics_url
from agents.engine_options import read_engine_key
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


@click.command("probe", context_settings={"show_default": True})
@click.argument("url", metavar="URL")
@click.option("--metrics-url", default="", help="Its metrics page.", show_default="URL/metrics")
@click.option(
    "--engine-key-file",
    envvar="MESH_ENGINE_KEY_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the engine's API key; or set MESH_ENGINE_KEY. [MESH_ENGINE_KEY_FILE]",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(url: str, metrics_url: str, engine_key_file: Path | None, as_json: bool) -> None:
    """Examine the engine at URL: its kind, version, models, limits, routes and signals, and the
    lines with which its agent is installed. It is sent one tiny request for each optional route;
    one that loads models on demand, for each model that it has loaded."""
    key = read_engine_key(engine_key_file)
    try:
        engine = checked_engine_url(url)
        page = checked_metrics_url(metrics_url) if metrics_url else f"{engine}/metrics"
        secret = None if key is None else key.get_secret_value()
        facts = asyncio.run(examined(engine, page, secret))
    except ValueError as error:
        raise click.UsageError(f"URL: {error}") from error
    except NoEngine as error:
        raise click.ClickException(str(error)) from error
    lines = _environment(facts, engine, metrics_url)
    if as_json:
        click.echo(orjson.dumps(_as_object(facts, lines), option=orjson.OPT_INDENT_2))
    else:
        click.echo("\n".join(_as_text(facts, engine, lines)))


def _environment(facts: EngineFacts, url: str, metrics_url: str) -> list[str]:
    """Of the agent's file in /etc/mesh/agents."""
    lines = [f"ENGINE_KIND={facts.kind}", f"ENGINE_URL={url}"]
    return [*lines, f"METRICS_URL={metrics_url}"] if metrics_url else lines


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
    if facts.failed:
        statuses = " and ".join(f"HTTP {status}" for status in sorted(set(facts.failed.values())))
        yield (
            f"it fails requests: {statuses} to a tiny one on {', '.join(facts.failed)}; send it "
            "one chat yourself and read its log: one that fails chats, too, serves nobody"
        )
    if facts.unfinished:
        yield (
            "not found out which routes these models have, as they answered late or may be loaded "
            f"no more: {', '.join(facts.unfinished)}"
        )
    if facts.unsettled:
        yield f"not found out, as it answered otherwise or late: {', '.join(facts.unsettled)}"


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


def _as_text(facts: EngineFacts, url: str, environment: list[str]) -> Iterator[str]:
    what = facts.seen_kind if facts.seen_kind != PLAIN else "an OpenAI-compatible server"
    yield f"{url}: {what}, version {facts.version or 'not shown'}"
    yield ""
    yield f"models ({len(facts.models)}):"
    for model in facts.models[:MODELS_SHOWN]:
        card = facts.cards.get(model)
        limit = None if card is None else card.max_model_len
        of_context = f", {limit} tokens of context" if limit else ""
        yield f"  {model}{of_context}{_if_loaded(facts, model)}"
    yield "routes besides chats and completions:"
    yield f"  {', '.join(facts.paths) or ('none' if not facts.untold else 'none for certain')}"
    if facts.untold:
        yield f"  by model, which a request for it will show: {', '.join(facts.untold)}"
    for model, paths in list(facts.lacking.items())[:MODELS_SHOWN]:
        yield f"  not of {model}: {', '.join(paths)}"
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
    yield f"  printf '%s\\n' {' '.join(environment)} > /etc/mesh/agents/REPLICA.env"
    yield "  systemctl enable --now mesh-agent@REPLICA"
