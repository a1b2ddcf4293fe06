"""What an engine is, shows and answers, for `mesh-agent probe`: found with the agent's own code.

The names on its metrics page show its kind: no two kinds share one. Without that page, a page of
settings that only one kind has shows it; the engine is then served as any OpenAI-compatible server
until its metrics are switched on.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import orjson

from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_call import UnexpectedAnswer, call_engine, fetched
from agents.adapters.engine_kinds import KINDS, kind_of_page, read_object
from agents.adapters.http_client import HttpBroken, origin
from agents.adapters.listed_models import MODELS_PATH, ListsNoModel, served
from agents.adapters.optional_paths import PATIENCE_S, smallest_request
from agents.core.engine_health import LOAD_S
from agents.core.events import NOTHING_KNOWN, EngineReading, EngineScraped, ScrapeFailed
from agents.core.loaded_models import NO_STATES, LoadedModels, ModelState, States, loads_nothing
from schemas.engine_routes import COMPUTED_PATHS
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS, REGIONS
from schemas.http_statuses import NOT_THIS_PATH, OK, SERVER_ERROR, SUCCESS, TOO_MANY, UNAUTHORIZED
from schemas.ids import ModelId
from schemas.state import KnownRoutes, ModelCard

TIMEOUT_S = 5.0
SCRAPES_MAX = 40  # each finds out about some paths
LOADED_ASKED_MAX = 8  # models that an engine which loads on demand has loaded
LOADED_ASKED_S = 60.0  # all of them
PLAIN = "openai"
# Kinds that have a page of settings, in the order in which they are asked: vLLM in its development
# mode has SGLang's too.
WITH_SETTINGS = ("llamacpp", "vllm", "sglang")
METRICS_BY = {"llamacpp": "--metrics", "sglang": "--enable-metrics", "vllm": "its metrics page"}


SAID_CHARS_MAX = 200  # of an error, for a person
# Until one is answered: what the most engines are for comes first.
TRIED = tuple(dict.fromkeys((CHAT, COMPLETIONS, EMBEDDINGS, *sorted(COMPUTED_PATHS))))


class NoEngine(Exception):
    """There is no engine at that URL; the message says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How the engine answered tiny requests for one of its models. `answered`: the first path that
    it answered well, if any; `problem`: of `path`, the first that it did not."""

    model: ModelId
    answered: str | None
    path: str = ""
    problem: str = ""
    is_full: bool = False  # it answered 429: that tells nothing

    @property
    def serves_nobody(self) -> bool:
        return self.answered is None and not self.is_full


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was found. `kind`: for `--engine-kind`. `seen_kind`: what it is, though it may show no
    metrics. `unsettled`: paths of which it could not be found out whether they are answered;
    `unfinished`: loaded models of which it could not be found out which ones they answer."""

    kind: str
    seen_kind: str
    version: str | None
    models: tuple[ModelId, ...]
    cards: Mapping[ModelId, ModelCard]
    paths: tuple[str, ...]
    unsettled: tuple[str, ...]
    reading: EngineReading
    untold: tuple[str, ...] = ()  # paths that its server has; of its models, requests tell
    lacking: Mapping[ModelId, tuple[str, ...]] = field(default_factory=dict)
    loaded: Mapping[ModelId, bool] | None = None  # of each model; None where it does not say
    failed: Mapping[str, int] = field(default_factory=dict)  # the server error, by path
    unfinished: tuple[ModelId, ...] = ()
    is_listed: bool = True  # else its one model is the one that was to be tried
    trial: Trial | None = None  # none where a request might have made it load a model

    @property
    def serves_nobody(self) -> bool:
        return self.trial is not None and self.trial.serves_nobody

    @property
    def shown(self) -> dict[str, bool]:
        """Each signal of a metrics page, and whether it is there."""
        unset = NOTHING_KNOWN
        names = [one.name for one in fields(EngineReading)]
        return {name: getattr(self.reading, name) != getattr(unset, name) for name in names}


async def examined(
    url: str, metrics_url: str, key: str | None, model: ModelId | None = None
) -> EngineFacts:
    """The engine there. `metrics_url`: its page; `model`: one to try, though it may have to load
    it. Raises NoEngine."""
    page = await _page(metrics_url, "", key if origin(url) == origin(metrics_url) else None)
    models_status, listed = await _required(url, MODELS_PATH, key)
    if _lists_regions(await _page(url, REGIONS, key)):
        raise NoEngine(f"{url} is a router of a mesh: give the URL of an engine behind it")
    if models_status == UNAUTHORIZED:
        raise NoEngine(f"{url} requires an API key: give it with --engine-key-file")
    if models_status != OK:
        raise NoEngine(
            f"{url}{MODELS_PATH} answers HTTP {models_status}: there is a server, but no engine "
            "with OpenAI's API; give the URL without /v1"
        )
    given = () if model is None or _lists_some(listed) else (model,)
    options = EngineOptions(key=key, scrape_timeout_s=TIMEOUT_S, models=given)
    kind, seen = await _kinds(page, listed, url, key)
    clock = asyncio.get_running_loop().time
    client = EngineClient(url, metrics_url, KINDS[kind], clock, options)
    try:
        facts = await _scraped(client, kind, seen, model)
    finally:
        client.close()
    version = facts.version or await _version(url, key, seen)
    return replace(facts, version=version, is_listed=not given)


async def recognised(url: str, metrics_url: str, key: str | None) -> str | None:
    """The kind of the engine there; None while none answers."""
    try:
        status, listed = await _required(url, MODELS_PATH, key)
    except NoEngine:
        return None
    if status >= SERVER_ERROR:  # it loads
        return None
    page = await _page(metrics_url, "", key if origin(url) == origin(metrics_url) else None)
    return (await _kinds(page, listed, url, key))[1]


async def _kinds(page: bytes | None, listed: bytes, url: str, key: str | None) -> tuple[str, str]:
    """The kind to serve it as, by its page of metrics, and the kind that it is."""
    kind = None if page is None else kind_of_page(page.decode("utf-8", "replace"))
    if kind is not None:
        return kind, kind
    try:
        owner = served(listed, MODELS_PATH).owner
    except UnexpectedAnswer:
        owner = None
    return PLAIN, await _by_settings(url, key, owner)


def _lists_some(page: bytes) -> bool:
    try:
        return bool(served(page, MODELS_PATH).names)
    except ListsNoModel:
        return False
    except UnexpectedAnswer:
        return True  # that is told


def _lists_regions(page: bytes | None) -> bool:
    """Whether it is a router's list: some engines answer 200 to any path."""
    if page is None:
        return False
    try:
        rows = orjson.loads(page)["data"]
        return bool(rows) and all("home" in row for row in rows)
    except (ValueError, TypeError, KeyError):
        return False


async def _by_settings(url: str, key: str | None, owner: str | None) -> str:
    """`owner`: as its models are listed. Others have such pages too: TensorRT-LLM has vLLM's."""
    for kind in WITH_SETTINGS if owner is None else {*WITH_SETTINGS} & {owner}:
        page = await _settings(url, key, kind)
        if page is not None and KINDS[kind].version(page):  # some answer 200 to any path
            return kind
    return PLAIN


async def _settings(url: str, key: str | None, kind: str) -> bytes | None:
    """The page of settings of an engine of that kind; None where there is none."""
    for path in KINDS[kind].settings_paths:
        page = await _page(url, path, key)
        if page is not None:
            return page
    return None


async def _scraped(
    client: EngineClient, kind: str, seen: str, asked: ModelId | None
) -> EngineFacts:
    """The same as an agent learns, scrape by scrape. `asked`: first try this model."""
    models: tuple[ModelId, ...] = ()
    cards: Mapping[ModelId, ModelCard] = {}
    reading, states = NOTHING_KNOWN, NO_STATES
    trial = None if asked is None else await _tried(client, asked, LOAD_S)
    for _ in range(SCRAPES_MAX):
        client.refresh_models()
        found = await client.scrape()
        if isinstance(found, ScrapeFailed):
            raise NoEngine(found.detail)
        if found.models is not None:
            models, cards, states = found.models, found.cards, found.states
        reading = found.reading
        if not client.optional.to_try:
            break
    unfinished = await _asked_loaded(client, states)
    if asked is None and (known := await _to_try(client)) is not None:
        trial = await _tried(client, known, PATIENCE_S)
    elif asked is not None and states.get(asked) is not ModelState.LOADED:
        await client.optional.ask_of(asked)
    paths = client.optional.routes.paths
    routes = client.optional.routes.known() or KnownRoutes()
    open_ones = {*client.optional.unknown} & {*routes.unknown}
    unsettled = tuple(sorted(open_ones.difference(paths)))
    return EngineFacts(
        kind=kind,
        seen_kind=seen,
        version=client.version,
        models=models,
        cards=cards,
        paths=paths,
        unsettled=unsettled,
        reading=reading,
        untold=tuple(path for path in routes.unknown if path not in unsettled),
        lacking=routes.lacking,
        loaded={name: states.get(name) is ModelState.LOADED for name in models} if states else None,
        failed=client.optional.failed,
        unfinished=unfinished,
        trial=trial,
    )


async def _asked_loaded(client: EngineClient, states: States) -> tuple[ModelId, ...]:
    """Find out what each loaded model answers, as long as no request loads one; the models of which
    that was not found out."""
    loaded = [name for name, state in states.items() if state is ModelState.LOADED]
    left = loaded[:LOADED_ASKED_MAX]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOADED_ASKED_S):
            for model in tuple(left):
                client.refresh_models()
                found = await client.scrape()
                is_safe = isinstance(found, EngineScraped) and loads_nothing(model, found.states)
                if is_safe and await client.optional.ask_of(model):
                    left.remove(model)
    return tuple(left)


async def _to_try(client: EngineClient) -> ModelId | None:
    """A model that it need not load for a request, by the agent's own rule."""
    client.refresh_models()
    found = await client.scrape()
    if not isinstance(found, EngineScraped) or found.models is None:
        return None
    names = tuple(name for name in found.models if name not in found.adapters)
    loaded = LoadedModels()
    loaded.listed(names, found.cards, found.states, 0.0, unknown=found.states_unknown)
    return next((name for name in names if loaded.may_ask(name, 0.0) and not loaded.loading), None)


async def _tried(client: EngineClient, model: ModelId, timeout_s: float) -> Trial:
    """One tiny chat; where it answers none, others, to the first that it answers. Raises NoEngine
    where it requires a key."""
    first, problem = "", ""
    is_unknown = is_full = False
    for path in TRIED:
        headers, body = smallest_request(path, model)
        try:
            status, page = await call_engine(client.api, "POST", path, timeout_s, body, headers)
        except TimeoutError:
            return Trial(model, None, path, f"no answer within {timeout_s:g} s")
        except (OSError, HttpBroken, UnexpectedAnswer) as error:
            return Trial(model, None, path, str(error) or type(error).__name__)
        if status == UNAUTHORIZED:
            raise NoEngine(f"{client.api.url} requires an API key: give it with --engine-key-file")
        if status in SUCCESS:
            return Trial(model, path, first, problem)
        if not first or (is_unknown and status not in NOT_THIS_PATH):
            first, problem = path, f"HTTP {status}{_said(page)}"
            is_unknown, is_full = status in NOT_THIS_PATH, status == TOO_MANY
    return Trial(model, None, first, problem, is_full)


def _said(page: bytes) -> str:
    """What an error says, for a person."""
    fields = read_object(page)
    error = fields.get("error", fields)
    words = error.get("message", fields.get("detail")) if isinstance(error, dict) else error
    text = words if isinstance(words, str) else page.decode("utf-8", "replace")
    shown = "".join(one if one.isprintable() else " " for one in text)
    shown = " ".join(shown.split())[:SAID_CHARS_MAX]
    return f": {shown}" if shown else ""


async def _version(url: str, key: str | None, kind: str) -> str | None:
    """Of an engine that is served as another kind than it is."""
    if kind == PLAIN:
        return None
    page = await _settings(url, key, kind)
    return None if page is None else KINDS[kind].version(page)


async def _page(url: str, path: str, key: str | None) -> bytes | None:
    """A page; None where there is none."""
    try:
        status, page = await fetched(url, path, key, TIMEOUT_S)
    except (OSError, HttpBroken, UnexpectedAnswer):
        return None
    return page if status == OK else None


async def _required(url: str, path: str, key: str | None) -> tuple[int, bytes]:
    try:
        return await fetched(url, path, key, TIMEOUT_S)
    except TimeoutError as error:
        raise NoEngine(f"{url} does not answer within {TIMEOUT_S:g} s") from error
    except (OSError, HttpBroken, UnexpectedAnswer) as error:
        raise NoEngine(f"{url} can't be reached: {error}; is the engine running there?") from error
