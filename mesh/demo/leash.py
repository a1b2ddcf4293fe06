"""A launcher: become another program, but die with the process that started it.

    python -I -S leash.py PARENT_PID PROGRAM [ARGUMENT]…

A supervisor that is killed with SIGKILL can't end its children, and a mesh left behind would hold
its ports against the next start. The kernel does it: PR_SET_PDEATHSIG survives exec and needs no
help from the program, so it holds for nats-server as for our own. Setting it here, after the fork,
costs 10 ms of a bare interpreter a process; `preexec_fn` would run Python between fork and exec,
which is unsafe beside threads, and a pipe that children watch needs children that watch it.

Elsewhere than on Linux there is no such signal, and only an orderly end of the supervisor ends
its children. This file runs without site-packages: it imports nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and become the program; returns never."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # A parent that died before the call above sends no signal any more.
        if os.getppid() != int(parent):
            sys.exit("the supervisor is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: can't be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
