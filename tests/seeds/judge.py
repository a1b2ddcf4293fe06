"""What was promised, held against what clients, engines, the bus and operators saw.

`broken` names each broken promise. Where parts fail, much may happen that else may not: `Troubles`
says when which part was in trouble, and for a while after that.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterator
from math import ceil

from agents.core.adapters import BACKOFF_S
from agents.core.routers import SILENCE_ABROAD_S, SILENCE_S
from mesh.core.lifecycle.continued_streams import LONG_S
from mesh.core.model.settings import RouterSettings
from mesh.core.requests.record import RequestRecord
from mesh.runtime.router import Router
from mesh.session.record import OpenRequest
from schemas.ids import RegionId, RouterId
from schemas.state import ReplicaState
from tests.seeds.clients import Client
from tests.seeds.engine import NO_LOADS, PREFILL_CHARS, Answer
from tests.seeds.jobs import Job
from tests.seeds.stage import Seen
from tests.seeds.world import ANY, HEALS_S, Line

AFTER_S = 3.0  # that a trouble may be felt after its end
CANCELLED_S = 1.0  # until an engine is told, where nothing is in trouble
PREFILL_S = 0.5  # of a prompt besides its characters, and of its one token
ABANDONED_S = 9.0  # and at the longest after that: agents give up on silent routers
ORDERED_S = 3.0  # until an order is followed
LATE_S = 1.5  # beyond a request's time
ENGINE = ("engine_mode", "engine_dies", "engine_stops", "engine_model")
NO_TROUBLE = ("stray_work",)
ORDER = ("drain", "routing")
SILENT = (
    "cut",
    "cut_one_way",
    "flap",
    "stall",
    "lossy",
    "bus_restarts",
    "bus_hangs",
    "store_empties",
)
UNHEARD = (
    *("router_dies", "router_stops", "router_leaves", "router_namesake"),
    *("cut", "cut_one_way", "flap", "stall", "lossy"),
)
GIVEN_UP_S = 2.5  # from then on until the engine has stopped
WHOSE = ("router", "runner", "replica", "region", "one", "other")
FAILED = (200, 400, 429, 500, 502, 503)  # an error event inside an answer, or instead of one
HARMLESS = (*ENGINE, *ORDER, "agent_dies", "agent_stops", "agent_leaves", "agent_namesake")
INFINITE = float("inf")
LEAST_PART = 0.2  # of a limit, split evenly among routers and batch runners
LIMITS_FORGET_S = 12.0  # until a router that is gone is left out of limits
ATOMS = (str, bytes, int, float, type(None), type)  # on which nothing hangs
TABLE_MAX = 2000  # items, of any table of a router
# But for those of prefixes: of an index, of what is published of it and of what others publish.
PREFIXES = ("_owners_of", "_blocks_of[]", "_unreported[]", "_published", "_holders_of")
PREFIXES_MAX = RouterSettings().index_blocks_max


class Troubles:
    """When something was wrong."""

    def __init__(self, faults: Collection[Line]) -> None:
        self._faults = [line for line in faults if line.what not in NO_TROUBLE]

    def between(self, begin: float, end: float, but: Collection[str] = ()) -> list[Line]:
        """Faults that may be felt then, `but` those kinds."""
        return [
            line
            for line in self._faults
            if line.what not in but and line.at <= end and begin <= line.ends_at + AFTER_S
        ]

    def near(
        self, begin: float, end: float, names: Collection[str], but: Collection[str] = ()
    ) -> list[Line]:
        """Those of these routers, replicas and regions; a fault of a region is one of all in it."""
        return [
            line
            for line in self.between(begin, end, but)
            if not {line.of.get(name) for name in WHOSE}.isdisjoint(names)
        ]


class Judge:
    def __init__(self, seen: Seen) -> None:
        self.seen, self.world = seen, seen.world
        regions = self.world.all("region")
        self.carried = {line.of["name"]: set(line.labels("labels")) for line in regions}
        self.confined = {line.of["name"]: set(line.labels("confined")) for line in regions}
        self.troubles = Troubles(self.world.faults)
        self.found: list[str] = []
        self.region_of = {line.of["name"]: line.of["region"] for line in self.world.all("replica")}
        self.tenants = {line.of["name"]: line for line in self.world.all("tenant")}
        self.lines = {line.of["name"]: line for line in self.world.all("replica")}
        self.serving = [one for one in self.lines.values() if self._serves(one)]
        [mesh] = self.world.all("mesh") or [Line(0, "mesh")]
        self.aliases = {ANY: mesh.labels("alias")} if "alias" in mesh.of else {}
        pushing, _, most = mesh.of.get("pushing", "").partition(":")
        self.outstanding_max = float(most) if pushing == "outstanding" else INFINITE
        self.answers: dict[int, list[Answer]] = {}
        for engine in seen.engines.values():
            for answer in engine.answers:
                self.answers.setdefault(answer.number, []).append(answer)

    def broken(self) -> list[str]:
        for client in self.seen.clients:
            self._ends_once(client)
            self._true_words(client)
            self._in_time(client)
            self._true_reason(client)
            self._nothing_after(client)
        self._only_where_allowed()
        for job in self.seen.jobs:
            self._lines_are_answered(job)
        for tenant in self.tenants.values():
            self._limits_hold(tenant)
        self._orders_hold()
        self._streams_move()
        self._orders_are_seen()
        self._processes()
        for name, host in self.seen.routers.items():
            if host.is_alive and host.part is not None:
                self._nothing_left(name, host.part)
                self._view(name, host.part)
        self._agents()
        return self.found

    def _serves(self, line: Line) -> bool:
        return line.of.get("role") != "prefill" and (
            "kv" not in line.of or bool(self._others(line))
        )

    def _others(self, line: Line) -> list[Line]:
        """The prefill engines without which a decode engine answers nothing."""
        return [
            one
            for one in self.lines.values()
            if "kv" in line.of
            and one.of.get("role") == "prefill"
            and (one.of["model"], one.of["region"]) == (line.of["model"], line.of["region"])
        ]

    def _loadable(self) -> set[str]:
        return {name for line in self.serving for name in line.labels("adapters")}

    def _is_for(self, ask: Line, line: Line) -> bool:
        """Whether that replica's engine has, or may load, what was asked for."""
        names = {line.of["model"], *line.labels("adapters")}
        return bool(names.intersection(self.aliases.get(ask.of["model"], (ask.of["model"],))))

    def say(self, promise: str, text: str) -> None:
        self.found.append(f"{promise}: {text}")

    # Clients.

    def _ends_once(self, client: Client) -> None:
        if client.outcome is None or client.ends != 1:
            self.say(
                "ends once",
                f"{client.number} ended {client.ends} times: {client.outcome} {client.detail}",
            )
        if client.outcome == "lost":
            host = self.seen.routers[client.ask.of["router"]]
            near = self._of_router(client, host.name)
            if all(one.what == "router_stops" for one in near):
                self.say(
                    "never a silent cut", f"{client.number} of {host.name} after {client.text!r}"
                )
        if (client.outcome or "").startswith(("unreadable", "no JSON", "no [DONE]")):
            self.say("readable", f"{client.number}: {client.outcome}")

    def _of_router(self, client: Client, router: str) -> list[Line]:
        near = self.troubles.between(client.sent_at - 20, client.ended_at)
        return [line for line in near if line.of.get("router") == router]

    def _true_words(self, client: Client) -> None:
        words = client.text.split()
        heads = [word.split("#")[0] for word in words]
        stamps = {word.split("#")[1] for word in words if "#" in word}
        due = [f"{client.number}.{position}" for position in range(len(heads))]
        if heads != due:
            self.say("no token twice, none missing", f"{client.number} got {client.text[:200]!r}")
        if len(stamps) > 1:
            self.say("no two attempts mixed", f"{client.number} got {client.text[:200]!r}")
        if client.outcome == "ok" and len(words) < int(client.ask.number("tokens", 3)):
            self.say("whole", f"{client.number} got {len(words)} tokens of {client.ask}")

    def _in_time(self, client: Client) -> None:
        timeout = client.ask.number("timeout", 600.0)
        took = client.ended_at - client.sent_at
        late = LATE_S + sum(
            min(line.number("for"), 130.0)
            for line in self._of_router(client, client.ask.of["router"])
        )
        if took > timeout + late + client.ask.number("reads_every") * 40:
            self.say(
                "in time", f"{client.number} took {took:.2f} s of {timeout} s: {client.outcome}"
            )

    def _true_reason(self, client: Client) -> None:
        ask, code = client.ask, client.outcome or ""
        if code in ("ok", "left", "lost", ""):
            return
        troubles = self.troubles.between(client.sent_at, client.ended_at)
        if not self._is_true(client, code, bool(troubles) or self._was_not_loaded(client)):
            self.say("a true reason", f"{client.number}: {code} ({client.detail[:160]}): {ask}")

    def _is_true(self, client: Client, code: str, in_trouble: bool) -> bool:
        """Whether that refusal or failure was right; `in_trouble`: something failed then."""
        ask, took_s = client.ask, client.ended_at - client.sent_at
        able = self._able(ask)
        if code == "unreached":
            return bool(self._of_router(client, ask.of["router"])) or self._region_bus(client)
        if code == "residency":
            places = any(self._may_hold(region, ask) for region in self._asked_from(ask))
            return not places or bool(self._ranges(ask) and not able)
        if code == "invalid_request":
            return bool(set(ask.labels("wants")) - set().union(*self.carried.values()))
        if code == "deadline_exceeded":
            return took_s >= ask.number("timeout", 600.0) - 0.1
        if client.status == 404 and code == "1":
            return self._forgot(client)
        unserved = not any(self._is_for(ask, line) for line in self.serving)
        true = {
            "model_not_found": unserved,
            "no_replica": not able,
            "path_not_served": not able,
            "saturated": self._crowded(client, able),
            "objective_missed": "slo_ms" in ask.of,
            "rate_limit_exceeded": self._is_used_up(client),
        }
        is_known = code in (*true, "draining", "engine_failed") or client.status in FAILED
        return true.get(code, False) or (is_known and in_trouble)

    def _was_not_loaded(self, client: Client) -> bool:
        """Whether it asked for an adapter that a replica may have failed to load, which is tried
        again after a while."""
        return any(
            line.of.get("mode") == NO_LOADS
            and own.of["name"] == line.of["replica"]
            and client.ask.of["model"] in own.labels("adapters")
            and line.at <= client.ended_at
            and client.sent_at <= line.ends_at + BACKOFF_S
            for line in self.world.all("engine_mode")
            for own in self.lines.values()
        )

    def _is_used_up(self, client: Client) -> bool:
        """Whether its tenant may have spent a limit, or what of it that router may spend before it
        has heard of other routers and batch runners."""
        tenant = self.tenants.get(client.ask.of.get("key", ""))
        if tenant is None:
            return False
        members = len(self.seen.routers) + len(self.seen.runners)
        part = 1.0 if members == 1 else LEAST_PART / members
        before = [
            other
            for other in self.seen.clients
            if other.ask.of.get("key") == client.ask.of["key"]
            and other is not client
            and other.sent_at <= client.ended_at
            and other.outcome != "rate_limit_exceeded"
        ]
        under_way = [other for other in before if other.ended_at >= client.sent_at]
        return (
            any(job.line.of.get("key") == client.ask.of["key"] for job in self.seen.jobs)
            or len(before) + 1 > part * tenant.number("requests", INFINITE)
            or len(under_way) + 1 > part * tenant.number("at_once", INFINITE)
            or bool(self.troubles.between(client.sent_at - LIMITS_FORGET_S, client.ended_at))
        )

    def _forgot(self, client: Client) -> bool:
        """Whether the engine that kept what it goes on with was started again since."""
        first = client.before
        return first is not None and any(
            first.sent_at <= at <= client.ended_at
            for line in self.world.all("engine_dies", "engine_model")
            for name, engine in self.seen.engines.items()
            if name == line.of["replica"] and first.response in engine.ever_kept
            for at in (line.at, line.ends_at)
        )

    def _region_bus(self, client: Client) -> bool:
        region = client.ask.of["router"].split(".")[0]
        return any(
            line.of.get("region") == region
            for line in self.troubles.between(client.sent_at - 15, client.ended_at)
        )

    def _asked_from(self, ask: Line) -> list[str]:
        home = ask.of["router"].split(".")[0]
        [mesh] = self.world.all("mesh") or [Line(0, "mesh")]
        alone = mesh.of.get("hops_max") == "0" or mesh.of.get("policy") == "region-local"
        return [home] if alone else [line.of["name"] for line in self.world.all("region")]

    def _may_hold(self, region: str, ask: Line, replica: str = "") -> bool:
        """The rule in words: some label that the request wants, of those of its tenant and those
        its region is confined to, of these that say any, is carried by the region, and not denied
        by the replica."""
        ranges = self._ranges(ask)
        if not ranges:
            return True
        limits = set.intersection(*ranges)
        carried = self.carried[region]
        denied = self.lines[replica].of.get("labels") if replica else None
        return bool(limits & (carried if denied is None else carried & {denied}))

    def _ranges(self, ask: Line) -> list[set[str]]:
        tenant = self.tenants.get(ask.of.get("key", ""))
        of_tenant = set() if tenant is None else set(tenant.labels("labels"))
        confined = self.confined[ask.of["router"].split(".")[0]]
        return [one for one in (set(ask.labels("wants")), of_tenant, confined) if one]

    def _able(self, ask: Line) -> list[Line]:
        """Replicas that could answer it."""
        regions = self._asked_from(ask)
        return [
            line
            for line in self.serving
            if self._is_for(ask, line)
            and ("responses" in line.of or "responses" not in ask.of)
            and line.of["region"] in regions
            and self._may_hold(line.of["region"], ask, line.of["name"])
            and ("kv" not in line.of or self._prefilled_by(ask, line))
        ]

    def _prefilled_by(self, ask: Line, line: Line) -> list[Line]:
        others = self._others(line)
        return [one for one in others if self._may_hold(one.of["region"], ask, one.of["name"])]

    def _crowded(self, client: Client, able: list[Line]) -> bool:
        if not able:
            return True
        others = [
            other
            for other in self.seen.clients
            if any(self._is_for(other.ask, line) for line in able)
            and other.sent_at <= client.ended_at
            and other.ended_at >= client.sent_at
        ]
        if all(
            any(self._is_in_the_way(other.ask, client.ask, line) for other in others)
            for line in able
        ):
            return True
        lines = sum(
            int(job.line.number("lines", 1))
            for job in self.seen.jobs
            if job.line.at <= client.ended_at and any(self._is_for(job.line, one) for one in able)
        )
        all_of = [one for line in able for one in (line, *self._others(line))]
        places = min(line.number("slots", 8) for line in all_of)
        return len(others) + lines > min(places, self.outstanding_max)

    def _is_in_the_way(self, other: Line, ask: Line, line: Line) -> bool:
        """Whether it uses another adapter of that engine, which has room for few."""
        used, wanted = (
            set(self.aliases.get(one.of["model"], (one.of["model"],)))
            & set(line.labels("adapters"))
            for one in (other, ask)
        )
        return bool(wanted and used - wanted)

    # Engines.

    def _nothing_after(self, client: Client) -> None:
        if client.outcome is None:
            return
        for answer in self.answers.get(client.number, ()):
            ended_at = self.seen.ended_at if answer.ended_at is None else answer.ended_at
            since = max(client.ended_at, answer.at)  # one that begins later is judged below
            late_s = ended_at - since
            if late_s < CANCELLED_S or not self.seen.engines[answer.engine].process.is_alive:
                continue
            is_prefill = self.lines[answer.engine].of.get("role") == "prefill"
            if is_prefill and self._is_abroad(client, answer):
                since = max(since, self._prefilled_at(answer, ended_at))
                if ended_at - since < CANCELLED_S:
                    continue
            router = client.ask.of["router"]
            names = router, answer.engine, router.split(".")[0], self.region_of[answer.engine]
            but = (*ORDER, "clock_steps", "engine_mode", "streams_stop")
            troubles = self.troubles.near(
                client.ended_at - 8.0, client.ended_at + CANCELLED_S, names, but
            )
            limits = [self._computes_until(line, since, client, answer) for line in troubles]
            if ended_at > max(limits, default=0.0):
                self.say(
                    "nothing after the end",
                    f"{answer.engine} computed {client.number} {late_s:.1f} s on: {client.outcome}",
                )
        # One that waits in another region is cancelled there once it is known who answers it.
        starts = sorted(
            answer.at
            for answer in self.answers.get(client.number, ())
            if not self._is_abroad(client, answer)
        )
        if (
            starts
            and starts[-1] > client.ended_at + CANCELLED_S
            and not self.troubles.between(client.ended_at - 8.0, starts[-1])
        ):
            self.say(
                "nothing after the end", f"{client.number} was begun after its client had ended"
            )

    def _prefilled_at(self, answer: Answer, ended_at: float) -> float:
        """Until when an engine that is told of no client's end computes that prompt, after those
        before it; one that misbehaves, until it does so no longer."""
        line = self.lines[answer.engine]
        before = [
            other
            for other in self.seen.engines[answer.engine].answers
            if other.at <= answer.at and (other.ended_at is None or other.ended_at > answer.at)
        ]  # with itself
        prompt_s = PREFILL_S + PREFILL_CHARS * line.number("prefill_us") * 1e-6
        rounds = ceil(len(before) / line.number("slots", 8))
        well_at = [
            mode.ends_at
            for mode in self.world.all("engine_mode")
            if mode.of["replica"] == answer.engine and mode.at <= ended_at
        ]
        return max((answer.at, *well_at)) + rounds * prompt_s

    def _is_abroad(self, client: Client, answer: Answer) -> bool:
        return self.region_of[answer.engine] != client.ask.of["router"].split(".")[0]

    def _computes_until(self, line: Line, since: float, client: Client, answer: Answer) -> float:
        """Until when that trouble may keep an engine at an answer whose client has ended: of a
        router that it no longer hears an agent gives up the work by itself."""
        if line.what not in UNHEARD:
            return max(since, line.ends_at) + ABANDONED_S
        silence_s = SILENCE_ABROAD_S if self._is_abroad(client, answer) else SILENCE_S
        return max(since, line.at) + silence_s + GIVEN_UP_S

    def _only_where_allowed(self) -> None:
        asks = {int(ask.number("n")): ask for ask in self.world.asks}
        asks |= {number: job.line for job in self.seen.jobs for number in job.numbers}
        for at, number, region in self.seen.crossed:
            ask = asks[number]
            if region != ask.of["router"].split(".")[0] and not self._may_hold(region, ask):
                self.say(
                    "only where allowed",
                    f"the prompt of {number} was in {region} at {at:.3f}: {ask}",
                )
        for answers in self.answers.values():
            for answer in answers:
                ask, region = asks.get(answer.number), self.region_of[answer.engine]
                if ask is not None and not self._may_hold(region, ask, answer.engine):
                    self.say(
                        "only where allowed", f"{answer.engine} computed {answer.number}: {ask}"
                    )
                if answer.told_wrong:
                    self.say("goes on from what was said", f"{answer.engine}: {answer.told_wrong}")
                is_for = ask is None or self._is_for(ask, self.lines[answer.engine])
                if not is_for and not self._had_another(answer):
                    self.say("by its model", f"{answer.engine} computed {answer.number}: {ask}")
                if (
                    answer.goes_on
                    and not self._had_another(answer)
                    and not any(
                        other.model == answer.model and other.tokens and other.at < answer.at
                        for other in answers
                    )
                ):
                    self.say("by its model", f"{answer.engine} went on with {answer.number}")

    def _had_another(self, answer: Answer) -> bool:
        """Whether another engine may have had its place, as clients are told by their tokens."""
        near = self.troubles.near(answer.at, answer.at, (answer.engine,))
        return any(line.what == "engine_model" for line in near)

    def _lines_are_answered(self, job: Job) -> None:
        """Of an acknowledged job; and each once, with the whole answer."""
        status, name = job.record.get("status"), f"job {job.line.of['n']}"
        able = [line for line in self._able(job.line) if "role" not in line.of]
        if not job.is_read:
            if able:
                self.say("a job is done", f"{name} is {status} at the end: {job.record}")
            return
        due = sorted(map(str, job.numbers))
        if sorted(number for number, _, _ in job.lines) != due:
            self.say("lines are answered once", f"{name} of {due} has {job.lines}"[:600])
        tokens = int(job.line.number("tokens", 3))
        for number, code, text in job.lines:
            whole = "".join(f" {number}.{position}" for position in range(tokens))
            if code == 200 and text != whole:
                self.say("lines are answered once", f"{number} got {text[:200]!r}")
            if code != 200 and able and not self.world.all(*ENGINE):
                self.say("a true reason", f"line {number} of {name}: {code}")

    def _limits_hold(self, tenant: Line) -> None:
        """Of all that engines were given, by when it was sent, and by how long they had it."""
        begun = sorted(
            (client.sent_at, self.answers[client.number][0].at, self._computed_until(client))
            for client in self.seen.clients
            if client.ask.of.get("key") == tenant.of["name"] and client.number in self.answers
        )
        routers = len(self.seen.routers)
        faults = [line for line in self.world.faults if line.what not in HARMLESS]
        apart = 1 + len(faults) * routers  # as much as if each had heard of no other
        for name, per_s in (("requests", 1 / 60), ("at_once", 0.0)):
            most = tenant.number(name, INFINITE)
            beyond = routers + 0.05 * most if routers > 1 else 0.0
            for number, (sent_at, at, _) in enumerate(begun):
                if name == "requests":
                    spans = [sent_at - earlier for earlier, _, _ in begun[: number + 1]]
                    spent = max(number + 1 - n - most * per_s * s for n, s in enumerate(spans))
                else:
                    spent = float(sum(one <= at < until for _, one, until in begun))
                if spent > apart * most + beyond:
                    what = f"{tenant.of['name']} had {spent:.1f} of {most:g} {name}"
                    self.say("limits hold", f"{what} at {at:.3f}")
                    return

    def _computed_until(self, client: Client) -> float:
        ends = (answer.ended_at for answer in self.answers[client.number])
        return min(client.ended_at, max(self.seen.ended_at if e is None else e for e in ends))

    def _orders_hold(self) -> None:
        """A drained replica is given nothing that came after its drain."""
        clients = {client.number: client for client in self.seen.clients}
        for begin in self.seen.orders:
            at, line, is_begin = begin
            if not is_begin or line.what != "drain":
                continue
            until = min(
                (t for t, other, b in self.seen.orders if other is line and not b),
                default=self.seen.ended_at,
            )
            here = (
                [line.of["replica"]]
                if "replica" in line.of
                else [r for r, g in self.region_of.items() if g == line.of["region"]]
            )
            for answers in self.answers.values():
                for answer in answers:
                    if answer.engine not in here or not at + ORDERED_S < answer.at < until:
                        continue
                    names = answer.engine, line.of["region"]
                    troubles = self.troubles.near(
                        at - 20, answer.at, names, (*ORDER, "engine_mode", "clock_steps")
                    )
                    # Taken before, while its body came late from a router that stood?
                    asked = clients.get(answer.number)
                    own = asked and asked.sent_at < at + ORDERED_S and asked.ask.of["router"]
                    routers = [
                        one
                        for one in self.troubles.between(at - 20, answer.at)
                        if (name := one.of.get("router", "")).startswith(line.of["region"])
                        or (own and name == own)
                    ]
                    if not troubles and not routers:
                        what = f"{answer.engine}, drained at {at:.3f}, was given {answer.number}"
                        self.say("an order holds", f"{what} at {answer.at:.3f}")

    def _streams_move(self) -> None:
        """Long streams leave a replica that operators want empty, where others have room."""
        clients = {client.number: client for client in self.seen.clients}
        for begin, line, is_begin in self.seen.orders:
            if not is_begin or "move" not in line.of:
                continue
            for answer in self._on(line):
                due = max(begin, answer.at + LONG_S) + ORDERED_S
                ended_at = self.seen.ended_at if answer.ended_at is None else answer.ended_at
                client = clients.get(answer.number)
                if client is None or ended_at <= due or line.ends_at < due or answer.at > begin:
                    continue
                if self._may_move(client, line, answer, due):
                    what = f"{answer.number} at {answer.engine}, to be empty at {begin:.3f}"
                    self.say("an order holds", f"{what}, until {ended_at:.3f}")

    def _on(self, line: Line) -> Iterator[Answer]:
        """Of the replicas that this drain is of."""
        for name, region in self.region_of.items():
            if region == line.of["region"] and line.of.get("replica", name) == name:
                yield from self.seen.engines[name].answers

    def _may_move(self, client: Client, line: Line, answer: Answer, due: float) -> bool:
        """Whether nothing hinders that: a stream that may go on, no trouble near, and room."""
        ask, own = client.ask, self.lines[answer.engine]
        if (
            not {"plain", "stamp", "responses"}.isdisjoint(ask.of)
            or "role" in own.of
            or ask.of["model"] != own.of["model"]
            or self.answers[client.number][0] is not answer
        ):
            return False
        begin, home = answer.at - 8, ask.of["router"].split(".")[0]
        if self._hinders(begin, due, {home, own.of["region"], answer.engine}):
            return False
        free = [
            one
            for one in self._able(ask)
            if one.of["model"] == own.of["model"]
            and "role" not in one.of
            and not self._is_drained(one, due)
            and not self._hinders(begin, due, {one.of["region"], one.of["name"]})
        ]
        there = [
            other
            for other in self.seen.clients
            if any(self._is_for(other.ask, one) for one in free)
            and other.sent_at <= due
            and other.ended_at >= due - ORDERED_S
        ]
        return bool(free) and len(there) <= sum(one.number("slots", 8) for one in free)

    def _hinders(self, begin: float, end: float, names: set[str]) -> list[Line]:
        """Troubles of these, and of all routers of the regions among them."""
        routers = {name for name in self.seen.routers if name.split(".")[0] in names}
        return self.troubles.near(begin, end, names | routers, ORDER)

    def _is_drained(self, line: Line, due: float) -> bool:
        """Whether that replica is, or was until just before."""
        return any(
            one.of["region"] == line.of["region"]
            and one.of.get("replica", line.of["name"]) == line.of["name"]
            and one.at <= due <= one.ends_at + 2 * ORDERED_S
            for one in self.world.all("drain")
        )

    def _orders_are_seen(self) -> None:
        for at, line, states in self.seen.looks:
            begun = [t for t, other, is_begin in self.seen.orders if other is line and is_begin]
            if not begun or at - begun[0] < ORDERED_S:
                continue
            begin = begun[0] - 20
            for (router, replica), state in states.items():
                names = router, replica, line.of["region"]
                but = (*ORDER, "engine_mode", "clock_steps")
                if state == ReplicaState.READY and not self.troubles.near(begin, at, names, but):
                    what = f"{router} shows {replica} as {state}, drained at {begun[0]:.3f}"
                    self.say("operators see an order followed", f"{what}, at {at:.3f}")

    # Processes.

    def _processes(self) -> None:
        for at, name, why in self.seen.exits:
            expected = ("BusUnreachable", "NameTaken", "ReplicaNameTaken")
            if not any(word in why for word in expected) or not self.troubles.between(at - 15, at):
                self.say("processes go on", f"{name} ended at {at:.3f}: {why}")
        true = ("the stream USAGE was emptied", "the store of orders was lost")
        true = true if self.world.all("store_empties") else ()
        for text in self.seen.errors:
            if not any(words in text for words in true):
                self.say("no error of ours", text[:400])

    def _nothing_left(self, name: str, router: Router) -> None:
        session = router.requests.session
        tables = {
            "requests": len(session),
            "peers' requests": session.forwarded,
            "missing answers": session.answers.missing,
            "in flight": len(router.core.inflight),
            "held": len(router.core.held),
            "bytes of bodies": router.requests.bodies.taken_bytes,
            "buffered bytes": router.requests.buffered_bytes(),
        }
        if left := {what: number for what, number in tables.items() if number}:
            self.say("nothing is left", f"{name}: {left}")
        sizes: Counter[str] = Counter()
        for path, thing in walk(router):
            if isinstance(thing, OpenRequest | RequestRecord) and "ended" not in path:
                self.say("nothing is left", f"{name}: {path}")
                return
            most = PREFIXES_MAX if path.rpartition(".")[2] in PREFIXES else TABLE_MAX
            if isinstance(thing, dict | list | set | deque) and len(thing) > most:
                sizes[path] = len(thing)
        if sizes:
            self.say("tables are bounded", f"{name}: {sizes}")

    def _agents(self) -> None:
        for name, host in self.seen.agents.items():
            agent = host.part
            if host.is_alive and agent is not None:
                left = agent._core.outstanding, len(agent._writers), len(agent._relays)
                if any(left):
                    self.say("nothing is left", f"{name}: {left}")

    def _view(self, name: str, router: Router) -> None:
        """After all is healed, every router knows what is there."""
        if self.seen.ended_at < self.world.healed_at + HEALS_S:
            return
        region = name.split(".")[0]
        ready = {
            str(one.heartbeat.replica)
            for one in router.core.replicas
            if one.heartbeat.state is ReplicaState.READY and one.heartbeat.region == region
        }
        there = {replica for replica, where in self.region_of.items() if where == region}
        if ready != there:
            self.say("views agree", f"{name} has {sorted(ready)} of {sorted(there)}")
        models = {line.of["model"] for line in self.serving}
        known, others = set(router.core.models()), self._loadable() | set(self.aliases)
        if not models <= known <= models | others:
            self.say("views agree", f"{name} knows {sorted(known)} of {sorted(models | others)}")
        for peer, host in self.seen.routers.items():
            there, name_there = peer.split(".")
            if there == region or not host.is_alive or host.part is None:
                continue
            seen = router.core.peers.by_region[RegionId(there)].digests.get(RouterId(name_there))
            if seen is None or seen.epoch != host.part.requests._config.epoch:
                self.say("views agree", f"{name} has of {peer} {seen and seen.epoch}")
        if router.requests.leases.problem is not None and not self.world.all("store_empties"):
            self.say("views agree", f"{name} complains: {router.requests.leases.problem}")


def probes(judge: Judge) -> None:
    """Goodput after healing: whoever can be answered is."""
    asked = [
        client
        for client in judge.seen.clients
        if "probe" in client.ask.of
        and (able := judge._able(client.ask))
        and not (client.outcome == "saturated" and judge._crowded(client, able))
    ]
    good = sum(client.outcome == "ok" for client in asked)
    if asked and good < 0.95 * len(asked):
        bad = [
            (client.number, client.outcome, client.detail[:100])
            for client in asked
            if client.outcome != "ok"
        ]
        judge.say("all is well again", f"{good} of {len(asked)}: {bad[:3]}")


def judged(seen: Seen) -> list[str]:
    judge = Judge(seen)
    broken = judge.broken()
    probes(judge)
    return broken


def fingerprint(seen: Seen) -> str:
    """Of all that clients and engines saw: equal for two runs of one seed."""
    text = [
        f"{client.number} {client.outcome} {client.status} {client.ended_at:.9f} {client.text}"
        for client in seen.clients
    ]
    text += [
        f"{name} {answer.number} {answer.at:.9f} {answer.ended_at} {answer.tokens}"
        for name, engine in seen.engines.items()
        for answer in engine.answers
    ]
    text += [f"{job.record} {job.lines}" for job in seen.jobs]
    return hashlib.sha256("\n".join((*text, str(seen.steps))).encode()).hexdigest()


def walk(root: object) -> Iterator[tuple[str, object]]:
    """Everything of ours that hangs on an object, with the names that lead there."""
    todo: deque[tuple[str, object]] = deque([("", root)])
    known: set[int] = set()
    while todo:
        path, thing = todo.popleft()
        if id(thing) in known or isinstance(thing, ATOMS):
            continue
        known.add(id(thing))
        yield path, thing
        if isinstance(thing, dict):
            within = f"{path}[]"
            todo.extend((within, one) for one in thing.values() if type(one) not in ATOMS)
            todo.extend((within, one) for one in thing if type(one) not in ATOMS)
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            within = f"{path}[]"
            todo.extend((within, one) for one in thing if type(one) not in ATOMS)
        elif type(thing).__module__.split(".")[0] in ("mesh", "agents", "schemas", "infra"):
            for name in attributes(thing):
                todo.append((f"{path}.{name}", getattr(thing, name, None)))


def attributes(thing: object) -> Iterator[str]:
    yield from getattr(thing, "__dict__", ())
    for cls in type(thing).__mro__:
        slots = getattr(cls, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
