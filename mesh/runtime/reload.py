"""What a running router takes over from a mesh.toml that is read again, and what must wait.

The file is read and checked whole, in a thread, so that no stream waits for it. With a mistake in
it the old one holds.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mesh.core.model.settings import with_changes
from mesh.runtime.config import RouterConfig
from mesh.runtime.routing_in_force import as_keys

log = logging.getLogger(__name__)


class ConfigRefused(ValueError):
    """A command line and a mesh.toml that can't be used together; a line for each problem."""


@dataclass(frozen=True, slots=True)
class ReloadedConfig:
    """The configuration from now on. `changed`, `waiting`: keys that are in force now, and keys
    that changed in the file and need a restart."""

    config: RouterConfig
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def reloaded(old: RouterConfig, new: RouterConfig) -> ReloadedConfig:
    """The old configuration with what can change of the new one."""
    config = replace(
        old,
        settings=with_changes(old.settings, new.settings),
        keys=new.keys,
        tenants=new.tenants,
        auth=new.auth,
        cors_origins=new.cors_origins,
        entries=new.entries,
        tls=new.tls if old.tls and new.tls else old.tls,
    )
    return ReloadedConfig(
        config,
        tuple(_differing(_taken_over(old), _taken_over(config))),
        tuple(_differing(_built_in(old), _built_in(new))),
    )


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


def _taken_over(config: RouterConfig) -> dict[str, Any]:
    routing = {f"routing.{key}": value for key, value in as_keys(config.settings).items()}
    places = {name: (one.endpoint, one.location) for name, one in config.entries.items()}
    return {
        **routing,
        "models": config.settings.models,
        "tenants": (config.keys, config.tenants),
        "auth": config.auth,
        "cors_origins": config.cors_origins,
        "endpoint and location of regions": places,
        "files of tls": config.tls,
    }


# Settings that mesh.toml has under other names.
KEYS = {
    "ground": "residency and confined_to",
    "trie_bytes_per_s": "routing.gossip_kib_per_s",
    "siblings_bytes_per_s": "routing.gossip_kib_per_s",  # the only one without peers
}


def _built_in(config: RouterConfig) -> dict[str, Any]:
    return {
        **{
            key: [getattr(config.settings, name) for name, other in KEYS.items() if other == key]
            for key in KEYS.values()
        },
        "regions and routing.topology": config.peers,
        "workers": config.workers,
        "routes": config.routes,
        "http": (config.http_host, config.http_port),
        "tls": config.tls is not None,
        "metrics": config.metrics,
        "console": config.console,
        "nats": config.bus.url,
        "mesh.name": config.hash_key,
        "batch": config.batch,
    }


class LiveConfig:
    """The configuration of a running process; `read` reads the file and raises ConfigRefused."""

    def __init__(self, config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
        self.config = config
        self._read = read

    async def read_again(self, *, names_waiting: bool = True, in_thread: bool = True) -> bool:
        """Whether the file is right; then `config` has what can change, and the log what did.

        `names_waiting`: also what needs a restart; of several workers, the parent logs it.
        `in_thread`: not in a process that forks, whose children would inherit the thread's locks.
        """
        try:
            new = await asyncio.to_thread(self._read) if in_thread else self._read()
        except ConfigRefused as error:
            for line in str(error).splitlines():
                log.error("not taken over, what was read before holds: %s", line)
            return False
        found = reloaded(self.config, new)
        self.config = found.config
        log.warning("read again; in force now: %s", ", ".join(found.changed) or "nothing new")
        if found.waiting and names_waiting:
            log.warning("read again; after a restart: %s", ", ".join(found.waiting))
        return True
