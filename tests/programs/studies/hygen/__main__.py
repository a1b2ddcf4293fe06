"""HyGen in the paper's own setting, in the simulated engine: budgets, rivals, prefixes, predictor.

    make study-hygen TRACES=folder

Online requests of a recorded trace, documents to summarize beside them, on one engine: the times of
an A100 with Mistral-7B (`a100-mistral-7b`) in chunks of 512 tokens, as Sarathi-Serve has them.
Systems: online only (Sarathi); Sarathi++ (online first, offline in every token that is left);
HyGen* (Sarathi++ with offline requests at a fixed rate, which is profiled); HyGen (two phases in a
latency budget, which is profiled); offline only. Budgets and rates are profiled on the first half
of a trace and judged on the second, with other documents. Without TRACES requests are generated.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click

from tests.programs.studies.hygen import predictor, prefixes
from tests.programs.studies.hygen.grid import TOLERANCES, Bench, Setting, bench
from tests.programs.studies.hygen.sections import AT_AGENT, of_trace
from tests.programs.studies.hygen.workloads import AZURE, MOONCAKE, TraceKind
from tests.support.result_page import result_page

PROCESSES = 2  # one for each trace
AZURE_RATE_PER_S, MOONCAKE_RATE_PER_S = 1.5, 0.6  # a quarter to a third of the engine
RATES_PER_S = (0.5, 1.0, 2.0, 3.0)


@result_page("hygen", "HyGen: offline work within the online objectives")
@click.command()
@click.option("--quick", is_flag=True, help="A short form: fewer, shorter runs.")
@click.option("--full", is_flag=True, help="A long form: longer runs are judged.")
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="TRACES",
    help="Folder with azure/ and mooncake/: without it requests are generated.",
)
def main(quick: bool, full: bool, traces: Path | None) -> None:
    """Play the paper's grid and print its tables."""
    began_s = time.monotonic()
    duration_s = 60.0 if quick else 850.0 if full else 600.0
    profiled_s = 30.0 if quick else 300.0
    tolerances = TOLERANCES[1::2] if quick else TOLERANCES

    def runs_of(kind: TraceKind, rate_per_s: float) -> Bench:
        return bench(Setting(kind, rate_per_s, profiled_s, duration_s), traces)

    rates = RATES_PER_S[1:2] if quick else RATES_PER_S
    azure, mooncake = runs_of(AZURE, AZURE_RATE_PER_S), runs_of(MOONCAKE, MOONCAKE_RATE_PER_S)
    others = [runs_of(AZURE, rate) for rate in rates]
    agent_tolerances = tolerances[:1] if quick else tolerances
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        first = pool.submit(of_trace, azure, tolerances, agent_tolerances, others)
        second = pool.submit(of_trace, mooncake, tolerances, () if quick else agent_tolerances)
        trace = azure.trace
        shared = pool.submit(prefixes.written, trace, duration_s / 2)
        predicted = pool.submit(predictor.written, trace, duration_s / 3)
        grids, at_agents, more = zip(first.result(), second.result(), strict=True)
        click.echo("\n\n".join([*grids, f"**At the agent**\n\n{AT_AGENT}"]))
        click.echo("\n" + "\n\n".join([*filter(None, at_agents), more[0]]))
        click.echo(f"\n**Prefix sharing**\n\n{shared.result()}")
        click.echo(f"\n**Predictor**\n\n{predicted.result()}")
    click.echo(f"{time.monotonic() - began_s:.0f} s", err=True)


if __name__ == "__main__":
    main()
