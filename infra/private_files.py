"""Files and folders that only their owner reads."""

import os
import stat
import tempfile
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Put `text` at `path` with mode 0600; a reader sees the old file or the new, never a part."""
    make_private(path.parent, tighten=False)
    # mkstemp opens with 0600: the text is at no moment readable by others.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private(folder: Path, *, tighten: bool = True) -> None:
    """Make the folder and those above it that are missing, with mode 0700.

    `tighten`: take group and others out of one that was there. Not for folders that may
    serve more than this.
    """
    if folder.is_dir():
        mode = stat.S_IMODE(folder.stat().st_mode)
        if tighten and mode & (stat.S_IRWXG | stat.S_IRWXO):
            folder.chmod(stat.S_IRWXU)
        return
    make_private(folder.parent, tighten=False)
    folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
