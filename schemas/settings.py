"""The settings that people write: mesh.toml's `[routing]` and `[[links]]`, and their parts.

Choices, names and limits are spelled here once. pydantic validates a file with these classes and
makes its JSON Schema of them; `Option` makes options of command lines of their fields; and the
core's `RouterSettings` takes what `RoutingTable.as_settings` gives.

Numbers are strict, as in a JSON Schema: in a file `true` or `"8"` is no number. The texts of a
command line are read by `number_in` first.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from schemas.exchange import SLO_MS_MAX, Priority
from schemas.ids import RegionId, ValidRegionId
from schemas.problems import problem_of

OUTSTANDING_MAX = 100_000  # requests in one replica
PUSHING_PATTERN = r"^(blind|pending|outstanding:0*([1-9][0-9]{0,4}|100000))$"
POLICY_CHARS_MAX = 100
RTT_MS_MAX = 10_000.0
MBIT_PER_S_LEAST = 10.0  # between two regions
MBIT_BYTES = 125_000
MBIT_PER_S_MAX = 1_000_000.0
_TOML = "as mesh.toml says,"  # in the help of options


class Table(BaseModel):
    """One table of mesh.toml: no unknown keys, no changes, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Advice:
    """What to write instead of a refused value; errors inside a list keep their own text."""

    text: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._advise, handler(source))

    def _advise(self, value: object, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            if any(part["loc"] and part["type"] != "missing" for part in error.errors()):
                raise
            raise ValueError(self.text) from None


@dataclass(frozen=True, slots=True)
class Option:
    """A field's text in JSON Schemas and in `--help`, and how its option looks there.

    `default`: what holds without it, where that is not the field's own default. `repeats`: the
    option may be given several times.
    """

    help: str
    metavar: str | None = None
    default: str = ""
    repeats: bool = False

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "description": self.help}


def number_in(text: str) -> float | str:
    """The number that a command line's text is, or the text."""
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_integral)  # 8.0 is an integer to JSON Schema, so it is one to us

UnitRatio = Annotated[float, Field(strict=True, ge=0, le=1)]
Above0 = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
AtLeast0 = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
IntAbove0 = Annotated[int, Field(strict=True, gt=0), WHOLE]
IntAtLeast0 = Annotated[int, Field(strict=True, ge=0), WHOLE]
HopsMax = Annotated[int, Field(strict=True, ge=0, le=1), WHOLE]
# Of a tenant beside others; that of one that is not listed is 1.
TenantWeight = Annotated[float, Field(strict=True, ge=0.01, le=100)]
QueueDelayS = Annotated[float, Field(strict=True, ge=0, le=3600)]
PolicyName = Annotated[str, Field(min_length=1, max_length=POLICY_CHARS_MAX)]
PushingText = Annotated[
    str,
    Field(pattern=PUSHING_PATTERN),
    Advice(f'write "blind", "pending" or "outstanding:N" with N from 1 to {OUTSTANDING_MAX}'),
]


class PushingKind(StrEnum):
    """When a replica may be given more work (SkyWalker 3.3 compares the three)."""

    BLIND = "blind"  # BP: always; the engine queues what it can't run
    OUTSTANDING = "outstanding"  # SP-O: while fewer than N requests are in it or on their way
    PENDING = "pending"  # SP-P: while nothing waits in it, however long requests are


@dataclass(frozen=True, slots=True)
class Pushing:
    """One pushing rule. `outstanding_max`: requests in a replica, for OUTSTANDING alone."""

    kind: PushingKind
    outstanding_max: int = 0

    def __str__(self) -> str:
        if self.kind is PushingKind.OUTSTANDING:
            return f"{self.kind}:{self.outstanding_max}"
        return str(self.kind)


BLIND, PENDING = Pushing(PushingKind.BLIND), Pushing(PushingKind.PENDING)


def parse_pushing(text: str) -> Pushing:
    """Read `blind`, `pending` or `outstanding:N`. Raises ValueError that says what fits."""
    if not re.fullmatch(PUSHING_PATTERN, text):
        raise ValueError(
            f"pushing is blind, pending or outstanding:N with N from 1 to {OUTSTANDING_MAX}, "
            f"not {text[:40]!r}"
        )
    kind, _, most = text.partition(":")
    return Pushing(PushingKind(kind), int(most or 0))


PushingRule = Annotated[
    Pushing, BeforeValidator(lambda rule: parse_pushing(rule) if isinstance(rule, str) else rule)
]


class ContinueStreams(StrEnum):
    """Which streams that break another engine goes on with."""

    OFF = "off"
    EXACT = "exact"  # those whose rest depends on nothing but what was said
    SEEDED = "seeded"  # also those that sample with a seed, which is begun anew


class RoutingScope(StrEnum):
    """Which regions a region's requests may go to."""

    MESH = "mesh"
    REGION_LOCAL = "region-local"


class RoutingTable(Table):
    """`[routing]`: how routers place requests. A region's keys go before the mesh's."""

    policy: Annotated[
        PolicyName | None, Option("How requests are placed.", "NAME[:OPTIONS]", f"{_TOML} or mesh")
    ] = None
    policy_by_priority: Annotated[
        dict[Priority, PolicyName], Option("Other policies for classes of requests.")
    ] = Field(default_factory=dict)
    pushing: Annotated[
        PushingText | None,
        Option(
            "When a replica may be given more work: blind, pending or outstanding:N.",
            "RULE",
            f"{_TOML} or {PENDING}",
        ),
    ] = None
    topology: Annotated[
        RoutingScope | None,
        Advice(
            'write "mesh" or "region-local"; one router for all regions is known to the simulator '
            "only (mesh sim --topology)"
        ),
        Option("region-local: requests stay in the region, and no peer's are taken."),
    ] = None
    hops_max: Annotated[
        Annotated[HopsMax, Advice("write 1, or 0 to forward nothing to other regions")] | None,
        Option("1: requests may be forwarded to a peer region; 0: never."),
    ] = None
    queue_delay_s_max: Annotated[
        QueueDelayS | None,
        Option("Requests without an objective that would be held longer are refused; 0: none."),
    ] = None
    own_ttft_goal_ms: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=SLO_MS_MAX), WHOLE] | None,
        Option("Peers' requests are refused if they delay this region's first tokens beyond it."),
    ] = None
    gossip_kib_per_s: Annotated[
        Annotated[int, Field(strict=True, ge=0, le=65_536), WHOLE] | None,
        Option("Prefix gossip on each link; 0: none, between routers of one region neither."),
    ] = None

    def over(self, whole: "RoutingTable") -> "RoutingTable":
        """This table, and the keys of `whole` that it does not set."""
        own = {name: value for name, value in self if value is not None}
        classes = {**whole.policy_by_priority, **self.policy_by_priority}
        return whole.model_copy(update={**own, "policy_by_priority": classes})

    def as_settings(self) -> dict[str, Any]:
        """What is set here as fields of the core's `RouterSettings`, in their units."""
        kib, goal_ms = self.gossip_kib_per_s, self.own_ttft_goal_ms
        found: dict[str, Any] = {
            "policy": self.policy,
            "policy_by_priority": tuple(self.policy_by_priority.items()),
            "pushing": self.pushing,
            "hops_max": self.hops_max,
            "queue_delay_s_max": self.queue_delay_s_max,
            "own_ttft_goal_s": None if goal_ms is None else goal_ms / 1000,
            "trie_bytes_per_s": None if kib is None else 1024 * kib,
            "siblings_bytes_per_s": 0 if kib == 0 else None,
        }
        return {name: value for name, value in found.items() if value is not None}


# Keys that an operator may order for running routers. Others are built into what routers agree on
# with each other, or allocate at their start.
ORDERED_KEYS = (
    "policy",
    "policy_by_priority",
    "pushing",
    "hops_max",
    "queue_delay_s_max",
    "own_ttft_goal_ms",
)


def ordered_table(keys: Mapping[str, Any]) -> RoutingTable:
    """An operator's choices for running routers. Raises ValueError that names key and remedy."""
    for name in keys:
        if name not in ORDERED_KEYS:
            is_known = name in RoutingTable.model_fields
            why = "can't change in a running router" if is_known else "is no key of [routing]"
            there = ", ".join(ORDERED_KEYS)
            raise ValueError(f"{name[:POLICY_CHARS_MAX]} {why}; there are {there}")
    try:
        return RoutingTable.model_validate(dict(keys))
    except ValidationError as error:
        raise ValueError(problem_of(error)) from error


class LinkTable(Table):
    """`[[links]]`: two regions and the round trip between them."""

    between: Annotated[
        Annotated[
            tuple[ValidRegionId, ValidRegionId],
            Advice('write two region names, like ["eu", "us"]'),
        ],
        Option("The two regions."),
    ]
    rtt_ms: Annotated[
        Annotated[float, Field(strict=True, ge=0, le=RTT_MS_MAX)],
        Option("Round trip between them; `mesh up` delays the link by it."),
    ]
    mbit_per_s: Annotated[
        Annotated[float, Field(strict=True, ge=1, le=MBIT_PER_S_MAX)],
        Option(
            "What it carries each way, or its part of what several share: gossip of prefixes takes "
            "a sixteenth of it at most, digests an eighth."
        ),
    ] = MBIT_PER_S_LEAST

    @property
    def acceptor(self) -> RegionId:
        """The region whose nats-server listens for this link."""
        return min(self.between)

    @property
    def solicitor(self) -> RegionId:
        """The region whose nats-server dials, and dials again after a cut."""
        return max(self.between)

    @property
    def rtt_s(self) -> float:
        return self.rtt_ms / 1000

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_per_s * MBIT_BYTES
