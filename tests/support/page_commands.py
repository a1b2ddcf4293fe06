"""A folder of commands that a shell can run, each a fork: see `forked_programs`.

`command_folder` makes `mesh` and `mesh-agent` there: scripts, quick to start, that send their
words, folder, environment and streams to a thread of this process, which starts the program.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.nats_server import nats_server_binary

COMMANDS = {"mesh": "mesh.cli.main", "mesh-agent": "agents.cli"}
MESSAGE_BYTES_MAX = 131072
SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    message = json.dumps([{module!r}, sys.argv[1:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [message.encode()], [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: server.send(str(number).encode()))
    sys.exit(int(server.recv(16)))
"""


@contextlib.contextmanager
def command_folder(folder: Path) -> Iterator[None]:
    """As `bin` of an installation; they end before the block does."""
    folder.mkdir(parents=True)
    (folder / "nats-server").symlink_to(nats_server_binary())
    (folder / "python").symlink_to(sys.executable)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("")  # the kernel gives it a name
        listening.listen()
        address = listening.getsockname()
        for name, module in COMMANDS.items():
            script = folder / name
            text = SCRIPT.format(python=sys.executable, address=address, module=module)
            script.write_text(text)
            script.chmod(0o755)
        accepting = threading.Thread(target=_accept, args=(listening,))
        accepting.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listening: socket.socket) -> None:
    running = []
    with contextlib.suppress(OSError):  # it is closed
        while True:
            script, _ = listening.accept()
            running.append(threading.Thread(target=_run, args=(script,)))
            running[-1].start()
    for each in running:
        each.join()


def _run(script: socket.socket) -> None:
    """One command, until it has ended."""
    with script:
        message, streams, *_ = socket.recv_fds(script, MESSAGE_BYTES_MAX, 3)
        module, words, folder, environment = json.loads(message)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            **dict(zip(("stdin", "stdout", "stderr"), streams, strict=True)),
            cwd=folder,
            env=environment,
        )
        for stream in streams:
            os.close(stream)
        passing = threading.Thread(target=_pass_signals, args=(script, process))
        passing.start()
        status = process.wait()
        script.send(str(status if status >= 0 else 128 - status).encode())
        script.shutdown(socket.SHUT_RD)
        passing.join()


def _pass_signals(script: socket.socket, process: subprocess.Popen[bytes]) -> None:
    while number := script.recv(16):
        process.send_signal(int(number))
    process.kill()  # if the script was killed
