"""Keep what a request costs now, in bytecodes, as what it may cost: see `bytecodes`."""

import asyncio
import json
import tempfile
from pathlib import Path

from tests.gate.agent import count_agent
from tests.gate.bytecodes import FIGURES, Figures, count_decisions, count_edge, python_version
from tests.support.nats_server import running_nats_server


async def count(url: str) -> Figures:
    """All figures, counted now; `url`: a bus that nobody else uses."""
    return {**await count_edge(url), **await count_agent(url), **count_decisions()}


async def _count_alone() -> Figures:
    with tempfile.TemporaryDirectory() as name:
        async with running_nats_server(Path(name) / "nats") as server:
            return await count(server.url)


def main() -> None:
    """Keep what is counted now as what is to be."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"figures": {}}
    now = asyncio.run(_count_alone())
    for name, figure in now.items():
        print(f"{name}: {figure:.0f} bytecodes, was {kept['figures'].get(name, 0):.0f}")
    kept = {"python": python_version(), "figures": {name: round(now[name]) for name in sorted(now)}}
    FIGURES.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
