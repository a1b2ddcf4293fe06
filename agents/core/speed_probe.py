"""An engine's prefill speed, measured by the agent itself while the engine is idle.

Where neither the agent's last run nor a profile tells it, the agent sends the engine a short prompt
twice and a long one twice, one after the other, each for one token and each of new random words, so
that nothing of it is cached. The two lengths make the line that routers lean on at first
(`agents.core.known_speed`). First tokens of an engine that has just started come late, so the
quicker of the two counts.

Clients come first. A prompt is sent only while the agent has no request, offline ones too, and the
engine shows none of others. It is stopped when either changes, and sent again AGAIN_S to twice
that later, by chance: two agents beside one engine would stop each other for ever. After STOPS_MAX
stops there is no other try. An engine may compute the step that it is in to its end, so
the long prompt has no more tokens than LONG_S takes at the pace of the one before: where a first
token takes long whatever its prompt, it is reached in steps. An engine that answers
with an error, not in time, or without token counts is not probed again until it serves other
models. One with a role in pairs is probed where it takes whole requests: a prefill engine's answers
leave a KV cache that another one has to fetch, a decode engine's may wait for one.

A probe's prompts are no requests: no table or total of the agent has them, and they are taken out
of the counts of requests that the engine reports, not out of its KV use and its own hit ratio.
Their blocks stay in its cache until others need the room. The twin's agents know their speeds:
there, nothing is probed.

Reads: engine, replica.
Writes: speed.
"""

from collections.abc import Collection
from dataclasses import replace
from math import inf

from agents.core.effects import AgentEffect, LogSpeedProbe, MeasurePrompt, StopMeasuring
from agents.core.events import EngineReading, EngineScraped, PromptMeasured
from agents.core.known_speed import NO_PROMPT, FirstToken, of_probe
from agents.core.loaded_models import is_one_model
from agents.core.made_up_text import made_up_text
from agents.core.state import AgentState, MeasuredPrompt, SpeedTable
from schemas.engine_routes import COMPUTED_PATHS, GENERATING_PATHS
from schemas.ids import ModelId
from schemas.state import PrefillPrior

SHORT_TOKENS, LONG_TOKENS = 32, 2048
TIMES = 2  # each length
SHARE = 4  # a prompt has at most 1 / SHARE of the model's context, and of the KV cache
CONTEXT_UNKNOWN = 4096  # tokens, where the engine shows neither
LONG_MIN = 2 * SHORT_TOKENS  # where no longer prompt is allowed, its time tells no slope
LONG_S = 2.0
LONGER = 4  # times the short prompt, of an engine that needs more than LONG_S for that
# Of idleness before it: clients come in bursts, and agents find out about the paths of an engine.
QUIET_S = 2.0
AGAIN_S = 30.0  # after a prompt that was stopped
STOPS_MAX = 5
LIMIT_S = 30.0  # for an answer
NO_PRIOR = "routers learn its prefill speed from clients' answers alone"


def prior(state: AgentState, models: tuple[ModelId, ...]) -> PrefillPrior | None:
    """Of an engine with these models, as far as anything is known."""
    given, found = state.replica.prior(models), state.speed.known
    if given is None and found is not None and found.is_of(state.replica.engine, models):
        return found.prior
    return given


def scraped(state: AgentState, event: EngineScraped) -> EngineScraped:
    """The same without the prompt that is at the engine, or was when the scrape began."""
    speed = state.speed
    if event.models is not None and speed.enabled:
        models = tuple(name for name in event.models if name not in event.adapters)
        if set(models) != set(speed.models):
            _begin(speed, models)
    if speed.prompt is None and speed.ended_at < event.began_at:
        return event
    return replace(event, reading=_less_one(event.reading))


def decide(state: AgentState, now: float, *, is_free: bool) -> AgentEffect | None:
    """What to do now, before all else; call it at each event while it `is_wanted`. `is_free`: the
    agent takes requests and has none."""
    speed, reading, read_at = state.speed, state.engine.reading, state.engine.read_at
    is_idle = not reading.running and not reading.waiting  # as far as the engine shows
    if not (is_free and is_idle):
        speed.idle_since = inf
        return _stop(speed, now)
    speed.idle_since = min(speed.idle_since, now)
    if speed.prompt is not None or read_at is None or read_at <= speed.ended_at:
        return None
    if now < max(speed.not_before, speed.idle_since + QUIET_S):
        return None
    if not _is_worth_it(state):
        speed.is_wanted = False
        return None
    if not state.engine.loaded.may_ask(speed.models[0], now):
        return None  # it is measured once a client's request has loaded it
    return _send(state)


def ended(state: AgentState, event: PromptMeasured, now: float) -> None:
    """A prompt's answer, or why there is none."""
    speed, usage = state.speed, event.usage
    prompt, speed.prompt, speed.ended_at = speed.prompt, None, now
    assert prompt is not None, "an end without a MeasurePrompt"
    if not prompt.counts:
        if speed.stops >= STOPS_MAX:
            _give_up(state, f"it was stopped {STOPS_MAX} times")
        return
    if event.problem:
        _give_up(state, f"the engine's answer: {event.problem}")
        return
    tokens = usage.prompt_tokens - max(0, usage.cached_tokens)
    if usage.prompt_tokens < 0 or tokens < 1:
        _give_up(state, "its answers count no prompt tokens")
        return
    _take(state, FirstToken(event.seconds, tokens))
    if len(speed.long) == TIMES:
        _conclude(state)


def void(speed: SpeedTable, now: float) -> None:
    """The time of the prompt at the engine, if there is one, is not its own: it is stopped, or the
    agent itself was stopped until now."""
    if speed.prompt is not None and speed.prompt.counts:
        speed.prompt.counts = False
        speed.stops += 1
        speed.not_before = now + AGAIN_S * speed.dice.uniform(1.0, 2.0)


def _begin(speed: SpeedTable, models: tuple[ModelId, ...]) -> None:
    """Other models: nothing is known of them."""
    speed.models = models
    speed.short, speed.long = [], []
    speed.before = NO_PROMPT
    speed.stops, speed.not_before = 0, -inf
    speed.is_wanted, speed.known = speed.enabled, None
    if speed.prompt is not None:
        speed.prompt.counts = False


def _is_worth_it(state: AgentState) -> bool:
    engine, models = state.engine, state.speed.models
    if engine.prefill.line is not None or prior(state, engine.base_models) is not None:
        return False
    is_one = is_one_model(models, engine.cards)
    return _generates(engine.paths) and is_one and _most(state) >= LONG_MIN


def _most(state: AgentState) -> int:
    """Tokens that a prompt may have."""
    card = state.engine.cards.get(state.speed.models[0])
    context = None if card is None else card.max_model_len
    known = [size for size in (context, state.engine.reading.kv_capacity_tokens) if size]
    return min(LONG_TOKENS, min(known, default=CONTEXT_UNKNOWN) // SHARE)


def _send(state: AgentState) -> MeasurePrompt:
    speed = state.speed
    words = short_words = min(SHORT_TOKENS, _most(state) // 4)  # of at most 4 tokens each
    if len(speed.short) == TIMES:
        tokens = _long_tokens(state, speed.before)
        words = max(short_words, tokens * short_words // min(speed.short).tokens)
    speed.prompt = MeasuredPrompt()
    return MeasurePrompt(speed.models[0], made_up_text(speed.dice, words), LIMIT_S)


def _long_tokens(state: AgentState, before: FirstToken) -> int:
    """Of a long prompt, as it may be after that one."""
    in_time = int(LONG_S * before.tokens / max(before.seconds, 1e-6))
    return min(_most(state), max(in_time, LONGER * min(state.speed.short).tokens))


def _take(state: AgentState, one: FirstToken) -> None:
    speed = state.speed
    if len(speed.short) < TIMES:
        speed.short.append(one)
        speed.before = min(speed.short)
    # A prompt of at least twice its length may follow. Not where this one itself, cut short by the
    # engine, is no longer than the one before.
    elif not speed.long and 2 * speed.before.tokens <= one.tokens <= _long_tokens(state, one) // 2:
        speed.before = one
    else:
        speed.long.append(one)


def _stop(speed: SpeedTable, now: float) -> StopMeasuring | None:
    if speed.prompt is None or speed.prompt.stopped:
        return None
    speed.prompt.stopped = True
    void(speed, now)
    return StopMeasuring()


def _conclude(state: AgentState) -> None:
    speed = state.speed
    speed.known = of_probe(state.replica.engine, speed.models, speed.short, speed.long)
    if speed.known is None:
        _give_up(state, "no line fits its times: " + _in_words(speed.short, speed.long))
        return
    speed.is_wanted = False
    text = "the engine's prefill speed by a probe while it was idle: "
    state.emit(LogSpeedProbe(text + _in_words(speed.short, speed.long), known=True))


def _give_up(state: AgentState, why: str) -> None:
    state.speed.is_wanted = False
    state.emit(LogSpeedProbe(f"no speed probe any more, {why}: {NO_PRIOR}", known=False))


def _less_one(reading: EngineReading) -> EngineReading:
    """Without one request, which an idle engine starts before any other."""
    if reading.running:
        return replace(reading, running=reading.running - 1)
    return replace(reading, waiting=reading.waiting - 1) if reading.waiting else reading


def _generates(paths: Collection[str]) -> bool:
    """Whether it generates tokens, by the optional paths that it answers: not where all of those
    that compute only read prompts or recordings."""
    computed = COMPUTED_PATHS.intersection(paths)
    return not computed or not GENERATING_PATHS.isdisjoint(computed)


def _in_words(*both: list[FirstToken]) -> str:
    parts = (f"{one.tokens} tokens in {one.seconds:.3g} s" for one in map(min, both))
    return ", ".join(parts)
