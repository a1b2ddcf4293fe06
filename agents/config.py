"""What an operator decides about one agent, checked: each error says what to give instead."""

import logging
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from agents.core.offline_profile import (
    PROFILE_BYTES_MAX,
    OfflineProfile,
    ProfileInvalid,
    decode_profile,
)
from agents.core.replica_config import AdapterSource
from schemas.ids import MODEL_CHARS_MAX, ModelId, ValidRegionId, ValidReplicaId
from schemas.kv_transfer import KvAddress, KvRole, TransferKind
from schemas.listed_routes import ListedRoutes
from schemas.residency import Label, parse_labels
from schemas.state import ADAPTERS_MAX

log = logging.getLogger(__name__)

NO_LABELS = "none"  # on the command line
BOTH = "both"  # likewise: an engine that answers alone
_ADDRESS_OF = {
    TransferKind.P2P: "host:port of the engine's own KV connector (kv_ip and kv_port)",
    TransferKind.SGLANG: "host:port of the engine's bootstrap server",
}
MODELS_MAX = 128  # with names of MODEL_CHARS_MAX they still fit a heartbeat
BATCH_MAX_MOST = 65_536
OUTSTANDING_MAX_MOST = 4096
ENGINE_KEY = "MESH_ENGINE_KEY"  # of the environment
KEY_CHARS_MAX = 4096
_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group of services may read it

PRIORITY_MOST = 2**31 - 1

EngineKindName = Literal["vllm", "sglang", "llamacpp", "openai"]
ADAPTER_PATH_CHARS_MAX = 1024
RANKS_MAX = 1024
LOAD_S_MAX = 3600.0
WITH_ADAPTERS = ("vllm", "sglang")  # kinds that load adapters while they run
WITH_RANKS = ("vllm", "sglang")  # kinds that take a request for one data-parallel rank
WITH_PRIORITY = ("vllm", "sglang")  # kinds whose requests may have a priority


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


def checked_adapters(texts: object) -> object:
    """Adapters by name, of NAME=PATH[,base=MODEL]. Raises ValueError that says what to give."""
    if isinstance(texts, Mapping):
        return texts
    if not isinstance(texts, Sequence) or len(texts) > ADAPTERS_MAX:
        raise ValueError(f"give at most {ADAPTERS_MAX}")
    known = dict(map(_adapter, texts))
    if len(known) < len(texts):
        raise ValueError("give each adapter once")
    return known


def _adapter(text: str) -> tuple[ModelId, AdapterSource]:
    name, equals, rest = text.partition("=")
    path, _, base = rest.partition(",base=")
    given = (name, base) if ",base=" in rest else (name,)
    if not equals or not 0 < len(path) <= ADAPTER_PATH_CHARS_MAX or not path.isprintable():
        raise ValueError("give it as NAME=PATH or NAME=PATH,base=MODEL")
    names = [checked_models([each])[0] for each in given]
    return names[0], AdapterSource(path, names[1] if len(names) > 1 else None)


IPC_PATH_BYTES_MAX = 100  # of a Unix domain socket, with its end


def checked_kv_address(value: str) -> str:
    """Where an engine publishes KV events. Raises ValueError that says what to give."""
    try:
        parts = urlsplit(value)
        good = value == f"tcp://{parts.netloc}" and bool(parts.port) and "@" not in value
        good = good and parts.hostname not in (None, "*")
    except ValueError:
        good = False
    path = value.removeprefix("ipc://")
    if not good and not (path != value and 0 < len(path.encode()) <= IPC_PATH_BYTES_MAX):
        raise ValueError("give it as tcp://host:port, with the engine's host, or ipc://path")
    return value


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


def _labels(value: object) -> object:
    if isinstance(value, str):
        return () if value == NO_LABELS else parse_labels(value)
    return value


def _role(value: object) -> object:
    return None if value == BOTH else value


def _bus_url(value: str) -> str:
    if not all(url.startswith(("nats://", "tls://")) for url in value.split(",")):
        raise ValueError("give it as nats://host:port; several with commas between")
    return value


class EngineConfig(BaseModel):
    """One engine, as an agent or a profiling run reaches it."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    engine_kind: EngineKindName
    # Where /v1/… is; kept without a trailing slash.
    engine_url: Annotated[str, AfterValidator(checked_engine_url)]
    # The whole page's URL; engine_url + /metrics when not given.
    metrics_url: Annotated[str, AfterValidator(lambda url: url and checked_metrics_url(url))] = ""
    batch_max: Annotated[int, Field(ge=1, le=BATCH_MAX_MOST)] | None = None
    engine_key: SecretStr | None = None  # sent to the engine as a bearer token
    # Of an engine that can't list them.
    models: Annotated[tuple[ModelId, ...], AfterValidator(checked_models)] = ()

    @model_validator(mode="after")
    def _one_login(self) -> "EngineConfig":
        if self.engine_key is not None and "@" in urlsplit(self.engine_url).netloc:
            raise ValueError("give the engine's API key, or a user in its URL, not both")
        return self

    @property
    def metrics_page(self) -> str:
        return self.metrics_url or self.engine_url + "/metrics"


class AgentConfig(EngineConfig):
    region: ValidRegionId
    replica: ValidReplicaId
    nats_url: Annotated[str, AfterValidator(_bus_url)]
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    bus_ca: str | None = None  # who may vouch for the nats-server, as `BusAddress` has it
    # None: the default of the engine's kind (`adapters.engine_kinds`).
    outstanding_max: Annotated[int, Field(ge=1, le=OUTSTANDING_MAX_MOST)] | None = None
    # Three failed scrapes mean DOWN, so this also decides how soon a dead engine is noticed.
    read_interval_ms: Annotated[int, Field(ge=5, le=1000)] = 50
    heartbeat_ms: Annotated[int, Field(ge=10, le=1000)] = 100
    # Before the engine's first answer, or a model's; None: the default of `core.engine_health`.
    load_s: Annotated[float, Field(gt=0, le=LOAD_S_MAX)] | None = None
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    metrics_host: str = "127.0.0.1"  # by default an agent opens nothing to the network
    # 0: no page; None: the first free one of `agents.runtime.metrics.PORTS`.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    ready_file: str | None = None
    # Ask the engine for the token counts of every stream; None: where its kind takes that.
    ask_usage: bool | None = None
    # Paths that clients may call at the engine, beside those of the table of routes.
    routes: ListedRoutes = ()
    # Of its region's residency labels, those that hold here; None: all of them.
    residency: Annotated[tuple[Label, ...] | None, BeforeValidator(_labels)] = None

    # Its part in pairs of engines, how their KV caches are transferred, and where the other engine
    # finds this one; None: it answers alone.
    role: Annotated[KvRole | None, BeforeValidator(_role)] = None
    kv_transfer: TransferKind | None = None
    kv_address: KvAddress | None = None

    # Where the engine publishes KV events, and repeats them; None: it doesn't.
    kv_events: Annotated[str, AfterValidator(checked_kv_address)] | None = None
    kv_events_replay: Annotated[str, AfterValidator(checked_kv_address)] | None = None
    kv_events_topic: Annotated[str, Field(max_length=256)] = ""

    # LoRA adapters that it loads for requests, by name, and how many the engine may have at once;
    # None: it loads none.
    adapters: Annotated[dict[ModelId, AdapterSource], BeforeValidator(checked_adapters)] = {}
    load_adapters: Annotated[int, Field(ge=1, le=MODELS_MAX)] | None = None
    # The one data-parallel rank of the engine that it serves; None: the engine chooses.
    data_parallel_rank: Annotated[int, Field(ge=0, lt=RANKS_MAX)] | None = None

    # How it takes offline work; None: not at all.
    profile: OfflineProfile | None = None
    state_dir: Path | None = None
    speed_probe: bool = True  # where neither tells its speed: measure it while it is idle
    # Of offline requests, in the engine's own field; None: the field is not sent.
    offline_priority: Annotated[int, Field(ge=-PRIORITY_MOST, le=PRIORITY_MOST)] | None = None

    @model_validator(mode="after")
    def _offline(self) -> "AgentConfig":
        if self.profile is not None and self.profile.engine != self.engine_kind:
            raise ValueError(
                f"the profile is of an engine of kind {self.profile.engine}, this one is "
                f"{self.engine_kind}: profile it with mesh-agent profile"
            )
        if self.offline_priority is not None and self.profile is None:
            raise ValueError("--offline-priority is of offline work: give --profile too")
        if self.offline_priority is not None and self.engine_kind not in WITH_PRIORITY:
            kinds = " and ".join(WITH_PRIORITY)
            raise ValueError(f"--offline-priority: engines of kind {kinds} have a priority")
        return self

    @model_validator(mode="after")
    def _pairs(self) -> "AgentConfig":
        kind, role, address = self.kv_transfer, self.role, self.kv_address
        if role is None or kind is None:
            if role is not None:
                raise ValueError(f"--role {role}: say how its KV cache travels with --kv-transfer")
            if kind is not None or address is not None:
                raise ValueError(
                    "--kv-transfer and --kv-address are of a part in pairs: give --role "
                    "prefill or decode too"
                )
            return self
        wanted = "sglang" if kind is TransferKind.SGLANG else "vllm"
        if self.engine_kind != wanted:
            raise ValueError(f"--kv-transfer {kind} is of engines of kind {wanted}")
        needs_address = kind.needs_address(role)
        if needs_address and address is None:
            raise ValueError(f"--kv-transfer {kind}: give {_ADDRESS_OF[kind]} as --kv-address")
        if address is not None and not needs_address:
            raise ValueError(
                f"--kv-address: with --kv-transfer {kind} a {role} engine needs none, leave it out"
            )
        takes_whole = role is KvRole.DECODE and kind.decodes_whole
        if self.profile is not None and not takes_whole:
            raise ValueError(
                f"--profile: a {role} engine with --kv-transfer {kind} takes no whole requests, "
                "and so no offline work: leave it out"
            )
        if self.adapters and not takes_whole:
            raise ValueError(
                f"--adapter: a {role} engine with --kv-transfer {kind} takes no whole requests, "
                "for which alone adapters are loaded: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _loads(self) -> "AgentConfig":
        if bool(self.adapters) != (self.load_adapters is not None):
            raise ValueError("give --adapter and --load-adapters, or neither")
        if self.adapters and self.engine_kind not in WITH_ADAPTERS:
            kinds = " and ".join(WITH_ADAPTERS)
            raise ValueError(f"--adapter: engines of kind {kinds} load adapters while they run")
        if self.adapters and self.models:
            raise ValueError("--adapter: leave out --model, as the engine lists what it has loaded")
        if self.engine_kind == "sglang" and any(":" in name for name in self.adapters):
            raise ValueError("--adapter: SGLang takes what follows a colon for another adapter")
        return self

    @model_validator(mode="after")
    def _rank(self) -> "AgentConfig":
        if self.data_parallel_rank is not None and self.engine_kind not in WITH_RANKS:
            kinds = " and ".join(WITH_RANKS)
            raise ValueError(f"--data-parallel-rank: engines of kind {kinds} have ranks")
        return self

    @model_validator(mode="after")
    def _kv_events(self) -> "AgentConfig":
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_topic):
            raise ValueError("give --kv-events too: where the engine publishes them")
        return self

    @model_validator(mode="after")
    def _logins(self) -> "AgentConfig":
        if (self.nats_user is None) != (self.nats_password is None):
            raise ValueError("give a NATS user and its password (NATS_PASSWORD), or neither")
        return self


class EngineKeyInvalid(ValueError):
    """There is no usable key; the message says where and what to do, and holds nothing of it."""


def engine_key(file: Path | None, environ: Mapping[str, str]) -> SecretStr | None:
    """The engine's API key from the file, else from the environment; None where neither is given.
    Never from a command line, which every user of a machine can read.

    Raises EngineKeyInvalid. A file that others may read is warned of.
    """
    if file is not None:
        return _read(file)
    text = environ.get(ENGINE_KEY)
    return None if text is None else checked_key(text, ENGINE_KEY)


def checked_key(text: str, where: str) -> SecretStr:
    """A key as it stands in `where`, without the line ends after it. Raises EngineKeyInvalid."""
    key = text.rstrip("\r\n")
    if not key:
        raise EngineKeyInvalid(f"{where} is empty: write the engine's API key into it")
    if len(key) > KEY_CHARS_MAX:
        raise EngineKeyInvalid(f"{where} has more than {KEY_CHARS_MAX} characters: no API key")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise EngineKeyInvalid(
            f"{where} must be the engine's API key alone: one line of ASCII characters, no spaces"
        )
    return SecretStr(key)


def _read(file: Path) -> SecretStr:
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            data = opened.read(KEY_CHARS_MAX + 3)  # a line end may follow; more is no key
    except OSError as error:
        raise EngineKeyInvalid(f"{file} can't be read: {error.strerror}") from error
    if mode & _OPEN_TO_OTHERS:
        log.warning("%s may be read or written by others (mode %04o): chmod 600", file, mode)
    return checked_key(data.decode("utf-8", "replace"), str(file))


def offline_profile(file: Path | None) -> OfflineProfile | None:
    """The profile in a file; None where none is given.

    Raises ProfileInvalid, which names the file and what is wrong in it.
    """
    if file is None:
        return None
    try:
        with file.open("rb") as opened:
            data = opened.read(PROFILE_BYTES_MAX + 1)
        return decode_profile(data)
    except OSError as error:
        raise ProfileInvalid(f"{file} can't be read: {error.strerror}") from error
    except ProfileInvalid as error:
        raise ProfileInvalid(f"{file} is no profile: {error}") from error
