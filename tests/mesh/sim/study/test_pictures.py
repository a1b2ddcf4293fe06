"""Pictures are read back: the right files, every series in them, and the values of the series."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mesh.sim.study.pictures import draw, smoothed
from schemas.ids import RegionId
from tests.mesh.sim.study.small import settings, study

SVG = "{http://www.w3.org/2000/svg}"
POLICIES = "round-robin,least-load"


def texts(path: Path) -> list[str]:
    return [text.text or "" for text in ET.parse(path).iter(f"{SVG}text")]


def series(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Every named line's points, in the picture's own units; y grows downwards."""
    found = {}
    for group in ET.parse(path).iter(f"{SVG}g"):
        line = group.find(f"{SVG}path")
        name = group.get("id", "")
        if line is not None and re.match(r"ttft |line |asked|answered", name):
            numbers = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", line.get("d", ""))
            found[name] = [(float(x), float(y)) for x, y in numbers]
    return found


def lost_note(path: Path) -> str:
    """The note about requests that are not in the picture."""
    note = next((group for group in ET.parse(path).iter() if group.get("id") == "lost"), None)
    return "" if note is None else " ".join(text.text or "" for text in note.iter(f"{SVG}text"))


def test_a_comparison_has_a_distribution_and_the_regions_of_each_run(tmp_path: Path) -> None:
    runs = study(settings(policy=POLICIES))
    files = draw(tmp_path / "pictures", runs)
    assert [path.name for path in files] == [
        "ttft-cdf.svg",
        "regions-round-robin.svg",
        "regions-least-load.svg",
    ]
    lines = series(files[0])
    assert lines.keys() == {"ttft round-robin", "ttft least-load"}
    for points in lines.values():
        assert points == sorted(points, key=lambda point: (point[0], -point[1])), "it only rises"
    axes = {"time to first token (s, logarithmic)", "requests that have their first token (%)"}
    assert {"round-robin", "least-load", *axes} <= set(texts(files[0]))
    assert not lost_note(files[0]), "every request is in the curves"
    for path in files[1:]:
        assert series(path).keys() == {
            f"{what}{whose}" for what in ("asked", "answered") for whose in ("", " us", " eu")
        }


def test_a_sweep_shows_what_more_replicas_and_more_load_do(tmp_path: Path) -> None:
    given = settings(regions=("us=1,eu=1", "us=2,eu=1"), load="0.3,0.9")
    files = draw(tmp_path, study(given))
    names = {path.name for path in files}
    assert {"throughput.svg", "ttft-by-load.svg", "ttft-cdf-us1-eu1-load0.3.svg"} <= names
    assert len(names) == len(files) == 4 + 2 + 4
    for name, others in (
        ("throughput.svg", ("load 0.3", "load 0.9")),
        ("ttft-by-load.svg", ("us=1,eu=1", "us=2,eu=1")),
    ):
        lines = series(tmp_path / name)
        assert lines.keys() == {f"line mesh {other}" for other in others}
        assert {len(points) for points in lines.values()} == {2}
    assert "replicas of all regions" in texts(tmp_path / "throughput.svg")


def test_a_run_that_sheds_ends_below_all_requests(tmp_path: Path) -> None:
    # One more slot than requests held at once: of 12 that come together most are shed.
    given = settings(
        regions=("us=1",), speed=1000, setting=("hold_max=1",), pushing="outstanding:1"
    )
    runs = study(given)
    (played,) = runs.values()
    assert played.report["shed"] > 0
    path = draw(tmp_path, runs)[0]
    (points,) = series(path).values()
    full = study(settings(regions=("us=1",)))
    (whole,) = series(draw(tmp_path / "full", full)[0]).values()
    assert points[-1][1] > whole[-1][1], "y grows downwards: this line ends lower"
    lost = 100 * (1 - played.report["ok"] / played.report["requests"])
    note = lost_note(path)
    assert "requests that were shed or failed" in note
    assert float(re.findall(r"([\d.]+)%", note)[0]) == pytest.approx(lost, rel=0.1)


def test_the_same_study_gives_the_same_bytes(tmp_path: Path) -> None:
    runs = study(settings())
    one, other = draw(tmp_path / "one", runs), draw(tmp_path / "other", runs)
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


@pytest.mark.parametrize("count", [1, 63, 256])
def test_smoothing_keeps_what_is_even(count: int) -> None:
    us = RegionId("us")
    assert smoothed({us: [2.0] * count}) == {us: [2.0] * count}
