"""A launcher that becomes another program, which the kernel kills when its parent dies.

    python -I -S parent_death.py PARENT_PID PROGRAM [ARGUMENT]…

A supervisor that is killed with SIGKILL can't stop its children, and children left behind would
hold their ports against the next start. PR_SET_PDEATHSIG survives exec, so it serves nats-server
as well as our own programs, for 10 ms of a bare interpreter. On other systems than Linux only an
orderly end of the supervisor ends its children.

This file runs without site-packages: it imports only the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def die_with(parent: int, name: str | None = None) -> None:
    """Tie this process to its parent, and name it for `ps` and `top`, which show 15 characters."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if name is not None:
            libc.prctl(PR_SET_NAME, name.encode())
        # A parent that died before the first call sends no signal any more.
        if os.getppid() != parent:
            sys.exit("the supervisor is gone")


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and become the program; returns never."""
    parent, *command = arguments
    die_with(int(parent))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: can't be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
