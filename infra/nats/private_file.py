"""Files that only their owner may read, written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Put `text` at `path` with mode 0600; a reader sees the old file or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # mkstemp opens with 0600: the text is at no moment readable by others.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
