"""`python -m tests.seeds`: play many worlds, or one of them, and say which promises they break.

A world that breaks one is made small, and printed as the story that plays it again: for `--story`,
and for `tests/seeds/test_seeds.py` once it is mended.
"""

import gc
import multiprocessing
import sys
import time
from collections import Counter
from multiprocessing.pool import Pool
from pathlib import Path

import click

from tests.seeds.coverage import Reached
from tests.seeds.judge import fingerprint, judged
from tests.seeds.planted import PLANTED, planted
from tests.seeds.shrink import ROUNDS_MAX, shrunk, without_orphans
from tests.seeds.stage import Seen, Stage, play
from tests.seeds.world import World, parse, world_of

TWICE_EVERY = 20  # of so many seeds one is played twice
PLANTED_SEEDS = 500
TOLD_EVERY = 1000  # seeds
SEED, COUNT = click.IntRange(0), click.IntRange(1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def verdict(world: World) -> tuple[list[str], str]:
    """Broken promises, and the run's fingerprint."""

    def judge(seen: Seen) -> tuple[list[str], str]:
        return judged(seen), fingerprint(seen)

    found: tuple[list[str], str] = play(world, judge)
    return found


def broken(world: World, *, twice: bool = False) -> list[str]:
    try:
        found, told = verdict(world)
        if twice and verdict(world)[1] != told:
            found.append("two runs are equal: they differ")
    except Exception as problem:
        found = [f"the run goes on: {problem!r}"]
    _take_apart()
    return found


def _take_apart() -> None:
    """Collect what a world leaves: its processes were killed between two steps, so their coroutines
    can't be closed, and complain."""
    told, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = told


def promises(found: list[str]) -> set[str]:
    return {one.split(":")[0] for one in found}


def _try(seed: int) -> tuple[int, list[str], float, Counter[str]]:
    began = time.process_time()
    with Reached() as reached:
        found = broken(world_of(seed), twice=seed % TWICE_EVERY == 0)
    return seed, found, time.process_time() - began, reached.counts


def _find(name: str) -> tuple[str, int | None, list[str]]:
    """The first seed that shows that planted fault."""
    for seed in range(1, PLANTED_SEEDS + 1):
        with planted(name):
            if found := broken(world_of(seed), twice="two runs" in name):
                return name, seed, found
    return name, None, []


def show(found: list[str], again: str) -> None:
    print(f"breaks {len(found)}, again by: make seeds {again}")
    for one in found[:5]:
        print(f"  {one}", flush=True)


def show_small(world: World, found: list[str]) -> None:
    """As a story that breaks the first of these promises."""
    print(f"making the world small, by up to {ROUNDS_MAX} plays", flush=True)
    wanted = promises(found[:1])
    small = shrunk(world, lambda smaller: bool(wanted & promises(broken(smaller))))
    print(f"# {found[0]}\n# again by: make seeds STORY=a-file-with-this\n{small}", flush=True)


@click.command()
@click.option("--from", "first", type=SEED, default=1, show_default=True, help="The first seed.")
@click.option("-n", "count", type=COUNT, default=100, show_default=True, help="So many seeds.")
@click.option("--seed", type=SEED, help="This one alone, made small if it breaks a promise.")
@click.option("--story", type=FILE, help="A world in a file.")
@click.option("--planted", "plants", is_flag=True, help="Find each planted fault.")
@click.option("--processes", type=COUNT, default=2, show_default=True)
def main(
    first: int, count: int, seed: int | None, story: Path | None, plants: bool, processes: int
) -> None:
    """Play many worlds, or one of them; exit 1 if one breaks a promise."""
    if sum((seed is not None, story is not None, plants)) > 1:
        raise click.UsageError("give one of --seed, --story and --planted")
    gc.freeze()  # what was imported is no garbage of a world
    if seed is not None or story is not None:
        sys.exit(_one(seed, story))
    with multiprocessing.Pool(processes) as pool:
        sys.exit(_planted(pool) if plants else _many(pool, first, count))


def _read(story: Path) -> World:
    try:
        world = parse(story.read_text())
    except ValueError as error:
        raise click.BadParameter(f"{story}: {error}", param_hint="--story") from error
    known = without_orphans(world.lines)
    for line in world.lines:
        why = "of a part that the story does not have" if line not in known else ""
        if not why and line in world.faults and not hasattr(Stage, f"_{line.what}"):
            why = f'no part, and nothing that happens to one: "{line.what}"'
        if why:
            raise click.BadParameter(f"{story}: {line}: {why}", param_hint="--story")
    return world


def _one(seed: int | None, story: Path | None) -> int:
    world = world_of(seed or 0) if story is None else _read(story)
    print(world)
    if not (found := broken(world, twice=True)):
        print("# it breaks no promise")
    elif story is None:
        show(found, f"SEED={seed}")
        show_small(world, found)
    else:
        show(found, f"STORY={story}")
    return bool(found)


def _planted(pool: Pool) -> int:
    unseen = 0
    for name, seed, found in pool.imap_unordered(_find, PLANTED):
        unseen += seed is None
        print(f"{name}: {f'seed {seed}: {found[0][:100]}' if seed else 'NOT SEEN'}", flush=True)
    print(f"{len(PLANTED) - unseen} of {len(PLANTED)} planted faults are seen")
    return unseen


def _many(pool: Pool, first: int, count: int) -> int:
    began, cpu_s, bad = time.perf_counter(), 0.0, 0
    reached: Counter[str] = Counter()
    by_promise: Counter[str] = Counter()
    results = pool.imap_unordered(_try, range(first, first + count))
    for played, (seed, found, s, counts) in enumerate(results, 1):
        cpu_s += s
        reached += counts
        by_promise.update(promises(found))
        if found:
            bad += 1
            print(f"seed {seed} ", end="")
            show(found, f"SEED={seed}")
        if played % TOLD_EVERY == 0 and played < count:
            print(f"{played} of {count} seeds played, {bad} break promises", flush=True)
    wall_s = time.perf_counter() - began
    speed = f"{count / wall_s:.2f} a second, {cpu_s:.0f} s of CPU"
    print(f"{count} seeds from {first} on in {wall_s:.0f} s, {speed}")
    print(f"{bad} of them break promises{f': {dict(by_promise)}' if bad else ''}")
    print("reached:", *(f"{what} {number}" for what, number in sorted(reached.items())), sep="\n  ")
    print("never reached:", ", ".join(Reached.missing(reached)) or "nothing")
    return bool(bad)


if __name__ == "__main__":
    main()
