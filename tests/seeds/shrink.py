"""Makes a world that breaks a promise small: fewer lines, shorter, the same promise broken."""

from collections.abc import Callable, Iterator

from tests.seeds.world import Line, World

ROUNDS_MAX = 400  # plays


def shrunk(world: World, breaks: Callable[[World], bool], rounds_max: int = ROUNDS_MAX) -> World:
    """The smallest that was found. `breaks`: whether a world still breaks the promise."""
    left = rounds_max
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(world):
            if left == 0:
                return world
            left -= 1
            if breaks(smaller):
                world, is_smaller = smaller, True
                break
    return world


def _smaller(world: World) -> Iterator[World]:
    """First without many lines, then without one, then with less of one."""
    lines = world.lines
    size = len(lines) // 2
    while size:
        for begin in range(0, len(lines), size):
            kept = lines[:begin] + lines[begin + size :]
            if whole := without_orphans(kept):
                yield World(world.seed, whole)
        size //= 2
    for number, line in enumerate(lines):
        for other in _less(line):
            kept = (*lines[:number], other, *lines[number + 1 :])
            yield World(world.seed, without_orphans(kept))


def without_orphans(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Without lines of parts that are not there: a request to such a router is never sent, and the
    judge would blame the product."""
    parts: dict[str, set[str]] = {
        what: {line.of["name"] for line in lines if line.what == what}
        for what in ("region", "replica", "runner")
    }
    parts["router"] = {
        f"{line.of['name']}.r{n + 1}"
        for line in lines
        for n in range(int(line.number("routers")) if line.what == "region" else 0)
    }
    of_part = {**{what: what for what in parts}, "one": "region", "other": "region"}
    kept = tuple(
        line
        for line in lines
        if all(value in parts[of_part[key]] for key, value in line.of.items() if key in of_part)
    )
    return kept if kept == lines else without_orphans(kept)  # with a region its replicas go


def _less(line: Line) -> Iterator[Line]:
    for name in line.of:
        if name == "for" and line.number("for") > 0.2:
            yield Line(line.at, line.what, {**line.of, "for": f"{line.number('for') / 2:.3g}"})
        if name == "routers" and line.number("routers") > 1:
            yield Line(line.at, line.what, {**line.of, "routers": "1"})
        if name == "tokens" and line.number("tokens") > 1:
            yield Line(
                line.at, line.what, {**line.of, "tokens": str(int(line.number("tokens")) // 2)}
            )
        if name not in (
            "n",
            "router",
            "model",
            "name",
            "region",
            "replica",
            "for",
            "one",
            "other",
            "mode",
            "by",
            "routers",
        ):
            yield Line(
                line.at, line.what, {key: value for key, value in line.of.items() if key != name}
            )
