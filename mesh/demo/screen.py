"""What `mesh up` prints: progress while it starts, how to use it, and which programs fail."""

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.topology import Topology
from mesh.demo.local_mesh import DemoEvent, EngineMissing
from mesh.demo.state_directory import DEFAULT_STATE
from mesh.supervisor.program import ProgramKind
from mesh.supervisor.supervisor import ProgramDied


class Screen:
    """Prints to one console."""

    def __init__(self, console: Console, sizes: Counter[ProgramKind], logs: Path) -> None:
        """`sizes`: how many programs of each kind there will be; `logs`: their directory."""
        self._console = console
        self._logs = logs
        self._sizes = sizes
        self._ready: Counter[ProgramKind] = Counter()
        self._is_up = False
        self._status = console.status(self._progress())

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Show progress until the block ends."""
        self._plain(f"starting {self._sizes.total()} processes; their logs: {self._logs}")
        with self._status:
            yield

    def report(self, event: DemoEvent) -> None:
        """Show what happened to a program."""
        if isinstance(event, EngineMissing):
            self._plain(f"{_missing(event)}; its agent keeps trying")
        elif isinstance(event, ProgramDied):
            self._died(event)
        elif event.again or self._is_up:
            back = "back" if event.again else "ready"
            self._console.print(Text(f"{event.program.name} is {back}", style="green"))
        else:
            self._ready[event.program.kind] += 1
            self._status.update(self._progress())

    def up(
        self,
        topology: Topology,
        models: list[str],
        took_s: float,
        missing: Sequence[EngineMissing] = (),
        routers_not_ready: Sequence[str] = (),
        ca: Path | None = None,
        credentials: Path = DEFAULT_STATE / "config",
    ) -> None:
        """Show where everything is, what is missing, and a first request to try, with how to get
        a key if it needs one. `ca`: who signed the routers' certificates."""
        self._is_up = True
        gone = Counter(each.engine.region for each in missing)
        self._console.print(_regions(topology, gone, "nats" if ca is None else "tls"))
        if topology.links:
            round_trips = (f"{'–'.join(one.between)} {one.rtt_ms:g} ms" for one in topology.links)
            self._plain(f"round trips: {', '.join(round_trips)}")
        for each in missing:
            self._console.print(Text(f"missing: {_missing(each)}", style="red"), soft_wrap=True)
        if missing:
            self._console.print("a missing replica joins when its engine answers")
        if routers_not_ready:
            self._plain(f"not ready, for want of an engine: {', '.join(routers_not_ready)}")
        state = "running" if routers_not_ready else "ready"
        self._console.print(f"{state} after {took_s:.1f} s; Ctrl-C ends every process")
        if ca is not None:
            self._console.print("for the `nats` command (docs/operate.md):")
            self._plain(nats_environment(topology, credentials, ca))
        if topology.auth.required:
            self._console.print("requests need a key (docs/keys.md); to make one:")
            self._plain(first_key(topology, credentials))
        if models:
            self._console.print("try:")
            self._plain(first_request(topology, models[0], ca))
        else:
            self._console.print("no engine serves a model yet: requests are held until one does")

    def consoles(self, urls: Iterable[str], key: Path) -> None:
        """Show where the page is that shows the mesh, and with which key it changes something."""
        self._plain(f"console: {', '.join(urls)}")
        self._plain(f"  to drain something there, its admin key: {key}")

    def ending(self) -> None:
        self._console.print("ending: routers finish open requests; Ctrl-C again ends at once")

    def _died(self, death: ProgramDied) -> None:
        self._console.print(Text(f"{death.program.name} {death.how}", style="bold red"))
        for line in death.tail.splitlines():
            self._console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
        if death.restart_in_s is not None:
            self._plain(f"  restarting it in {death.restart_in_s:g} s; its log: {death.log}")
            return
        self._plain(f"  it is not restarted; its log: {death.log}")
        if not self._is_up:
            return
        if death.program.kind is ProgramKind.NATS:
            self._plain(f"  {death.program.region} is cut off; after mending it, start it by hand")
            self._plain("  (`mesh up` will not end it):")
            self._plain(f"  {shlex.join(death.program.command)}")
        else:
            self._plain("  after mending it, restart the mesh")

    def _progress(self) -> str:
        counts = (
            f"{kind.label} {self._ready[kind]}/{self._sizes[kind]}"
            for kind in reversed(ProgramKind)
            if self._sizes[kind]
        )
        return "starting: " + ", ".join(counts)

    def _plain(self, text: str) -> None:
        """Print what people copy: neither wrapped nor coloured."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def first_key(topology: Topology, credentials: Path) -> str:
    """A command that makes the key of the first request, for a tenant that may have one."""
    tenant, where = next(iter(topology.tenants), "acme"), shlex.quote(str(credentials))
    return f'KEY="$(mesh keys create --tenant {shlex.quote(tenant)} --credentials {where})"'


def nats_environment(topology: Topology, credentials: Path, ca: Path) -> str:
    """What a shell needs for `nats` commands on the first region's encrypted bus."""
    login = shlex.quote(
        str(credentials / next(iter(topology.regions)) / "credentials/observer.env")
    )
    return f"set -a; . {login}; NATS_CA={shlex.quote(str(ca))}; set +a"


def first_request(topology: Topology, model: str, ca: Path | None = None) -> str:
    """A curl command that streams one answer from the first region that has a replica. `ca`: who
    signed its certificate."""
    regions = topology.regions
    name = next((name for name, region in regions.items() if region.replicas), next(iter(regions)))
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": f"Hello from {name}"}],
    }
    key = '-H "authorization: Bearer $KEY" ' if topology.auth.required else ""
    quoted = json.dumps(body).replace("'", "'\\''")
    return (
        f"curl -N {f'--cacert {shlex.quote(str(ca))} ' if ca else ''}"
        f"{regions[name].scheme}://{regions[name].http}/v1/chat/completions "
        f"-H 'content-type: application/json' {key}-d '{quoted}'"
    )


def _missing(event: EngineMissing) -> str:
    return f"{event.agent.name}: {event.engine.url} does not serve yet: {event.why}"


def _regions(topology: Topology, missing: Counter[str], bus_scheme: str) -> Table:
    table = Table("region", "OpenAI endpoint", "NATS", "replicas", box=box.SIMPLE)
    for name, region in topology.regions.items():
        size = len(region.replicas)
        replicas = f"{size - missing[name]} of {size}" if missing[name] else str(size)
        servers = "\n".join(f"{bus_scheme}://{address}" for address in region.nats)
        table.add_row(name, f"{region.scheme}://{region.http}/v1", servers, replicas)
    return table
