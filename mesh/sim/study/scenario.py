"""The settings that all studies have: the requests, the engines and the network.

Field names are option names, so that an error can name the option, and options are made of the
fields (`mesh.cli.modelled`). Texts of options (`a,b`, `us=4,eu=2`) are parsed before a field's own
validation, so a value that is not text is left as it is.

A region's engines are one profile, or a pattern of several, assigned in turn:
`l4-llama3.1-8b*3+h100-llama3.1-8b` gives every fourth replica an H100. A pattern has no counts, so
the same mix holds for every number of replicas that a sweep or a plan tries.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from agents.sim.profile_files import find_profile
from agents.sim.profiles import PROFILES, Profile
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import make_policy
from mesh.replay.schedule import ASSIGNMENTS
from mesh.replay.settings import Assignment, CheckedRegion, Positive, one_of
from mesh.sim.offline.jobs import JOBS_MAX, SimJob, make_job, parse_offline
from mesh.sim.rtt import RttInvalid, RttTable, load_rtt
from mesh.sim.twin_policies import checked_twin_policy
from mesh.sim.workload import Workload
from mesh.sim.workloads import WORKLOADS
from mesh.sim.workloads.capacity import speed_for_load
from mesh.sim.workloads.traces import TRACE_FORMATS
from schemas.ids import RegionId
from schemas.problems import checked_choice, what_it_must_be
from schemas.settings import Option, number_in, parse_pushing

PATTERN_MAX = 1000  # replicas before a pattern begins again
REPLICAS_MAX = 10_000  # of one region
EVERYWHERE = ""  # the key of the pattern for regions that have none of their own

Fleets = Mapping[RegionId, Sequence[Profile]]
DEFAULT_RTT = "default"
DEFAULT_PROFILE = "l4-llama3.1-8b"
# What --setting may name: the others have options of their own.
_SETTING_NAMES = tuple(
    field.name
    for field in fields(RouterSettings)
    if field.name
    not in (
        *("policy", "policy_by_priority", "pushing"),
        *("digest_s", "digest_rest_s", "ground"),
    )
)


def parse_pattern(text: str) -> tuple[str, ...]:
    """`A*3+B` as the names A, A, A, B. Raises ValueError that names the known profiles."""
    names: list[str] = []
    for part in text.split("+"):
        name, star, times = part.strip().partition("*")
        find_profile(name)
        if star and not re.fullmatch(r"[1-9][0-9]{0,3}", times):
            raise ValueError(f"{part!r}: write PROFILE*NUMBER, with a number from 1 to 9999")
        names += [name] * (int(times) if star else 1)
    if len(names) > PATTERN_MAX:
        raise ValueError(f"a pattern of {len(names)} replicas is longer than {PATTERN_MAX}")
    return tuple(names)


def deal(patterns: Mapping[str, tuple[str, ...]], replicas: Mapping[RegionId, int]) -> Fleets:
    """Each region's engines: its own pattern, or the one for everywhere, from its beginning."""
    return {
        region: [
            find_profile(name)
            for name in islice(cycle(patterns.get(region, patterns[EVERYWHERE])), count)
        ]
        for region, count in replicas.items()
    }


def speed_for_fleets(workload: Workload, fleets: Fleets, load: float) -> float:
    """The speed at which the workload is `load` (1 = full) of all these engines together.

    An engine's share of the work is taken to be its share of the capacity, so speeds add up over
    kinds of engines. Raises ValueError for a closed loop, which has no speed.
    """
    engines = Counter(engine for fleet in fleets.values() for engine in fleet)
    return sum(speed_for_load(workload, one, count, load) for one, count in engines.items())


def listed(value: object) -> object:
    """`a,b` as a list. Raises ValueError for an empty part or one that is there twice."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError(f"{value!r} has an empty part: write A or A,B")
    return unique(parts)


def paired(value: object) -> object:
    """`us=4,eu=2` as a dict. Raises ValueError for what is no pair or is there twice."""
    parts = listed(value)
    if not isinstance(value, str) or not isinstance(parts, list):
        return value
    pairs = [part.partition("=") for part in parts]
    for name, _, text in pairs:
        if not name or not text:
            raise ValueError(f"{value!r}: write REGION=NUMBER, and a comma before the next")
    unique([name for name, _, _ in pairs])
    return {name: text for name, _, text in pairs}


def unique(parts: Iterable[str]) -> list[str]:
    """The parts. Raises ValueError that names one that is there twice."""
    found: list[str] = []
    for part in parts:
        if part in found:
            raise ValueError(f"{part} is named twice")
        found.append(part)
    return found


def checked_policy(name: str) -> str:
    """A policy that can be made. Raises ValueError that names the known ones."""
    make_policy(name, RouterSettings(), Random(0))
    return name


def checked_file(path: Path) -> Path:
    """A file that can be written when all is done. Raises ValueError."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: give a file in a folder that exists")
    return path


def _checked_rtt(text: str) -> str:
    if text != DEFAULT_RTT:
        load_rtt(Path(text))
    return text


def _by_region(value: object) -> object:
    """`NAME` or `REGION=NAME`, each region once, as a dict."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, tuple | list):
        return value
    pairs = [text.rpartition("=") for text in value]
    unique([region or "the profile for every region" for region, _, _ in pairs])
    return {region: parse_pattern(pattern) for region, _, pattern in pairs}


def _by_name(value: object) -> object:
    """`NAME=VALUE` texts, each name once, as a dict."""
    if not isinstance(value, tuple | list):
        return value
    pairs = [text.partition("=") for text in value]
    unique([name for name, _, _ in pairs])
    return {name.replace("-", "_"): text for name, _, text in pairs}


def _in_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def checked_offline(jobs: tuple[str, ...]) -> tuple[str, ...]:
    """Jobs that can be read. Raises ValueError that names the one to change."""
    if len(jobs) > JOBS_MAX:
        raise ValueError(f"{len(jobs)} jobs are more than {JOBS_MAX}")
    for spec in map(parse_offline, jobs):
        if isinstance(spec.source, Path) and not spec.source.is_file():
            raise ValueError(f"{spec.source} is no file; write one, or a number of lines")
    return jobs


TwinPolicy = Annotated[str, AfterValidator(checked_twin_policy)]
TwinPushing = Annotated[str, AfterValidator(lambda text: str(parse_pushing(text)))]
OutFile = Annotated[Path, AfterValidator(checked_file)]
RegionCounts = Annotated[
    dict[CheckedRegion, Annotated[int, Field(ge=0, le=REPLICAS_MAX)]], BeforeValidator(paired)
]
From1 = Annotated[int, Field(ge=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]


class Scenario(BaseModel, ABC):
    """One workload, or one trace, and the world that it is played in; a study names the regions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace: Annotated[
        Path | None, Option("Play this recorded trace; or else give --workload.", "PATH")
    ] = None
    format: Annotated[
        str,
        one_of("format", TRACE_FORMATS),
        Option(f"How the trace is written: {', '.join(TRACE_FORMATS)}.", "FORMAT"),
    ] = "mooncake"
    workload: Annotated[
        Annotated[str, one_of("workload", WORKLOADS)] | None,
        Option(f"Play generated requests instead of a trace: {', '.join(WORKLOADS)}.", "WORKLOAD"),
    ] = None
    clients: Annotated[
        RegionCounts | None,
        Option("Clients of a workload, per region.", "REGION=N,…", "the workload's own"),
    ] = None
    rate_per_s: Annotated[
        Positive | None,
        Option(
            "Requests of a workload per second, whatever the mesh does (an open loop). Without it "
            "most workloads are closed loops: a client sends its next request after the answer.",
            "X",
        ),
    ] = None
    duration_s: Annotated[
        Positive | None,
        Option("For how long a workload's clients begin new requests.", "S", "the workload's own"),
    ] = None
    weight: Annotated[
        dict[CheckedRegion, Positive],
        BeforeValidator(paired),
        Option("Regions' shares of a trace's requests.", "REGION=X,…", "equal"),
    ] = Field(default_factory=dict)
    assign: Annotated[
        Assignment,
        Option(f"How a trace's requests are given to regions: {', '.join(ASSIGNMENTS)}.", "HOW"),
    ] = "hash"
    speed: Annotated[Positive | None, Option("Factor on the rate of the requests.", "X", "1")] = (
        None
    )
    scale_lengths: Annotated[
        float,
        Field(gt=0, le=1),
        Option("Factor on the lengths of a trace's prompts and answers, up to 1.", "X"),
    ] = 1.0
    limit: Annotated[From1 | None, Option("Play only the first N requests.", "N")] = None
    seed: Annotated[int, Field(ge=0), Option("Seed of all random choices.", "N")] = 0
    setting: Annotated[
        dict[str, str],
        BeforeValidator(_by_name),
        Option(
            "Any other setting of the routers, by its name in RouterSettings. Repeatable.",
            "NAME=VALUE",
            repeats=True,
        ),
    ] = Field(default_factory=dict)
    profile: Annotated[
        dict[str, tuple[str, ...]],
        BeforeValidator(_by_region),
        Option(
            f"The replicas' engines: {', '.join(PROFILES)}, or a .json file of `mesh-agent profile "
            "--calibrate`. A mix is written A*3+B and assigned in turn; REGION=PROFILE is for one "
            "region. Repeatable.",
            "[REGION=]PROFILE",
            DEFAULT_PROFILE,
            repeats=True,
        ),
    ] = Field(default_factory=dict[str, tuple[str, ...]])
    rtt: Annotated[
        str,
        AfterValidator(_checked_rtt),
        Option(
            "Round trips between regions: a mesh.toml, or a .toml file with its [[links]] alone.",
            "default|FILE",
            "us-eu 80 ms, us-ap 150 ms, eu-ap 220 ms",
        ),
    ] = DEFAULT_RTT
    heartbeat_ms: Annotated[Milliseconds, Option("Time between heartbeats of a replica.", "MS")] = (
        100.0
    )
    gossip_ms: Annotated[
        Annotated[float, Field(ge=0, le=3_600_000)] | None,
        Option("Time between digests and prefix deltas of a region; 0: at once.", "MS", "100"),
    ] = None
    loss: Annotated[
        ShareBelow1, Option("Share of heartbeats, digests and pings that are lost.", "X")
    ] = 0.0
    jitter_ms: Annotated[
        Annotated[float, Field(ge=0, le=10_000)],
        Option("Mean extra delay between regions, exponential.", "MS"),
    ] = 0.0
    timeout_s: Annotated[Positive, Option("A client hangs up after this.", "S")] = 600.0
    warmup_s: Annotated[
        Annotated[float, Field(ge=0, allow_inf_nan=False)],
        Option("Requests that begin earlier are played and not reported.", "S"),
    ] = 0.0

    offline: Annotated[
        Annotated[tuple[str, ...], AfterValidator(checked_offline)],
        BeforeValidator(_in_tuple),
        Option(
            "A batch job beside the online requests: a batch file, or a number of lines that are "
            "made, then options as prompt=1000,answer=150,shared=800,groups=20,window=2h,at=60 "
            "(tokens, beginnings that lines share, the time to answer them, when it is submitted). "
            "Repeatable.",
            "[REGION=]FILE|LINES[,…]",
            "none",
            repeats=True,
        ),
    ] = ()
    offline_budget_ms: Annotated[
        Milliseconds | None,
        Option("The longest iteration that agents accept for offline work.", "MS", "by the engine"),
    ] = None

    @property
    @abstractmethod
    def region_names(self) -> tuple[RegionId, ...]:
        """The regions of this study, in the order in which they were named."""

    @property
    def rtt_table(self) -> RttTable:
        """The round trips. Raises RttInvalid if the file has changed since it was checked."""
        return RttTable() if self.rtt == DEFAULT_RTT else load_rtt(Path(self.rtt))

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """Each region's profiles, and those of regions that have none of their own."""
        return {EVERYWHERE: (DEFAULT_PROFILE,), **self.profile}

    @property
    def weights(self) -> dict[RegionId, float]:
        """Every region's share of a trace."""
        return {region: self.weight.get(region, 1.0) for region in self.region_names}

    def offline_jobs(self) -> tuple[SimJob, ...]:
        """The batch jobs, with all of their lines. Raises ValueError or OSError."""
        specs = [parse_offline(text) for text in self.offline]
        return tuple(
            make_job(spec, number, self.region_names, self.seed)
            for number, spec in enumerate(specs, 1)
        )

    @property
    def offline_regions(self) -> frozenset[RegionId]:
        """Where the batch jobs are submitted."""
        return frozenset(
            spec.region or self.region_names[0] for spec in map(parse_offline, self.offline)
        )

    def router_settings(self, policy: str, pushing: str) -> RouterSettings:
        """The routers' settings. Raises ValueError that names the one to change."""
        chosen: dict[str, Any] = {"policy": policy, "pushing": pushing}
        chosen |= {name: number_in(value) for name, value in self.setting.items()}
        try:
            return RouterSettings(**chosen)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            given = f"--setting {name}={self.setting[name]}: " if name in self.setting else ""
            raise ValueError(given + what_it_must_be(first)) from error

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.trace is None) == (self.workload is None):
            raise ValueError("give either --trace or --workload")
        only = {
            "--workload": ("clients", "rate_per_s", "duration_s"),
            "--trace": ("format", "weight", "assign", "scale_lengths"),
        }["--trace" if self.trace is None else "--workload"]
        for name in only:
            if name in self.model_fields_set and getattr(self, name) is not None:
                source = "--workload" if self.trace else "--trace"
                raise ValueError(f"--{name.replace('_', '-')} goes with {source}: leave it out")
        return self

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        for name in self.setting:
            checked_choice("setting", name, _SETTING_NAMES)
        self.router_settings(RouterSettings().policy, "pending")
        return self

    def _check_regions(self) -> None:
        known = self.region_names
        for option, names in (
            ("--clients", self.clients or {}),
            ("--weight", self.weight),
            ("--profile", {name: None for name in self.profile if name != EVERYWHERE}),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"{option} names {name}, which is not in --regions: "
                        f"use {', '.join(known)} or add it there"
                    )
        for spec in map(parse_offline, self.offline):
            if spec.region is not None and spec.region not in known:
                raise ValueError(
                    f"--offline has a job in {spec.region}, which is not in --regions: "
                    f"use {', '.join(known)}"
                )
        try:
            self.rtt_table.check(known)
        except RttInvalid as error:
            option = "--rtt" if self.rtt == DEFAULT_RTT else f"--rtt {self.rtt}"
            raise ValueError(f"{option}: {error}") from error
