"""Run `mesh up` on a terminal of its own and keep what it shows as SVG.

.venv/bin/python docs/screenshot.py > docs/mesh-up.svg
"""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 112, 40
COMMAND = (sys.executable, "-m", "mesh.cli.main", "up", *sys.argv[1:])
LAST_LINE = "console.key"
FONT_FROM_ELSEWHERE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
TURN = re.compile(r"\x1b\[[0-9?;]*[A-KSThl]")  # of the cursor; colours stay


def record() -> str:
    """All that the command prints until it has printed its last line; then the command is ended."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)},
    )
    os.close(theirs)
    text = ""
    try:
        while LAST_LINE not in text:
            text += os.read(ours, 65536).decode()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return text


def picture(printed: str) -> str:
    """The terminal as SVG: of a line that was written over, as progress is, its last state."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print("[bold]$ make up[/bold]")
    for line in printed.replace("\r\n", "\n").replace(f"{Path.cwd()}/", "").split("\n"):
        if shown := TURN.sub("", line.split("\r")[-1]).rstrip():
            console.print(Text.from_ansi(shown))
    return FONT_FROM_ELSEWHERE.sub("", console.export_svg(title="mesh up"))


if __name__ == "__main__":
    sys.stdout.write(picture(record()))
