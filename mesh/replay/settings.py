"""Settings of `mesh replay`: endpoints, trace, speed, and how recorded lengths become text.

Field names are the command's option names, so that an error can name the option to change.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from mesh.replay.schedule import ASSIGNMENTS
from mesh.replay.trace_formats import FORMATS
from schemas.ids import checked_name
from schemas.problems import checked_choice

CheckedRegion = Annotated[str, AfterValidator(lambda name: checked_name("region", name))]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def checked_base(url: str) -> str:
    """An endpoint's base URL without `/v1`. Raises ValueError if it is not HTTP."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{url!r} is no endpoint: write REGION=http://host:port")
    return url.rstrip("/").removesuffix("/v1")


def one_of(kind: str, known: Collection[str]) -> AfterValidator:
    """A text that is one of these names."""
    return AfterValidator(lambda name: checked_choice(kind, name, known))


Assignment = Annotated[str, one_of("rule", ASSIGNMENTS)]


class ReplaySettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[
        dict[CheckedRegion, Annotated[str, AfterValidator(checked_base)]], Field(min_length=1)
    ]
    trace: Path
    format: Annotated[str, one_of("format", FORMATS)] = "mooncake"
    speed: Positive = 1.0
    limit: Annotated[int, Field(ge=1)] | None = None
    out: Path | None = None
    model: str | None = None
    assign: Assignment = "hash"
    weight: dict[CheckedRegion, Positive] = Field(default_factory=dict)
    # Above 1 is refused: blocks longer than recorded would claim more sharing than there was.
    scale_lengths: Annotated[float, Field(gt=0, le=1)] = 1.0
    bytes_per_token: Annotated[float, Field(ge=1, le=64)] = 4.0
    salt: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    timeout_s: Positive = 600.0
    max_in_flight: Annotated[int, Field(ge=1, le=10**9)] = 4096
    api_key: SecretStr | None = Field(default=None, exclude=True)

    @property
    def weights(self) -> dict[str, float]:
        """Every region's share, in the order of the endpoints."""
        return {region: self.weight.get(region, 1.0) for region in self.url}

    @model_validator(mode="after")
    def _weights_have_endpoints(self) -> Self:
        strangers = sorted(self.weight.keys() - self.url.keys())
        if strangers:
            raise ValueError(f"--weight names {strangers[0]}, which has no --url")
        return self

    @model_validator(mode="after")
    def _out_has_a_folder(self) -> Self:
        # An hour's run must not end with "no such directory".
        if self.out and (self.out.is_dir() or not self.out.resolve().parent.is_dir()):
            raise ValueError(f"--out {self.out}: give a file in a folder that exists")
        return self
