"""nats-py without its websockets: for them it would load aiohttp, a quarter of a command's start.

Commands that use no HTTP import this before all else that may import nats-py.
"""

import sys

if "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # to nats-py: not installed
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
