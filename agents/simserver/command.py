"""The command `mesh-agent engine-sim`.

`--profile` takes a name, a file of `mesh-agent profile --calibrate`, or a TOML file with the fields
of `agents.sim.profiles.Profile`:

name = "my-gpu"
knots = [[0, 0.012]]       # seconds of an iteration at a number of batched tokens
token_s = 0.0001           # and per token above the last knot
sequence_s = 0.0
context_s = 0.0
arrival_s = 0.0
batch_tokens = 2048
kv_tokens = 120000
max_seqs = 256
model = "my/model"         # the name that it serves; without it, the profile's
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agents.sim.profile_files import ProfileInvalid, find_profile
from agents.sim.profiles import A100_MISTRAL, PROFILES, Profile
from agents.simserver.faults import Faults, FaultsInvalid, parse_switches
from agents.simserver.metrics import PageKind
from schemas.kv_transfer import KvRole, TransferKind

if TYPE_CHECKING:
    from agents.simserver.kv_transfer import KvSettings


# Its 400,000 tokens of KV hold the longest prompts of real traces (Mooncake's reach 122,000).
DEFAULT_PROFILE = A100_MISTRAL.name
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


def _kv_settings(
    role: str | None, kind: str, timeout_s: float, s_per_token: float
) -> "KvSettings | None":
    from agents.simserver.kv_transfer import KvSettings

    if role is None:
        return None
    return KvSettings(KvRole(role), TransferKind(kind), timeout_s, s_per_token)


@click.command()
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
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
    default=DEFAULT_PROFILE,
    callback=_profile,
    help=f"Which GPU and model it is: {', '.join(PROFILES)}, a .json file of `mesh-agent profile "
    "--calibrate`, or a .toml file of your own.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=1.0,
    help="Run that many times faster than the profile: at 10, a prefill of 300 ms takes 30 ms.",
)
@click.option("--kv-tokens", type=_TOKENS, help="KV memory in tokens [default: the profile's].")
@click.option(
    "--max-num-seqs",
    "max_seqs",
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
    "--kv-events", help="Publish KV events there, tcp://host:port, as vLLM does.", metavar="ADDRESS"
)
@click.option("--kv-events-replay", help="Repeat them there.", metavar="ADDRESS")
@click.option(
    "--role",
    type=click.Choice([role.value for role in KvRole]),
    help="It computes one stage of requests: prompts for others, or answers to others' prompts "
    "[default: whole requests].",
)
@click.option(
    "--kv-transfer",
    type=click.Choice([TransferKind.NIXL.value, TransferKind.SGLANG.value]),
    default=TransferKind.NIXL.value,
    help="With --role, whose protocol of KV transfers it simulates: vLLM's or SGLang's.",
)
@click.option(
    "--kv-timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=480.0,
    help="With --role, how long it waits for the other engine of a pair.",
)
@click.option(
    "--kv-s-per-token",
    type=click.FloatRange(min=0),
    default=1e-5,
    help="With --role, how long a transfer takes for each token, in its own seconds.",
)
@click.option(
    "--adapters-max",
    type=click.IntRange(0, 1024),
    default=0,
    help="LoRA adapters that may be loaded at once, by vLLM's calls; 0: none.",
)
@click.option(
    "--adapter-load-s",
    type=click.FloatRange(0, 600),
    default=1.0,
    help="Seconds that loading one takes.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    help="Of the answers and of faults that strike at a rate.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Written once it serves: {"url": …, "pid": …}.',
)
def command(host: str, port: int, ready_file: Path | None, metrics: str, **options: Any) -> None:
    """A simulated engine: OpenAI's API over real HTTP, with the timing of a named GPU and model.

    It batches, caches prefixes, queues and preempts as vLLM does; only the words mean nothing.
    """
    import uvloop

    from agents.simserver.server import SimConfig
    from agents.simserver.serving import CannotListen, serve

    profile, longest = options["profile"], options["max_model_len"]
    if longest and longest > (options["kv_tokens"] or profile.kv_tokens):
        raise click.UsageError(
            "--max-model-len exceeds the KV memory: lower it or raise --kv-tokens"
        )
    options["kv"] = _kv_settings(
        *(options.pop(name) for name in ("role", "kv_transfer", "kv_timeout_s", "kv_s_per_token"))
    )
    options["models"] = options["models"] or (profile.model or profile.name,)
    config = SimConfig(metrics=PageKind(metrics), **options)

    def announce(url: str) -> None:
        names, scale = ", ".join(config.models), config.time_scale
        click.echo(f"engine-sim {url} serves {names} ({profile.name} × {scale:g})")

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, host, port, ready_file, announce))
    except CannotListen as error:
        raise click.ClickException(str(error)) from None
