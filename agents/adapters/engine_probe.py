"""What an engine is and shows, for `mesh-agent probe`: found with the agent's own code.

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
from agents.adapters.engine_kinds import KINDS
from agents.adapters.exchange import UnexpectedAnswer, fetched
from agents.adapters.http_client import HttpBroken, origin
from agents.adapters.listed_models import MODELS_PATH
from agents.core.events import NOTHING_KNOWN, EngineReading, EngineScraped, ScrapeFailed
from agents.core.loaded_models import NO_STATES, ModelState, States, loads_nothing
from schemas.http import REGIONS
from schemas.http_statuses import OK, UNAUTHORIZED
from schemas.ids import ModelId
from schemas.state import KnownRoutes, ModelCard

TIMEOUT_S = 5.0
SCRAPES_MAX = 40  # each finds out about some paths
LOADED_ASKED_MAX = 8  # models that an engine which loads on demand has loaded
LOADED_ASKED_S = 60.0  # all of them
PLAIN = "openai"
# How a page of metrics begins its names; which kinds have a page of settings, in the order in which
# they are asked: vLLM in its development mode has SGLang's too.
PREFIXES = {"vllm": "vllm:", "sglang": "sglang:", "llamacpp": "llamacpp:"}
WITH_SETTINGS = ("llamacpp", "vllm", "sglang")
METRICS_BY = {"llamacpp": "--metrics", "sglang": "--enable-metrics", "vllm": "its metrics page"}


class NoEngine(Exception):
    """There is no engine at that URL; the message says what was found and what to do."""


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

    @property
    def shown(self) -> dict[str, bool]:
        """Each signal of a metrics page, and whether it is there."""
        unset = NOTHING_KNOWN
        names = [one.name for one in fields(EngineReading)]
        return {name: getattr(self.reading, name) != getattr(unset, name) for name in names}


async def examined(url: str, metrics_url: str, key: str | None) -> EngineFacts:
    """The engine there. `metrics_url`: its page. Raises NoEngine."""
    page = await _page(metrics_url, "", key if origin(url) == origin(metrics_url) else None)
    models_status, _ = await _required(url, MODELS_PATH, key)
    if _lists_regions(await _page(url, REGIONS, key)):
        raise NoEngine(f"{url} is a router of a mesh: give the URL of an engine behind it")
    if models_status == UNAUTHORIZED:
        raise NoEngine(f"{url} requires an API key: give it with --engine-key-file")
    if models_status != OK:
        raise NoEngine(
            f"{url}{MODELS_PATH} answers HTTP {models_status}: there is a server, but no engine "
            "with OpenAI's API; give the URL without /v1"
        )
    text = "" if page is None else page.decode("utf-8", "replace")
    lines = tuple(line for line in text.splitlines() if not line.startswith("#"))
    kind = next(
        (kind for kind, name in PREFIXES.items() if any(line.startswith(name) for line in lines)),
        PLAIN,
    )
    seen = kind if kind != PLAIN else await _by_settings(url, key)
    return await _scraped(url, metrics_url, key, kind, seen)


def _lists_regions(page: bytes | None) -> bool:
    """Whether it is a router's list: some engines answer 200 to any path."""
    if page is None:
        return False
    try:
        rows = orjson.loads(page)["data"]
        return bool(rows) and all("home" in row for row in rows)
    except (ValueError, TypeError, KeyError):
        return False


async def _by_settings(url: str, key: str | None) -> str:
    for kind in WITH_SETTINGS:
        if await _settings(url, key, kind) is not None:
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
    url: str, metrics_url: str, key: str | None, kind: str, seen: str
) -> EngineFacts:
    """The same as an agent learns, scrape by scrape."""
    clock = asyncio.get_running_loop().time
    client = EngineClient(
        api_url=url,
        metrics_url=metrics_url,
        kind=KINDS[kind],
        clock=clock,
        options=EngineOptions(key=key, scrape_timeout_s=TIMEOUT_S),
    )
    models: tuple[ModelId, ...] = ()
    cards: Mapping[ModelId, ModelCard] = {}
    reading, states = NOTHING_KNOWN, NO_STATES
    try:
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
        paths = client.optional.routes.paths
        routes = client.optional.routes.known() or KnownRoutes()
        open_ones = {*client.optional.unknown} & {*routes.unknown}
        unsettled = tuple(sorted(open_ones.difference(paths)))
        facts = EngineFacts(
            kind,
            seen,
            client.version,
            models,
            cards,
            paths,
            unsettled,
            reading,
            tuple(path for path in routes.unknown if path not in unsettled),
            routes.lacking,
            {name: states.get(name) is ModelState.LOADED for name in models} if states else None,
            client.optional.failed,
            unfinished,
        )
    finally:
        client.close()
    return replace(facts, version=facts.version or await _version(url, key, seen))


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
