#!/usr/bin/env bash
# Guess: uvloop's `call_at` gives a TimerHandle, as asyncio's does and its documentation says.
# Seen (uvloop 0.23.0, Python 3.11.7): of a time that has passed, or is less than half a millisecond
# away, it gives a Handle, which has no `when()`. Whoever asks a timer when it is due gets an
# AttributeError then: after a pause of the process, say.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "uvloop==0.23.0"
cat >"$folder/show.py" <<'PY'
import asyncio
import platform
import sys

import uvloop


async def know_when() -> dict[str, bool]:
    """Whether the handle of a timer knows when it is due."""
    loop = asyncio.get_running_loop()
    timers = {
        "later": loop.call_later(1, print),
        "in 0.2 ms": loop.call_later(0.0002, int),
        "a time that has passed": loop.call_at(loop.time() - 1, int),
    }
    timers["later"].cancel()
    return {name: hasattr(timer, "when") for name, timer in timers.items()}


print("Python", platform.python_version(), "uvloop", uvloop.__version__)
plain, fast = asyncio.run(know_when()), uvloop.run(know_when())
print("asyncio:", plain)
print("uvloop: ", fast)
sys.exit(list(plain.values()) != [True, True, True] or list(fast.values()) != [True, False, False])
PY
"$folder/env/bin/python" "$folder/show.py"
