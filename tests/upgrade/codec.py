"""Reads messages with the `schemas` package that it finds, and writes them again.

Run as a program it does so for lines of its standard input, with the last release on its path.
"""

import importlib
import json
import sys
from typing import Any

# Every message in JSON that travels or is kept: where its class and its codec are.
JSON_MESSAGES = {
    "heartbeat": ("state", "Heartbeat", "encode_state"),
    "digest": ("state", "Digest", "encode_state"),
    "lease": ("state", "Lease", "encode_state"),
    "offline": ("state", "OfflineState", "encode_state"),
    "decision": ("decision", "Decision", "encode_decision"),
    "question": ("explain", "RequestQuestion", "encode_question"),
    "answer": ("explain", "RouterRequests", "encode_answer"),
    "control": ("control", "RegionControl", "encode_control"),
    "job": ("batch", "BatchJob", "encode_job"),
}


def module(name: str) -> Any:
    return importlib.import_module(f"schemas.{name}")


def again(kind: str, data: bytes) -> bytes:
    """The message as it is written after it was read. Raises what its decoder raises."""
    if kind == "wire":
        module("exchange"), module("gossip")  # they register messages
        wire = module("wire")
        written: bytes = wire.encode(wire.decode(data))
        return written
    home, _, encode = JSON_MESSAGES[kind]
    message = getattr(module(home), f"decode_{kind}")(data)
    encoded: bytes = getattr(module(home), encode)(message)
    return encoded


def spoken() -> dict[str, Any]:
    """What else of the bus both sides must spell alike."""
    exchange, http = module("exchange"), module("http")
    return {
        "subjects": {one.name: [one.template, one.queue] for one in module("catalog").CHANNELS},
        "frames": {frame.name: frame.value for frame in exchange.Frame},
        "tags": {str(tag): [one.__name__, one.VERSION] for tag, one in _wire_messages()},
        "headers": {
            f"{home.__name__}.{name}": value
            for home in (exchange, http)
            for name, value in vars(home).items()
            if name.startswith("H_") and isinstance(value, str)
        },
    }


def _wire_messages() -> list[tuple[int, Any]]:
    module("exchange"), module("gossip")
    return list(module("wire").registered().items())


def main() -> None:
    print(json.dumps({"file": module("wire").__file__, **spoken()}), flush=True)
    for line in sys.stdin:
        kind, data = line.split()
        try:
            answer = {"data": again(kind, bytes.fromhex(data)).hex()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
