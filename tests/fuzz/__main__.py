"""`python -m tests.fuzz`: many inputs for each decoder, and what it should not have raised."""

import math
import multiprocessing
import sys
import time
from collections import Counter
from random import Random
from traceback import extract_tb

import click

from tests.fuzz.decoders import decoders

SHOWN_BYTES = 300


def tried(name: str, count: int, seed: int) -> tuple[Counter[str], dict[str, str]]:
    """How inputs ended (taken, or by which error), and each kind of fault with one input."""
    decoder = dict(decoders())[name]
    dice, ends, faults = Random(f"{name} {seed}"), Counter[str](), dict[str, str]()
    for _ in range(count):
        data = decoder.make(dice)
        try:
            decoder.read(data)
            ends["taken"] += 1
        except decoder.errors as error:
            ends[type(error).__name__] += 1
        except Exception as error:
            where = extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {where.filename}:{where.lineno}: {error!s:.80}"
            faults.setdefault(place.split(": ")[0], f"{place}\n    {data[:SHOWN_BYTES]!r}")
    return ends, faults


def _tried(given: tuple[str, int, int]) -> tuple[str, Counter[str], dict[str, str]]:
    return given[0], *tried(*given)


@click.command()
@click.option(
    "-n",
    "most",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Inputs, of all decoders together.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--decoder", type=click.Choice([name for name, _ in decoders()]), help="This alone.")
def main(most: int, seed: int, decoder: str | None) -> None:  # fmt: skip
    """Damage inputs of decoders; exit 1 if one raises what it does not document."""
    chosen = [decoder] if decoder else [name for name, _ in decoders()]
    began, faulty, all_ends = time.perf_counter(), 0, Counter[str]()
    with multiprocessing.Pool(2) as pool:
        each = math.ceil(most / len(chosen))
        todo = [(name, each, seed) for name in chosen]
        for name, ends, faults in pool.imap_unordered(_tried, todo):
            faulty += len(faults)
            all_ends += ends
            print(f"{name}: {dict(ends)}", flush=True)
            for text in faults.values():
                again = f'DECODER="{name}" N={each} SEED={seed}'
                print(f"  FAULT {text}\n    again by: make fuzz {again}", flush=True)
    count = sum(all_ends.values())
    wall_s = time.perf_counter() - began
    print(f"seed {seed}: {count:,} inputs of {len(chosen)} decoders in {wall_s:.0f} s")
    print(f"{all_ends['taken']:,} were read as valid; {faulty} kinds of faults")
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
