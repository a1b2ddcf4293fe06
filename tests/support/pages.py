"""The documents' code blocks: what a reader would copy."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("dashboards", "docs", "infra")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One code block of a page. `language` is empty where the page names none."""

    page: str
    language: str
    text: str

    @property
    def title(self) -> str:
        """Its first line that is no comment: by that, tests name it."""
        lines = (line.strip() for line in self.text.splitlines())
        return next(line for line in lines if line and not line.startswith("#"))


def pages() -> list[Path]:
    """Every document of the checkout."""
    below = (page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *below])


def blocks(language: str) -> Iterator[Block]:
    """Every block in that language, in the order of the pages."""
    for page in pages():
        for match in BLOCK.finditer(page.read_text()):
            if match[1] == language:
                yield Block(str(page.relative_to(ROOT)), match[1], match[2])
