"""The table of routes and engines in docs/api.md, which tests check and `make test-engines` writes.

    python -m tests.engines.route_table

Writes the columns that the tests have found since the last time anew; the others stay.
"""

import json

from tests.programs.bench.installs import ROOT

FOUND = ROOT / "build" / "engine-routes"
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- made by make test-engines -->", "<!-- end -->"
VLLM, SGLANG, LLAMACPP = "vLLM", "SGLang", "llama.cpp"
DYNAMO, SIMULATED = "Dynamo's mocker", "simulated"
MLX_LM, TRANSFORMERS, OLLAMA = "mlx-lm", "transformers serve", "Ollama"
EMBEDDING_VLLM = f"{VLLM} --runner pooling --convert embed"
EMBEDDING_LLAMACPP, RERANKING_LLAMACPP = f"{LLAMACPP} --embeddings", f"{LLAMACPP} --reranking"
ENGINES = (
    *(VLLM, EMBEDDING_VLLM, SGLANG, LLAMACPP, EMBEDDING_LLAMACPP, RERANKING_LLAMACPP),
    *(MLX_LM, TRANSFORMERS, OLLAMA, DYNAMO, SIMULATED),
)
Columns = dict[str, dict[str, str]]  # engine → row → cell


def kept() -> Columns:
    """The page's table."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].strip().splitlines()
    if not lines:
        return {}
    engines, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])
    )
    return {
        engine: {cells[0]: cells[place] for cells in rows if cells[place]}
        for place, engine in enumerate(engines)
        if place
    }


def keep(engine: str, cells: dict[str, str]) -> None:
    """Keep what was found over an engine, for the table that is written next."""
    FOUND.mkdir(parents=True, exist_ok=True)
    assert engine in ENGINES
    (FOUND / f"{engine}.json").write_text(json.dumps(cells))


def check(engine: str, cells: dict[str, str]) -> None:
    """Keep it, and see that it is what the page says."""
    keep(engine, cells)
    before = kept().get(engine, {})
    changed = {
        row: (before.get(row), cells.get(row))
        for row in before | cells
        if before.get(row) != cells.get(row)
    }
    again = ".venv/bin/python -m tests.engines.route_table"
    assert not changed, f"{engine}, as docs/api.md says and as found: {changed}; {again} writes it"


def lines(columns: Columns) -> list[str]:
    """The table, a line each."""
    columns = {engine: columns[engine] for engine in ENGINES if engine in columns}
    rows = dict.fromkeys(row for cells in columns.values() for row in cells)
    made = [["route", *columns], ["---"] * (1 + len(columns))]
    made += [[row, *(cells.get(row, "") for cells in columns.values())] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in made]


def main() -> None:
    """Write it into the page."""
    columns = kept()
    for file in sorted(FOUND.glob("*.json")):
        columns[file.stem] = json.loads(file.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join((before + BEGIN, *lines(columns), END)) + after)


if __name__ == "__main__":
    main()
