"""Writes what `make test-clients` found into docs/clients.md.

python -m tests.clients.table
"""

import json
from collections import Counter
from pathlib import Path

from tests.programs.bench.installs import ROOT

RESULTS = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- made by make test-clients -->", "<!-- end -->"
WORKS = "works"


def keep(client: str, found: dict[str, str]) -> None:
    """Keep what a client's test found: what was tried → what became of it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{client}.json").write_text(json.dumps(found))


def column(page: Path, name: str) -> dict[str, str]:
    """That column of a page's table: what was tried → what became of it."""
    lines = (line for line in page.read_text().splitlines() if line[:1] == "|")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    at = rows[0].index(name)
    return {row[0]: row[at] for row in rows[2:]}


def rows() -> list[str]:
    """The table, a line each."""
    lines = ["| client | works | refused in its own form of errors |", "|---|---|---|"]
    for file in sorted(RESULTS.glob("*.json"), key=lambda file: file.stem.casefold()):
        found = json.loads(file.read_text())
        works = [what for what, result in found.items() if result == WORKS]
        refused = Counter(result.removeprefix("refused: ") for result in found.values()
                          if result.startswith("refused: "))  # fmt: skip
        codes = ", ".join(f"{code} ({count})" for code, count in sorted(refused.items()))
        lines.append(f"| {file.stem} | {'; '.join(works)} | {codes} |")
    return lines


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join((before + BEGIN, *rows(), END)) + after)


if __name__ == "__main__":
    main()
