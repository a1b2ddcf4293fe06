"""Worlds that are made small, and stories that are given: what they name is there."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.seeds.__main__ import main
from tests.seeds.shrink import shrunk, without_orphans
from tests.seeds.world import World, parse, world_of

STORY = """seed 2
0 region name=us routers=1
0 replica name=us-1 region=us model=a
2 ask n=1 router=us.r1 model=a
"""


@pytest.mark.parametrize("seed", [2, 8, 17])
def test_a_smaller_world_names_no_part_that_it_lacks(seed: int) -> None:
    """A request to a router that was left out is never sent, which counted as the product's."""
    tried: list[World] = []

    def breaks(smaller: World) -> bool:
        tried.append(smaller)
        return any(line.number("routers") == 1 for line in smaller.all("region"))

    assert shrunk(world_of(seed), breaks).size < world_of(seed).size
    assert all(without_orphans(world.lines) == world.lines for world in tried)
    assert any(line.of.get("routers") == "1" for world in tried for line in world.lines)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("2 ask", "two ask", "no line of a story: two ask n=1"),
        ("n=1 ", "n ", "no line of a story: 2 ask n router"),
        (
            "us.r1",
            "us.r2",
            "2 ask n=1 router=us.r2 model=a: of a part that the story does not have",
        ),
        ("0 replica", "0 regoin", '"regoin"'),
    ],
)
def test_a_story_with_a_mistake_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    (tmp_path / "story").write_text(STORY.replace(old, new, 1))
    ended = CliRunner().invoke(main, ["--story", str(tmp_path / "story")])
    assert ended.exit_code == 2 and why in ended.output, ended.output


def test_a_story_is_played(tmp_path: Path) -> None:
    (tmp_path / "story").write_text(STORY)
    ended = CliRunner().invoke(main, ["--story", str(tmp_path / "story")])
    assert ended.exit_code == 0 and "it breaks no promise" in ended.output, ended.output
    assert str(parse(STORY)) in ended.output
