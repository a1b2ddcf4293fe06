"""The command `mesh-agent engine-sim`."""

import asyncio
from pathlib import Path

import click

from agents.sim.profile import Profile
from agents.sim.profiles import A100_MISTRAL, PROFILES
from agents.simserver.faults import Faults, FaultsInvalid, parse_switches
from agents.simserver.pages import PageKind
from agents.simserver.profile_file import ProfileInvalid, find_profile

# Its 400,000 tokens of KV hold the longest prompts of real traces (Mooncake's reach 122,000).
_PROFILE = A100_MISTRAL.name
_TOKENS = click.IntRange(min=32)


def _profile(ctx: click.Context, param: click.Parameter, value: str) -> Profile:
    try:
        return find_profile(value)
    except ProfileInvalid as error:
        raise click.BadParameter(str(error)) from None


def _faults(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Faults:
    try:
        return parse_switches(value)
    except FaultsInvalid as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port to listen on; 0 takes a free one and prints it.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    show_default="the profile's",
    help="A name that the one model answers to; repeat for more.",
)
@click.option(
    "--profile",
    default=_PROFILE,
    show_default=True,
    callback=_profile,
    help=f"Which GPU and model it is: {', '.join(PROFILES)}, or a .toml file of your own.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    show_default=True,
    help="Run that many times faster than the profile: at 10, a prefill of 300 ms takes 30 ms.",
)
@click.option("--kv-tokens", type=_TOKENS, help="KV memory in tokens [default: the profile's].")
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    help="Most sequences in the running batch [default: the profile's].",
)
@click.option(
    "--max-model-len",
    type=_TOKENS,
    help="Longest prompt and answer, in tokens [default: all of the KV memory].",
)
@click.option(
    "--metrics",
    type=click.Choice([kind.value for kind in PageKind]),
    default=PageKind.VLLM.value,
    show_default=True,
    help="Whose names the page at /metrics uses.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    callback=_faults,
    metavar="NAME=VALUE",
    help="A fault switch, such as slow=3 or error_rate=0.1; GET /sim/faults shows them all, "
    "POST /sim/faults sets them while it runs, DELETE heals. Repeat for more.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the answers and of faults that strike at a rate.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Written once it serves: {"url": …, "pid": …}.',
)
def command(
    host: str,
    port: int,
    models: tuple[str, ...],
    profile: Profile,
    time_scale: float,
    kv_tokens: int | None,
    max_num_seqs: int | None,
    max_model_len: int | None,
    metrics: str,
    faults: Faults,
    seed: int,
    ready_file: Path | None,
) -> None:
    """A simulated engine: OpenAI's API over real HTTP, with the timing of a named GPU and model.

    It batches, caches prefixes, queues and preempts as vLLM does; only the words mean nothing.
    """
    import uvloop

    from agents.simserver.process import CannotListen, Listen, serve
    from agents.simserver.server import SimConfig

    if max_model_len and max_model_len > (kv_tokens or profile.kv_tokens):
        raise click.UsageError(
            "--max-model-len exceeds the KV memory: lower it or raise --kv-tokens"
        )
    models = models or (profile.model or profile.name,)
    config = SimConfig(
        models=models,
        profile=profile,
        time_scale=time_scale,
        kv_tokens=kv_tokens,
        max_seqs=max_num_seqs,
        max_model_len=max_model_len,
        metrics=PageKind(metrics),
        seed=seed,
        faults=faults,
    )

    def announce(url: str) -> None:
        click.echo(f"engine-sim {url} serves {', '.join(models)} ({profile.name} × {time_scale:g})")

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, Listen(host, port, ready_file), announce))
    except CannotListen as error:
        raise click.ClickException(str(error)) from None
