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
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf
from random import Random

from agents.core import effects, events
from agents.core.effects import AgentEffect
from agents.core.engine_load import EngineLoad
from agents.core.heartbeat import ReplicaConfig
from agents.core.known_speed import FirstToken, KnownSpeed, of_probe
from agents.core.loaded_models import is_one_model
from agents.core.made_up_text import made_up_text
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


@dataclass(slots=True)
class _Prompt:
    """One at the engine."""

    counts: bool = True  # its time is the engine's, for the model that is served now
    stopped: bool = False


class SpeedProbe:
    """Call `decide` at each event while `is_wanted`. `known`: what it found."""

    def __init__(self, replica: ReplicaConfig, engine: EngineLoad) -> None:
        """`engine`: by its scrapes, which `scraped` sees before."""
        self._replica = replica
        self._engine = engine
        self._enabled = replica.probes_speed and replica.computes(None)
        self._dice = Random(replica.epoch)  # another one at each start: no prompt comes twice
        self.known: KnownSpeed | None = None
        self.is_wanted = self._enabled
        self._prompt: _Prompt | None = None  # at the engine now
        self._begin(())
        self._idle_since = inf
        self._ended_at = -inf  # of the last prompt

    def prior(self, models: tuple[ModelId, ...]) -> PrefillPrior | None:
        """Of an engine with these models, as far as anything is known."""
        prior, found = self._replica.prior(models), self.known
        if prior is None and found is not None and found.is_of(self._replica.engine, models):
            return found.prior
        return prior

    def scraped(self, event: events.EngineScraped) -> events.EngineScraped:
        """The same without the prompt that is at the engine, or was when the scrape began."""
        if event.models is not None and self._enabled:
            models = tuple(name for name in event.models if name not in event.adapters)
            if set(models) != set(self._models):
                self._begin(models)
        if self._prompt is None and self._ended_at < event.began_at:
            return event
        return replace(event, reading=_less_one(event.reading))

    def decide(self, now: float, *, is_free: bool) -> list[AgentEffect]:
        """`is_free`: the agent takes requests and has none."""
        if not (is_free and self._is_idle()):
            self._idle_since = inf
            return self._stop(now)
        self._idle_since = min(self._idle_since, now)
        read_at = self._engine.read_at
        if self._prompt is not None or read_at is None or read_at <= self._ended_at:
            return []
        if now < max(self._not_before, self._idle_since + QUIET_S):
            return []
        if not self._is_worth_it():
            self.is_wanted = False
            return []
        if not self._engine.loaded.may_ask(self._models[0], now):
            return []  # it is measured once a client's request has loaded it
        return self._send()

    def ended(self, event: events.PromptMeasured, now: float) -> list[AgentEffect]:
        """A prompt's answer, or why there is none."""
        prompt, self._prompt, self._ended_at = self._prompt, None, now
        assert prompt is not None, "an end without a MeasurePrompt"
        if not prompt.counts:
            often = f"it was stopped {STOPS_MAX} times"
            return [] if self._stops < STOPS_MAX else self._give_up(often)
        if event.problem:
            return self._give_up(f"the engine's answer: {event.problem}")
        tokens = event.usage.prompt_tokens - max(0, event.usage.cached_tokens)
        if event.usage.prompt_tokens < 0 or tokens < 1:
            return self._give_up("its answers count no prompt tokens")
        self._take(FirstToken(event.seconds, tokens))
        return self._conclude() if len(self._long) == TIMES else []

    def restart_clock(self, now: float) -> None:
        """The agent itself was stopped until now: what it measures now is no engine's time."""
        self._void(now)

    def _begin(self, models: tuple[ModelId, ...]) -> None:
        """Other models: nothing is known of them."""
        self._models = models
        self._short: list[FirstToken] = []
        self._long: list[FirstToken] = []
        self._before = FirstToken(0.0, 0)  # whose pace limits the long ones
        self._stops = 0
        self._not_before = -inf
        self.is_wanted, self.known = self._enabled, None
        if self._prompt is not None:
            self._prompt.counts = False

    def _is_idle(self) -> bool:
        """Whether the engine shows no work of others."""
        reading = self._engine.reading
        return not reading.running and not reading.waiting

    def _is_worth_it(self) -> bool:
        engine = self._engine
        models = engine.base_models
        if engine.prefill.line is not None or self.prior(models) is not None:
            return False
        is_one = is_one_model(self._models, engine.cards)
        return _generates(engine.paths) and is_one and self._most() >= LONG_MIN

    def _most(self) -> int:
        """Tokens that a prompt may have."""
        card = self._engine.cards.get(self._models[0])
        context = None if card is None else card.max_model_len
        known = [size for size in (context, self._engine.reading.kv_capacity_tokens) if size]
        return min(LONG_TOKENS, min(known, default=CONTEXT_UNKNOWN) // SHARE)

    def _send(self) -> list[AgentEffect]:
        short_words = min(SHORT_TOKENS, self._most() // 4)  # of at most 4 tokens each
        words = short_words
        if len(self._short) == TIMES:
            tokens = self._long_tokens(self._before)
            words = max(short_words, tokens * short_words // min(self._short).tokens)
        self._prompt = _Prompt()
        prompt = made_up_text(self._dice, words)
        return [effects.MeasurePrompt(self._models[0], prompt, LIMIT_S)]

    def _long_tokens(self, before: FirstToken) -> int:
        """Of a long prompt, as it may be after that one."""
        in_time = int(LONG_S * before.tokens / max(before.seconds, 1e-6))
        return min(self._most(), max(in_time, LONGER * min(self._short).tokens))

    def _take(self, one: FirstToken) -> None:
        if len(self._short) < TIMES:
            self._short.append(one)
            self._before = min(self._short)
        elif not self._long and self._is_step(one):
            self._before = one
        else:
            self._long.append(one)

    def _is_step(self, one: FirstToken) -> bool:
        """Whether a prompt of at least twice its length may follow. Not where this one itself, cut
        short by the engine, is no longer than the one before."""
        return 2 * self._before.tokens <= one.tokens <= self._long_tokens(one) // 2

    def _stop(self, now: float) -> list[AgentEffect]:
        if self._prompt is None or self._prompt.stopped:
            return []
        self._prompt.stopped = True
        self._void(now)
        return [effects.StopMeasuring()]

    def _void(self, now: float) -> None:
        """The time of the prompt at the engine, if there is one, is not its own."""
        if self._prompt is not None and self._prompt.counts:
            self._prompt.counts = False
            self._stops += 1
            self._not_before = now + AGAIN_S * self._dice.uniform(1.0, 2.0)

    def _conclude(self) -> list[AgentEffect]:
        short, long = self._short, self._long
        self.known = of_probe(self._replica.engine, self._models, short, long)
        if self.known is None:
            return self._give_up("no line fits its times: " + _in_words(short, long))
        self.is_wanted = False
        text = "the engine's prefill speed by a probe while it was idle: "
        return [effects.LogSpeedProbe(text + _in_words(short, long), known=True)]

    def _give_up(self, why: str) -> list[AgentEffect]:
        self.is_wanted = False
        return [effects.LogSpeedProbe(f"no speed probe any more, {why}: {NO_PRIOR}", known=False)]


def _less_one(reading: events.EngineReading) -> events.EngineReading:
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
