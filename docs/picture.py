"""Draw a mesh.toml as SVG: regions, what runs in each, and the links between them.

.venv/bin/python docs/picture.py > docs/mesh.svg
.venv/bin/python docs/picture.py mesh.toml > mesh.svg
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from infra import topology
from infra.topology import Topology

WIDTH, HEIGHT = 860, 460
BOX_WIDTH, BOX_HEIGHT = 250, 150
MARGIN = 10
STYLE = """
  text { font: 14px sans-serif; fill: #1f2937 } .name { font-weight: bold; font-size: 16px }
  .small { font-size: 12px; fill: #4b5563 } .region { fill: #f1f5f9; stroke: #475569 }
  .part { fill: #ffffff; stroke: #64748b } .link { stroke: #2563eb; stroke-width: 4 }
  .wire { stroke: #64748b; stroke-width: 1.5 } .label { fill: #ffffff }
"""


def draw(mesh: Topology) -> str:
    """The whole picture. Regions are the corners of a polygon, in the order of the file."""
    centres = _centres([str(name) for name in mesh.regions])
    body: list[str] = []
    for link in mesh.links:
        a, b = (centres[name] for name in link.between)
        body += _link(a, b, f"leaf link, {link.rtt_ms:g} ms")
    for name, region in mesh.regions.items():
        body += _region(centres[name], name, len(region.routers), len(region.replicas))
    lines = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{len(mesh.regions)} regions, each pair joined by a leaf link">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{lines}\n</svg>\n'
    )


def _centres(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The corners of a regular polygon with its first side above, stretched to the picture."""
    count = len(names)
    angles = [math.pi * ((2 * at - 1) / count - 0.5) for at in range(count)]
    across = _stretched([math.cos(angle) for angle in angles], WIDTH, BOX_WIDTH)
    down = _stretched([math.sin(angle) for angle in angles], HEIGHT, BOX_HEIGHT)
    return dict(zip(names, zip(across, down, strict=True), strict=True))


def _stretched(values: Sequence[float], size: int, box: int) -> list[float]:
    """The values over the whole size, a box and a margin apart from its borders."""
    low, high = min(values), max(values)
    if high - low < 1e-6:
        return [size / 2 for _ in values]
    room = size - box - 2 * MARGIN
    return [MARGIN + box / 2 + room * (value - low) / (high - low) for value in values]


def _link(a: tuple[float, float], b: tuple[float, float], says: str) -> Iterator[str]:
    x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    width = 7 * len(says) + 8
    yield (f'<line class="link" x1="{a[0]:.0f}" y1="{a[1]:.0f}" x2="{b[0]:.0f}" y2="{b[1]:.0f}"/>')
    yield (
        f'<rect class="label" x="{x - width / 2:.0f}" y="{y - 10:.0f}" '
        f'width="{width}" height="20"/>'
    )
    yield _text(x, y + 5, says, "small")


def _region(centre: tuple[float, float], name: str, routers: int, replicas: int) -> Iterator[str]:
    """Clients' HTTP comes to the routers; engines hang on the bus by their agents."""
    x, y = centre[0] - BOX_WIDTH / 2, centre[1] - BOX_HEIGHT / 2
    yield _box("region", x, y, BOX_WIDTH, BOX_HEIGHT, 10)
    yield _text(centre[0], y + 20, f"region {name}", "name")
    rows = (
        (y + 30, f"{_number(routers, 'router')}: OpenAI HTTP"),
        (y + 70, "nats-server"),
        (y + 110, f"{_number(replicas, 'agent')} and their engines"),
    )
    for row, says in rows:
        if row > y + 30:
            yield (
                f'<line class="wire" x1="{centre[0]:.0f}" y1="{row - 10:.0f}" '
                f'x2="{centre[0]:.0f}" y2="{row:.0f}"/>'
            )
        yield _box("part", x + 20, row, BOX_WIDTH - 40, 30, 5)
        yield _text(centre[0], row + 20, says)


def _box(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" rx="{radius:.0f}"/>'
    )


def _text(x: float, y: float, says: str, kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{escape(says)}</text>'


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else topology.DEFAULT_FILE
    sys.stdout.write(draw(topology.load(chosen)))
