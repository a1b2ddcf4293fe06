"""What every study is told: who asks, with which engines, over which network.

Field names are the commands' option names, so that an error can name the option to change.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from mesh.core.policies import make_policy
from mesh.core.region.pushing import parse_pushing
from mesh.core.settings import RouterSettings
from mesh.core.waiting.hold_order import HoldOrder
from mesh.replay.settings import Positive, Region, checked_assignment
from mesh.sim.rtt import RttInvalid, RttTable, load_rtt
from mesh.sim.study.fleet import EVERYWHERE, REPLICAS_MAX, parse_pattern
from mesh.sim.study.written import paired, unique
from mesh.sim.twin_policies import checked_twin_policy
from mesh.sim.workloads import WORKLOADS
from mesh.sim.workloads.from_trace import TRACE_FORMATS
from schemas.ids import RegionId
from schemas.plain_words import what_it_must_be

DEFAULT_RTT = "default"
DEFAULT_PROFILE = "l4-llama3.1-8b"
_CHOSEN_ELSEWHERE = ("policy", "policy_by_priority", "pushing", "hold_order", "digest_s")


def checked_choice(kind: str, name: str, known: tuple[str, ...]) -> str:
    """The name, if it is known. Raises ValueError that names those that are."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: use one of {', '.join(known)}")
    return name


def checked_policy(name: str) -> str:
    """A policy that can be made. Raises ValueError that names the known ones."""
    make_policy(name, RouterSettings(), Random(0))
    return name


def checked_pushing(text: str) -> str:
    """A pushing rule as the core reads it. Raises ValueError that says what fits."""
    return str(parse_pushing(text))


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


Policy = Annotated[str, AfterValidator(checked_twin_policy)]
Pushing = Annotated[str, AfterValidator(checked_pushing)]
OutFile = Annotated[Path, AfterValidator(checked_file)]
Count = Annotated[int, Field(ge=0, le=REPLICAS_MAX)]
Counts = Annotated[dict[Region, Count], BeforeValidator(paired)]
Share = Annotated[float, Field(ge=0, lt=1)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]


class Scenario(BaseModel, ABC):
    """One workload, or one trace, and the world that it is played in; a study says where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace: Path | None = None
    format: Annotated[
        str, AfterValidator(lambda name: checked_choice("format", name, TRACE_FORMATS))
    ] = "mooncake"
    workload: (
        Annotated[
            str, AfterValidator(lambda name: checked_choice("workload", name, tuple(WORKLOADS)))
        ]
        | None
    ) = None
    clients: Counts | None = None
    rate_per_s: Positive | None = None
    duration_s: Positive | None = None
    weight: Annotated[dict[Region, Positive], BeforeValidator(paired)] = Field(default_factory=dict)
    assign: Annotated[str, AfterValidator(checked_assignment)] = "hash"
    speed: Positive | None = None
    scale_lengths: Annotated[float, Field(gt=0, le=1)] = 1.0
    limit: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    hold_order: HoldOrder = HoldOrder.FIRST_COME
    setting: Annotated[dict[str, Any], BeforeValidator(_by_name)] = Field(default_factory=dict)
    profile: Annotated[dict[str, tuple[str, ...]], BeforeValidator(_by_region)] = Field(
        default_factory=dict[str, tuple[str, ...]]
    )
    rtt: Annotated[str, AfterValidator(_checked_rtt)] = DEFAULT_RTT
    heartbeat_ms: Milliseconds = 100.0
    gossip_ms: Annotated[float, Field(ge=0, le=3_600_000)] | None = None  # 0: at once
    loss: Share = 0.0
    jitter_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    timeout_s: Positive = 600.0
    warmup_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

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

    def router_settings(self, policy: str, pushing: str) -> RouterSettings:
        """What routers are told. Raises ValueError that names the setting to change."""
        return RouterSettings(
            policy=policy,
            pushing=parse_pushing(pushing),
            hold_order=self.hold_order,
            **_typed(self.setting),
        )

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
        try:
            self.rtt_table.check(known)
        except RttInvalid as error:
            told = "--rtt" if self.rtt == DEFAULT_RTT else f"--rtt {self.rtt}"
            raise ValueError(f"{told}: {error}") from error


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    """Settings by name, read as their fields' types."""
    typed: dict[str, Any] = {}
    defaults = RouterSettings()
    known = {
        name: type(default)
        for name in RouterSettings.__slots__
        if name not in _CHOSEN_ELSEWHERE
        if isinstance(default := getattr(defaults, name), int | float | str)
    }
    for name, value in given.items():
        checked_choice("setting", name, tuple(known))
        try:
            typed[name] = TypeAdapter(known[name]).validate_python(value)
        except ValidationError as error:
            words = what_it_must_be(error.errors()[0])
            raise ValueError(f"--setting {name}={value}: {words}") from error
    return typed
