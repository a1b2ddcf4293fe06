"""Results by key, a file each: what was played once is not played again."""

from pathlib import Path
from typing import Any

import orjson

from mesh.replay.report import write_whole

Result = dict[str, Any]


class ResultFiles:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def get(self, key: str) -> Result | None:
        """The result under this key, if there is one."""
        try:
            found: Result = orjson.loads((self._folder / f"{key}.json").read_bytes())
        except FileNotFoundError:
            return None
        return found

    def has(self, key: str) -> bool:
        """Whether there is a result under this key."""
        return (self._folder / f"{key}.json").is_file()

    def put(self, key: str, result: Result) -> None:
        """Keep a result. Raises OSError."""
        write_whole(self._folder / f"{key}.json", orjson.dumps(result))
