"""What an operator may say about one agent, checked: each error says what to do."""

from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from schemas.ids import MODEL_CHARS_MAX, ModelId, NameInvalid, RegionId, ReplicaId, checked_name
from schemas.residency import Label, parse_labels

NO_LABELS = "none"  # on the command line
MODELS_MAX = 128  # with names of MODEL_CHARS_MAX they still fit a heartbeat
BATCH_MAX_MOST = 65_536
OUTSTANDING_MAX_MOST = 4096
Kind = Literal["vllm", "sglang", "llamacpp", "openai"]


class AgentConfig(BaseModel):
    """One agent's configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    region: RegionId
    replica: ReplicaId
    engine_kind: Kind
    engine_url: str  # where /v1/… is; kept without a trailing slash
    metrics_url: str = ""  # the whole page's URL; engine_url + /metrics when not given
    nats_url: str
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    # None: 256 for engines that show their queue, 8 for those that don't (see adapters.kinds).
    outstanding_max: Annotated[int, Field(ge=1, le=OUTSTANDING_MAX_MOST)] | None = None
    batch_max: Annotated[int, Field(ge=1, le=BATCH_MAX_MOST)] | None = None
    engine_key: SecretStr | None = None  # sent to the engine as a bearer token
    models: tuple[ModelId, ...] = ()  # of an engine that can't list them
    # Three failed readings mean DOWN, so this also says how soon a dead engine is noticed.
    read_interval_ms: Annotated[int, Field(ge=5, le=1000)] = 50
    heartbeat_ms: Annotated[int, Field(ge=10, le=1000)] = 100
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    metrics_host: str = "127.0.0.1"  # an agent opens nothing to the network unasked
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: no page
    ready_file: str | None = None
    # Of its region's residency labels, those that hold here; None: all of them.
    residency: tuple[Label, ...] | None = None

    @field_validator("region", "replica")
    @classmethod
    def _named(cls, value: str) -> str:
        try:
            return checked_name("this", value)
        except NameInvalid as error:
            raise ValueError(str(error)) from error

    @field_validator("residency", mode="before")
    @classmethod
    def _labelled(cls, value: object) -> object:
        if isinstance(value, str):
            return () if value == NO_LABELS else parse_labels(value)
        return value

    @field_validator("engine_url")
    @classmethod
    def _engine_at(cls, value: str) -> str:
        return checked_engine_url(value)

    @field_validator("metrics_url")
    @classmethod
    def _metrics_at(cls, value: str) -> str:
        return checked_metrics_url(value) if value else value

    @field_validator("models")
    @classmethod
    def _models_named(cls, value: tuple[ModelId, ...]) -> tuple[ModelId, ...]:
        return checked_models(value)

    @field_validator("nats_url")
    @classmethod
    def _bus_at(cls, value: str) -> str:
        if not value.startswith(("nats://", "tls://")):
            raise ValueError("give it as nats://host:port")
        return value

    @model_validator(mode="after")
    def _both_or_none(self) -> "AgentConfig":
        if (self.nats_user is None) != (self.nats_password is None):
            raise ValueError("give a NATS user and its password (NATS_PASSWORD), or neither")
        return self

    @model_validator(mode="after")
    def _one_login(self) -> "AgentConfig":
        if self.engine_key is not None and "@" in urlsplit(self.engine_url).netloc:
            raise ValueError("give the engine's API key, or a user in its URL, not both")
        return self

    @property
    def metrics_page(self) -> str:
        return self.metrics_url or self.engine_url + "/metrics"


def checked_engine_url(value: str) -> str:
    """Where an engine is, without a trailing slash. Raises ValueError that says what to give."""
    base = _http_url(value)
    if urlsplit(base).path.endswith("/v1"):
        raise ValueError("give it without /v1: the agent adds the path of each request")
    return base


def checked_metrics_url(value: str) -> str:
    """The whole URL of a page of metrics. Raises ValueError that says what to give."""
    url = _http_url(value)
    return url if urlsplit(url).path else url + "/metrics"


def checked_models(names: Sequence[str]) -> tuple[ModelId, ...]:
    """Names of models, each once. Raises ValueError that says what to give."""
    if any(not 0 < len(name) <= MODEL_CHARS_MAX or not name.isprintable() for name in names):
        raise ValueError(f"give a name of 1 to {MODEL_CHARS_MAX} printable characters")
    if len(names) > MODELS_MAX:
        raise ValueError(f"give at most {MODELS_MAX}")
    return tuple(ModelId(name) for name in dict.fromkeys(names))


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ValueError("give it as http://host:port")
    return value.rstrip("/")
