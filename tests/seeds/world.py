"""A world as lines of text: its parts, what clients ask, and what goes wrong. Made from a seed.

`0.5 engine_dies replica=us-1 for=2.0`: when, what, and of what. Lines at 0 are parts. What goes
wrong lasts `for` seconds. A world without some of its lines is a world too, so it can be shrunk.
"""

from dataclasses import dataclass, field
from random import Random

from tests.seeds.engine import MODES, NO_LOADS

ASKS_S = 4.0  # in which clients come, from BEGINS_S on
BEGINS_S = 1.5
HEALS_S = 5.0  # from the end of the last fault until all is well again
PROBE_S = 1.0  # then, for so long, clients come once more
REGIONS = ("us", "eu", "ap", "sa", "me", "af")
LABELS = ("gdpr", "home")
POLICIES = (
    *("mesh", "mesh", "mesh", "power-of-two", "least-load", "cache-aware", "round-robin"),
    *("consistent-hash", "skywalker", "skywalker-ch", "smg", "llm-d", "gorgo", "e2"),
)
FAULTS = {
    "engine": (*["engine_mode"] * 3, "engine_dies", "engine_stops", "engine_model"),
    "agent": ("agent_dies", "agent_stops", "agent_leaves", "agent_namesake", "stray_work"),
    "runner": ("runner_dies", "runner_stops", "runner_leaves"),
    "router": ("router_dies", "router_stops", "router_leaves", "router_namesake"),
    "link": ("cut", "cut", "cut_one_way", "stall", "flap", "lossy", "late"),
    "bus": ("bus_restarts", "bus_hangs", "store_empties", "streams_stop"),
    "clock": ("clock_steps",),
}
OF_FAULT: dict[str, tuple[str, tuple[object, ...]]] = {
    "engine_mode": ("mode", MODES),
    "engine_model": ("model", ("a", "b")),
    "clock_steps": ("by", (-3600, -5, 5, 3600)),
}
FOR_AT_MOST: dict[str, float] = {"bus_hangs": 8.0, "clock_steps": 0.0, "stray_work": 0.0}
LARGE = "300000"  # of a body that goes to other regions in parts
MANNERS: tuple[tuple[str, float, tuple[object, ...]], ...] = (
    ("plain", 0.2, (1,)),
    ("stamp", 0.25, (1,)),
    ("reads_every", 0.1, (0.4,)),
    ("timeout", 0.15, (1, 3)),
    ("priority", 0.2, ("high", "low")),
    ("slo_ms", 0.1, (200, 2000)),
    ("pad", 0.15, (5_000, 20_000, 120_000, LARGE)),
    ("session", 0.3, ("x", "y", "z")),
)  # of clients: how often, and what of it
ANY = "any"  # a name of several models
ADAPTERS = ("x", "y")
LONG = "400"  # tokens of an answer that goes on long after its client has left
MOVED_S = 9.0  # that a drain with `--move` lasts at least: only long streams go on elsewhere
PARTS = ("mesh", "region", "tenant", "replica", "runner")


@dataclass(frozen=True)
class Line:
    at: float
    what: str
    of: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = (f"{name}={value}" for name, value in self.of.items())
        return " ".join((f"{self.at:g}", self.what, *words))

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.of.get(name, default))

    def labels(self, name: str) -> tuple[str, ...]:
        return tuple(filter(None, self.of.get(name, "").split(",")))

    @property
    def ends_at(self) -> float:
        return self.at + self.number("for")


@dataclass(frozen=True)
class World:
    seed: int
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n".join((f"seed {self.seed}", *map(str, self.lines))) + "\n"

    def all(self, *what: str) -> list[Line]:
        return [line for line in self.lines if line.what in what]

    @property
    def faults(self) -> list[Line]:
        """What goes wrong, in order; operators' orders are among it."""
        return [line for line in self.lines if line.what not in (*PARTS, "ask", "job")]

    @property
    def asks(self) -> list[Line]:
        return self.all("ask")

    @property
    def healed_at(self) -> float:
        """When the last fault is over."""
        return max((line.ends_at for line in self.faults), default=BEGINS_S)

    @property
    def size(self) -> float:
        """What it costs to play: seconds of routers and batch runners, and half of those of
        agents."""
        lasts = max(line.ends_at for line in self.lines)
        routers = sum(line.number("routers") for line in self.all("region"))
        return lasts * (routers + len(self.all("runner")) + len(self.all("replica")) / 2)


def parse(text: str) -> World:
    """A story. Raises ValueError with the first line that is none."""
    seed, lines = 0, []
    for words in (line.split() for line in text.splitlines() if line.strip()):
        try:
            if words[0].startswith("#"):
                continue
            if words[0] == "seed":
                seed = int(words[1])
            else:
                of = dict(word.split("=", 1) for word in words[2:])
                lines.append(Line(float(words[0]), words[1], of))
        except (ValueError, IndexError) as error:
            raise ValueError(f"no line of a story: {' '.join(words)}") from error
    return World(seed, tuple(lines))


def world_of(seed: int) -> World:
    return Maker(seed).world()


class Maker:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = Random(f"world {seed}")
        self.lines: list[Line] = []
        self.routers: list[str] = []
        self.replicas: list[str] = []
        self.models: list[str] = []
        self.regions: list[str] = []
        self.tenants: list[str] = []
        self.runners: list[str] = []

    def add(self, at: float, what: str, **of: object) -> None:
        self.lines.append(
            Line(round(at, 3), what, {name.rstrip("_"): str(one) for name, one in of.items()})
        )

    def world(self) -> World:
        dice = self.dice
        self._parts()
        if dice.random() < 0.1 and self.replicas:
            self._jobs()
        if self.keeps_responses and self.replicas:
            self._conversations()
        is_emptied = not self.runners and dice.random() < 0.1 and self._emptied()
        calm = is_emptied or dice.random() < 0.1
        for _ in range(dice.choice((3, 6, 10, 20))):
            self._ask(BEGINS_S + dice.random() * ASKS_S, self._answer())
        if not is_emptied and dice.random() < (0.5 if self.runners else 0.15):  # many at once
            at = BEGINS_S + dice.random() * ASKS_S
            for _ in range(40):
                self._ask(at + dice.random() * 0.3, {"tokens": 10, "gap": 0.05})
        for _ in range(0 if calm else dice.choice((1, 1, 2, 3, 4, 6))):
            self._fault(BEGINS_S + dice.random() * ASKS_S)
        healed_at = World(self.seed, tuple(self.lines)).healed_at
        for _ in range(2 * len(self.routers)):
            self._ask(
                max(healed_at, BEGINS_S + ASKS_S) + HEALS_S + dice.random() * PROBE_S, {"probe": 1}
            )
        self.lines.sort(key=lambda line: line.at)
        return World(self.seed, tuple(self.lines))

    def _parts(self) -> None:
        dice = self.dice
        self.models = list(("a", "b", "c")[: dice.choice((1, 1, 1, 2, 3))])
        self.regions = list(REGIONS[: dice.choice((1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 6))])
        options: dict[str, object] = {"policy": dice.choice(POLICIES)}
        if dice.random() < 0.3:
            options["pushing"] = dice.choice(("blind", "outstanding:2", "pending"))
        if dice.random() < 0.2:
            options["queue_delay_s_max"] = dice.choice((0, 1, 5))
        if dice.random() < 0.2:
            options["hops_max"] = 0
        options["hold_s_max"] = dice.choice((3, 8, 15))
        options["reads_ms"] = dice.choice((50, 100, 250, 250, 250))
        options["beats_ms"] = dice.choice((100, 200, 200))
        options["digests_ms"] = 100 if len(self.regions) < 3 and dice.random() < 0.3 else 250
        options["ticks_ms"] = dice.choice((50, 100, 100, 100, 100))
        if dice.random() < 0.2:
            options["payload_max"] = 65_536
        if len(self.regions) > 1 and dice.random() < 0.3:
            options["gossip"] = "few"
        if len(self.models) > 1 and dice.random() < 0.4:
            options["alias"] = ",".join(self.models)
        self.asked = self.models + [ANY] * ("alias" in options)
        self.add(0, "mesh", **options)
        self.labelled = dice.random() < 0.35
        self.has_pairs = dice.random() < 0.15
        self.pair = dice.choice(({}, {"kv": "sglang"}, {"kv": "sglang"}))
        self.keeps_responses = dice.random() < 0.15
        self.has_adapters = not self.has_pairs and dice.random() < 0.1
        for region in self.regions:
            self._region(region)
        for name in ("acme", "zed") if dice.random() < 0.25 else ():
            self._tenant(name)

    def _region(self, name: str) -> None:
        dice, few = self.dice, len(self.regions) > 2
        routers = dice.choice((1, 1, 1, 1, 2) if few else (1, 1, 1, 1, 2, 2, 3))
        of: dict[str, object] = {"routers": routers, "far": dice.choice((0.005, 0.02, 0.07))}
        carried = [label for label in LABELS if self.labelled and dice.random() < 0.6]
        if self.labelled:
            of["labels"] = ",".join(carried)
        if carried and dice.random() < 0.3:
            of["confined"] = dice.choice(carried)
        self.add(0, "region", name=name, **of)
        self.routers += [f"{name}.r{n + 1}" for n in range(routers)]
        most = (0, 1, 1, 1) if few else (0, 1, 1, 2, 2, 3)
        for n in range(12 if dice.random() < 0.004 else dice.choice(most)):
            self._replica(name, n, carried)

    def _replica(self, region: str, n: int, carried: list[str]) -> None:
        dice = self.dice
        self.replicas.append(f"{region}-{n}")
        of: dict[str, object] = {
            "model": dice.choice(self.models),
            "slots": dice.choice((1, 2, 4, 8, 8)),
        }
        if self.labelled and dice.random() < 0.2:
            of["labels"] = dice.choice(("none", *carried))
        if dice.random() < 0.3:
            of["probes"] = 1
        if dice.random() < (0.8 if self.has_pairs else 0.3):
            of["prefill_us"] = 100 if self.has_pairs else dice.choice((10, 30, 100))
        if dice.random() < 0.15:
            of["kv_events"] = 1
        if self.has_pairs and dice.random() < 0.8:
            of |= {"role": ("decode", "prefill")[n % 2], **self.pair}
        if self.has_adapters and dice.random() < 0.8:
            of["adapters"] = ",".join(ADAPTERS)
            self.asked += ADAPTERS if ADAPTERS[0] not in self.asked else ()
        if self.keeps_responses and "role" not in of:
            of["responses"] = 1
        self.add(0, "replica", name=self.replicas[-1], region=region, **of)

    def _tenant(self, name: str) -> None:
        dice = self.dice
        of: dict[str, object] = {"weight": dice.choice((0.5, 1, 3))}
        if dice.random() < 0.6:
            of["requests"] = dice.choice((3, 6, 12))
        if dice.random() < 0.5:
            of["at_once"] = dice.choice((1, 2, 5))
        if self.labelled and dice.random() < 0.5:
            of["labels"] = dice.choice(LABELS)
        self.add(0, "tenant", name=name, **of)
        self.tenants.append(name)

    def _jobs(self) -> None:
        dice = self.dice
        self.runners = [f"{region}.b1" for region in self.regions]
        self.runners += [f"{self.regions[0]}.b2"] * dice.choice((0, 1))
        for name in self.runners:
            self.add(0, "runner", name=name)
        for line in self.lines:
            if line.what == "replica" and dice.random() < 0.3:
                line.of["offline"] = "tight"
        for n in range(dice.choice((1, 2))):
            replicas = [line for line in self.lines if line.what == "replica"]
            served = [line.of["model"] for line in replicas if "role" not in line.of] or ["zz"]
            at, lines = BEGINS_S + dice.random() * ASKS_S, dice.choice((1, 4, 12, 40))
            of = {"tokens": dice.choice((3, 10)), "gap": dice.choice((0.005, 0.1, 0.3))}
            of |= {"model": dice.choice(served), "lines": lines}
            if self.tenants:
                of["key"] = dice.choice(self.tenants)
            self.add(at, "job", n=n + 1, router=dice.choice(self.routers[:1]), **of)

    def _conversations(self) -> None:
        """Of two turns, the second of which only the replica of the first can answer; meanwhile
        one is drained, or lost."""
        dice = self.dice
        homes = [name.split("-")[0] for name in self.replicas]
        region = max(homes, key=homes.count)
        routers = [name for name in self.routers if name.startswith(f"{region}.")]
        for _ in range(8):
            self._ask(BEGINS_S + dice.random(), {"responses": 1, "router": dice.choice(routers)})
            first = self.lines[-1].of
            of = {name: value for name, value in first.items() if name != "n"}
            again: dict[str, object] = {
                **of,
                "previous": first["n"],
                "router": dice.choice(self.routers),
            }
            self._ask(BEGINS_S + 2.5 + dice.random() * 2, again)
        replica = dice.choice([name for name in self.replicas if name.startswith(f"{region}-")])
        of = {"replica": replica, "for": "6"}
        if dice.random() < 0.7:
            self.add(BEGINS_S + 1, "drain", region=region, **of)
        else:
            self.add(BEGINS_S + 1, "agent_dies", **of)

    def _emptied(self) -> bool:
        """Operators want one of several replicas of a model empty, which has long streams; whether
        there are several."""
        dice = self.dice
        own = [line.of for line in self.lines if line.what == "replica" and "role" not in line.of]
        several = [
            one
            for one in own
            if sum((of["region"], of["model"]) == (one["region"], one["model"]) for of in own) > 1
        ]
        if not several:
            return False
        of = dice.choice(several)
        routers = [name for name in self.routers if name.startswith(f"{of['region']}.")]
        for _ in range(dice.choice((2, 3, 4))):
            long = {"tokens": 100, "gap": 0.15, "model": of["model"]}
            self._ask(BEGINS_S + dice.random(), {**long, "router": dice.choice(routers)})
        where = {"region": of["region"], "replica": of["name"]}
        self.add(BEGINS_S + 1, "drain", **where, move=1, for_=MOVED_S)
        return True

    def _answer(self) -> dict[str, object]:
        dice = self.dice
        if dice.random() < 0.06:
            return {"tokens": LONG, "gap": 0.15, "leaves": round(1.0 + dice.random() * 4, 3)}
        of: dict[str, object] = {
            "tokens": dice.choice((1, 3, 10, 30, 40)),
            "gap": dice.choice((0.005, 0.03, 0.15)),
        }
        of |= {
            name: dice.choice(values) for name, share, values in MANNERS if dice.random() < share
        }
        if self.has_pairs and dice.random() < 0.4:
            of |= {"pad": 20_000, "timeout": dice.choice((1, 1, 3, 60))}  # which takes engines time
        if dice.random() < 0.2:
            of["leaves"] = round(dice.random() * 2, 3)
        return of

    def _ask(self, at: float, of: dict[str, object]) -> None:
        dice = self.dice
        if self.labelled and dice.random() < 0.4:
            of = {**of, "wants": dice.choice(LABELS)}
        if self.tenants and "probe" not in of:
            of = {**of, "key": dice.choice(self.tenants)}
        model = dice.choice(self.models if "probe" in of else self.asked)
        if dice.random() < 0.02 and "probe" not in of:
            model = "zz"
        number = 1 + sum(line.what == "ask" for line in self.lines)
        of = {"router": dice.choice(self.routers), "model": model, **of}
        self.add(at, "ask", n=number, **of)

    def _fault(self, at: float) -> None:
        dice = self.dice
        lasts = round(dice.choice((0.1, 0.4, 1.0, 2.0, 4.0, 4.0, 10.0)) * (0.5 + dice.random()), 3)
        if dice.random() < 0.003:
            lasts = 120.0
        region = dice.choice(self.regions)
        kinds = ["router", "bus", "order", "clock"]
        kinds += ["runner", "runner", "bus"] if self.runners else []
        kinds += ["engine", "engine", "agent", "agent"] if self.replicas else []
        kinds += ["link", "link"] if len(self.regions) > 1 else []
        kind = dice.choice(kinds)
        if kind == "order":
            self._order(at, region, lasts)
            return
        what = dice.choice(FAULTS[kind])
        of: dict[str, object] = {"region": region}
        if kind in ("engine", "agent"):
            of = {"replica": dice.choice(self.replicas)}
        elif kind == "runner":
            jobs = [line.at for line in self.lines if line.what == "job"]
            at = dice.choice(jobs) + dice.random() * 2  # while it is done
            of = {"runner": dice.choice(self.runners)}
        elif kind == "router":
            router, at, lasts = self._router_at_work(at, lasts)
            of = {"router": router}
        elif kind == "link":
            of = dict(zip(("one", "other"), dice.sample(self.regions, 2), strict=True))
        if what in ("lossy", "cut") and dice.random() < 0.4:
            of = self._large_bodies(at, *map(str, of.values()))
        if what in OF_FAULT:
            name, values = OF_FAULT[what]
            of[name] = dice.choice(values)
        if what == "engine_mode" and dice.random() < 0.7:
            [own] = [line.of for line in self.lines if line.of.get("name") == of["replica"]]
            of["mode"] = NO_LOADS if "adapters" in own else of["mode"]
        self.add(at, what, **of, for_=min(lasts, FOR_AT_MOST.get(what, lasts)))

    def _large_bodies(self, at: float, *ends: str) -> dict[str, object]:
        """They are on their way over a link that fails then: from the end with fewer replicas."""
        one, other = sorted(ends, key=[name.split("-")[0] for name in self.replicas].count)
        for _ in range(4):
            router = self.dice.choice([name for name in self.routers if name.startswith(f"{one}.")])
            self._ask(at - 0.1 + self.dice.random() * 0.2, {"pad": LARGE, "router": router})
        return {"one": one, "other": other}

    def _router_at_work(self, at: float, lasts: float) -> tuple[str, float, float]:
        """One, when it has something to lose: a long answer, or a body that is sent in parts."""
        dice = self.dice
        if lasts > 1 and (long := [line for line in self.lines if line.of.get("tokens") == LONG]):
            return long[0].of["router"], long[0].at + dice.random(), 12.0
        if large := [line for line in self.lines if line.of.get("pad") == LARGE]:
            return large[0].of["router"], large[0].at + dice.random() * 0.1, lasts
        return dice.choice(self.routers), at, lasts

    def _order(self, at: float, region: str, lasts: float) -> None:
        dice = self.dice
        here = [name for name in self.replicas if name.startswith(f"{region}-")]
        what = dice.choice(("drain", "drain", "drain_all", "routing"))
        if what == "routing" or not here:
            self.add(at, "routing", region=region, policy=dice.choice(POLICIES), for_=lasts)
            return
        of: dict[str, object] = {"replica": dice.choice(here)}
        if dice.random() < 0.3:
            lasts = max(lasts, MOVED_S)
            [own] = [line.of for line in self.lines if line.of.get("name") == of["replica"]]
            for _ in range(dice.choice((1, 2, 8))):
                self._ask(
                    max(BEGINS_S, at - dice.random()),
                    {"tokens": 80, "gap": 0.15, "model": own["model"]},
                )
            of["move"] = 1
        if what == "drain_all":
            del of["replica"]
        self.add(at, "drain", region=region, **of, for_=lasts)
