"""What explains a finding, and which command an operator can run by hand.

A region whose nats-server does not answer can't be reached over any link, and one whose routers
are all silent sends no digest and answers no ping: every other region finds the same. Such a
finding keeps its verdict and names the region in `because`. If others reach a region whose server
does not answer *us*, our own way there is cut: its finding says so and explains no other.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from infra.nats.bundle import CONFIG
from infra.topology import Topology
from mesh.core.view.outliers import LATE
from mesh.doctor.batch_runners import CHECK as BATCH_RUNNER
from mesh.doctor.connectivity import ServerUnreachable
from mesh.doctor.findings import (
    ENGINE_PAGE,
    ENGINE_RESULTS,
    STREAM_WRITES,
    CheckResult,
    Finding,
    Remedy,
)
from schemas.ids import RegionId
from schemas.state import LOOKS_LIKE

# What a region's routers send now: a server counts a lost link as up for seconds more.
SERVER, SERVER_LINK = ("bus", "server"), "server link"
CHECKS_OF_ROUTERS = ("link", "round trip")
CHECKS_OF_ENGINES = ("engine", ENGINE_PAGE, ENGINE_RESULTS)
RESTART = (
    "its own log says why: unless it loads its model or was put to sleep, restart it as you start "
    "it"
)
MAKE_ROOM = "make room on the disk of its nats-server, then restart that"
PROGRAM_OF_CHECK = {"router": "router", "heartbeat": "agent"}


@dataclass(frozen=True, slots=True)
class SystemdCommands:
    """For regions on machines of their own, under the units of `infra/systemd`."""

    topology: Topology
    config: Path
    credentials: Path

    def server(self, region: str, unreachable: ServerUnreachable) -> Remedy:
        host = urlsplit(unreachable.url).hostname
        listens = unreachable.listens
        state = "hangs or is stopped" if listens else "is down, or its machine can't be reached"
        return Remedy(
            f"its nats-server {state}; see why and restart it on {host} (without systemd: as you "
            "start it there)",
            _restart(f"mesh-nats@{region}"),
        )

    def program(self, kind: str, region: str, name: str) -> Remedy:
        what = (
            f"{kind} {name} of {region} sends nothing; see why and, unless its machine is short of "
            "CPU, restart it there"
        )
        return Remedy(what, _restart(f"mesh-{kind}@{name}"))

    def engine(self, replica: str) -> Remedy:
        what = f"the engine of {replica} does not answer its agent; {RESTART}; what the agent saw"
        return Remedy(what, f"journalctl -n 30 -u mesh-agent@{replica}")

    def engine_page(self, replica: str, detail: str) -> Remedy:
        return _page_remedy(detail, f"journalctl -n 30 -u mesh-agent@{replica}")

    def engine_results(self, replica: str, detail: str) -> Remedy:
        what = (
            f"{_results_advice(replica, detail, 'restart it as you start it')}; what the agent saw"
        )
        return Remedy(what, f"journalctl -n 30 -u mesh-agent@{replica}")

    def stream(self, region: str) -> Remedy:
        return _set_up_streams(region, self.config, self.credentials)

    def tenants(self, tenant: str) -> Remedy:
        return _bound(tenant, self.config, self.credentials)

    def stream_writes(self, region: str) -> Remedy:
        addresses = self.topology.regions[RegionId(region)].nats
        hosts = ", ".join(dict.fromkeys(each.host for each in addresses))
        what = f"{MAKE_ROOM}, on {hosts} (without systemd: as you start it there)"
        return Remedy(what, f"df -h; systemctl restart mesh-nats@{region}")


@dataclass(frozen=True, slots=True)
class DemoCommands:
    """For `mesh up`, whose files and running processes are known."""

    file: Path  # its mesh.toml
    config: Path
    logs: Path
    pids: Mapping[str, int]  # by program
    binary: Callable[[], Path]
    engines_given: bool = False  # by --engine: none is simulated

    def server(self, region: str, unreachable: ServerUnreachable) -> Remedy:
        name = f"nats-{region}{unreachable.suffix}"
        if name in self.pids:
            return self._kill(name)
        if unreachable.listens:
            port = urlsplit(unreachable.url).port
            what = "it is no process of this `mesh up`; see whose it is, and end it with kill -KILL"
            return Remedy(what, f"ss -Hltnp 'sport = :{port}'")
        command = [
            str(self.binary()),
            "-c",
            str(self.config / region / CONFIG.format(unreachable.suffix)),
        ]
        what = (
            f"{name} is down; `mesh up` restarts it, unless it has reported that it does not any "
            f"more; {self.logs / name}.log says why; after mending that"
        )
        return Remedy(what, shlex.join(command))

    def program(self, kind: str, region: str, name: str) -> Remedy:
        program = f"agent-{name}" if kind == "agent" else f"{kind}-{region}-{name}"
        if program in self.pids:
            return self._kill(program)
        what = (
            f"{program} is down; `mesh up` restarts it, unless it has reported that it does not "
            "any more: then restart the mesh; the end of its log"
        )
        return Remedy(what, shlex.join(["tail", "-n", "30", str(self.logs / f"{program}.log")]))

    def engine(self, replica: str) -> Remedy:
        program = f"engine-{replica}"
        if program in self.pids:
            return self._kill(program)
        who = "`mesh up` restarts it, unless it has reported that it does not any more"
        if self.engines_given:
            who = RESTART
        what = f"the engine of {replica} does not answer its agent; {who}; what the agent saw"
        log = str(self.logs / f"agent-{replica}.log")
        return Remedy(what, shlex.join(["tail", "-n", "30", log]))

    def engine_page(self, replica: str, detail: str) -> Remedy:
        log = str(self.logs / f"agent-{replica}.log")
        return _page_remedy(detail, shlex.join(["tail", "-n", "30", log]))

    def engine_results(self, replica: str, detail: str) -> Remedy:
        is_ours = f"engine-{replica}" in self.pids
        program = f"engine-{replica}" if is_ours else f"agent-{replica}"
        whose = "the end of its log" if is_ours else "what the agent saw"
        what = f"{_results_advice(replica, detail, 'restart it')}; {whose}"
        log = str(self.logs / f"{program}.log")
        return Remedy(what, shlex.join(["tail", "-n", "30", log]))

    def stream(self, region: str) -> Remedy:
        """For streams that are missing or altered; `mesh up` checks them too, every 30 s."""
        return _set_up_streams(region, self.file, self.config)

    def tenants(self, tenant: str) -> Remedy:
        return _bound(tenant, self.file, self.config)

    def stream_writes(self, region: str) -> Remedy:
        pid = self.pids.get(f"nats-{region}")
        what = f"{MAKE_ROOM}; `mesh up` starts it again"
        kill = "" if pid is None else f"; kill -KILL {pid}"
        return Remedy(what, f"df -h {shlex.quote(str(self.config))}{kill}")

    def _kill(self, program: str) -> Remedy:
        what = (
            f"{program} hangs, is stopped or starved of CPU; unless this machine is short of CPU, "
            "kill it, and `mesh up` restarts it"
        )
        return Remedy(what, f"kill -KILL {self.pids[program]}")


ManualCommands = SystemdCommands | DemoCommands


def _set_up_streams(region: str, config: Path, credentials: Path) -> Remedy:
    what = f"streams of {region} are missing or have been altered; one command repairs all"
    options = ["--config", str(config), "--credentials", str(credentials), "--region", region]
    return Remedy(what, shlex.join(["mesh", "infra", "streams", *options]))


def _bound(tenant: str, config: Path, credentials: Path) -> Remedy:
    what = (
        f"a limit bounds {tenant}, and a lower weight gives it less (docs/limits.md; where "
        "requests have no tenant, require keys, docs/keys.md); the keys of all tenants"
    )
    options = ["--config", str(config), "--credentials", str(credentials)]
    return Remedy(what, shlex.join(["mesh", "keys", "list", *options]))


def _page_remedy(detail: str, command: str) -> Remedy:
    """For a page that fails while its engine answers requests: no restart is needed."""
    if "HTTP 401" in detail or "HTTP 403" in detail:
        what = "it asks for a login: give the agent --engine-key-file, or open the page to it"
    elif LOOKS_LIKE in detail:
        what = "start its agent as of that kind (--engine-kind, or ENGINE_KIND)"
    elif "/v1/models" in detail:
        what = "mend the list of models, or name them to the agent with --model"
    else:
        what = (
            "start the engine with its metrics (llama.cpp: --metrics, SGLang: --enable-metrics), "
            "give the agent their address (--metrics-url), or --engine-kind openai if there is none"
        )
    return Remedy(f"{what}; what the agent saw", command)


def _results_advice(replica: str, detail: str, restart: str) -> str:
    """Of an engine that is up. A restart cuts what it computes, so it takes a failure."""
    if detail.startswith(LATE):
        return (
            f"the engine of {replica} computes others first, and needs no restart: tell its agent "
            "how many it computes at once, --batch-max 1 (mesh up: batch-max=1) if one after the "
            "other, as transformers serve and Ollama do"
        )
    if not detail.startswith("fail"):
        return f"the engine of {replica} answers its agent: read its own log"
    return (
        f"the engine of {replica} answers its agent and fails requests: send it one yourself, read "
        f"its own log, and {restart}"
    )


def _restart(unit: str) -> str:
    return f"journalctl -n 30 -u {unit}; systemctl restart {unit}"


def with_causes(
    findings: Sequence[Finding],
    unreachable: Mapping[str, ServerUnreachable],
    commands: ManualCommands,
) -> list[Finding]:
    """The findings with causes and remedies, after one for each unreachable server, by region."""
    silent = _regions_with_silent_routers(findings)
    down = {region for region in unreachable if not _reached_from(region, findings)[0]}
    versions = {
        one.region: one.detail.partition(" has ")[0]
        for one in findings
        if (one.check, one.about) == SERVER
    }

    def explained(one: Finding) -> Finding:
        if one.verdict is CheckResult.BAD and one.check in PROGRAM_OF_CHECK and _is_silent(one):
            kind = PROGRAM_OF_CHECK[one.check]
            return replace(one, remedy=commands.program(kind, one.region, one.about))
        if one.verdict is CheckResult.BAD and one.check == BATCH_RUNNER:
            return replace(one, remedy=commands.program("batch-runner", one.region, one.about))
        if one.verdict is not CheckResult.OK and one.check in CHECKS_OF_ENGINES:
            return replace(one, remedy=_engine_remedy(one, commands))
        if one.verdict is CheckResult.BAD and one.check == "stream":
            return replace(one, remedy=commands.stream(one.region))
        if one.check == STREAM_WRITES:
            return replace(one, remedy=commands.stream_writes(one.region))
        if one.verdict is CheckResult.OK or one.peer is None:
            return one
        if one.peer in down or (one.peer in silent and one.check in CHECKS_OF_ROUTERS):
            return replace(one, because=one.peer)
        if one.check == SERVER_LINK and one.peer in versions:
            return replace(one, detail=one.detail + _differing(versions, one.region, one.peer))
        return one

    servers = [_server(region, why, findings, commands) for region, why in unreachable.items()]
    return [*servers, *map(explained, findings)]


def _engine_remedy(one: Finding, commands: ManualCommands) -> Remedy:
    if one.check == ENGINE_PAGE:
        return commands.engine_page(one.about, one.detail)
    if one.check == ENGINE_RESULTS:
        return commands.engine_results(one.about, one.detail)
    return commands.engine(one.about)


def _differing(versions: Mapping[str, str], region: str, peer: str) -> str:
    """What a link that is down may owe to the versions of its servers; empty if they are equal."""
    here, there = versions.get(region), versions[peer]
    if here in (None, there):
        return ""
    return (
        f"; {here} here, {there} in {peer}: with nats.conf rendered by 0.1, servers before 2.15 "
        "can't dial newer ones: render anew and restart both servers, or run one version"
    )


def _is_silent(one: Finding) -> bool:
    """Whether nothing was received of the program. An agent that sends heartbeats (their age is
    the finding's value) runs, and waits for its engine."""
    return one.value is None


def _regions_with_silent_routers(findings: Sequence[Finding]) -> set[str]:
    """Regions that have routers, none of which sends anything at home."""
    routers = [one for one in findings if one.check == "router"]
    answering = {one.region for one in routers if one.verdict is not CheckResult.BAD}
    return {one.region for one in routers} - answering


def _server(
    region: str,
    unreachable: ServerUnreachable,
    findings: Sequence[Finding],
    commands: ManualCommands,
) -> Finding:
    reached, not_reached = _reached_from(region, findings)
    detail = f"no answer at {unreachable.url}: {unreachable.why}"
    if reached:
        detail += f"; but {', '.join(reached)} reach it: is the way from here to there open?"
    elif not_reached:
        detail += f"; nor is it reached from {', '.join(not_reached)}"
    remedy = None if reached else commands.server(region, unreachable)
    return Finding(region, "bus", "server", CheckResult.BAD, detail, remedy=remedy)


def _reached_from(region: str, findings: Sequence[Finding]) -> tuple[list[str], list[str]]:
    """The regions that receive from routers of that one, and those that receive nothing."""
    checks = [one for one in findings if one.peer == region and one.check in CHECKS_OF_ROUTERS]
    reached = dict.fromkeys(one.region for one in checks if one.verdict is CheckResult.OK)
    not_reached = dict.fromkeys(one.region for one in checks if one.region not in reached)
    return list(reached), list(not_reached)
