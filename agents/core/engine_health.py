"""Does the engine answer, and does it compute?

It is down after three failed scrapes in a row (a fifth of a second; half of one where it was at
rest) and up after one good scrape. What a scrape amounts to whose pages fail in part is decided in
`agents.core.engine_pages`; where nothing but an answer would show that the engine is up, one small
request is sent. A scrape that *times out* while responses still bring content does not
count: engines serve their metrics from the loop that streams tokens. An engine may also refuse new
connections and finish its streams, so its requests are given up after SILENCE_S without content.
One that was put to sleep is down too until it is woken up, and is not probed.

An engine *hangs* when its HTTP server answers scrapes while its engine process computes nothing.
The signs of work are content of good responses (`agents.core.stream_content`: comments and the like
come from the HTTP server alone), and metrics that rise only with a computed step
(`EngineReading.progress`). While requests are at the engine and no sign comes for longer than its
patience, it hangs.

Patience starts from the longest recent time between two signs while requests were at the engine. A
long prompt may be computed without a sign, so that time is stretched by how much longer the longest
waiting prompt is than any that has begun, and is at least what the learned prefill line predicts;
without a line, S_PER_TOKEN is used. An engine without such metrics, which may answer one request
after the other, hangs only if a probe is not answered either; it gets no new work then, and has
BLIND_GIVEN_UP times the patience for its requests.

A long load is no hang. Before its first answer an engine has FIRST_S, or LOAD_S without such
metrics: it may load its model for the first request. An engine without metrics may also have
unloaded a model that has not answered for LOADED_S, so that a request for it has LOAD_S too, as one
has while the engine's list of models names one that is being loaded.

A false alarm costs little: requests without a byte are placed again and do not count as failed,
running responses get as long once more, and the next alarm comes later. From the alarm on the
engine is probed with one small request at a time until one is answered or another sign comes.
Responses whose client reads slowly do not count: the engine may have finished them long ago.
"""

from typing import NamedTuple

from agents.core.effects import ProbeEngine
from agents.core.events import ScrapeFailed
from agents.core.prefill_speed import PrefillLine
from schemas.engine_routes import COMPUTED_PATHS
from schemas.http import COMPLETIONS
from schemas.ids import ModelId
from schemas.state import ReplicaState

FAILURES_MAX = 3
SILENCE_S = 3.0

FLOOR_S = 4.0  # engines pause for seconds by themselves: to compile, to load an adapter
MARGIN = 3.0  # times the usual
FIRST_S = 10.0  # before the first sign
S_PER_TOKEN = 0.02  # of a prompt, while unmeasured: a slow CPU computes 50 tokens/s
LEARNED_PATIENCE = 2.0  # an alarm teaches at most this many times its patience
# Ollama gives up a load after 300 s (OLLAMA_LOAD_TIMEOUT), llama-swap after 120 s.
LOAD_S = 300.0
LOADED_S = 60.0  # after its last answer a model is taken for loaded
ANSWERED_MODELS_MAX = 128
BLIND_S = 60.0  # without progress metrics: until a probe is sent, which takes its own time to fail
UNSEEN_S_MAX = 10.0  # around failed scrapes, of the time since one sign that is not counted
PROMPT_TOKENS_MIN = 256  # a shorter prompt takes no less time than this one
HALF_LIFE_S = 600.0  # in which the usual is half forgotten
BLIND_GIVEN_UP = 5.0  # without progress metrics: times its patience until its requests are ended
PROBE_GAP_S = 1.0  # from one probe's end to the next
PROBE_TIMEOUT_S = 10.0

ProgressCounters = tuple[float, ...]


class EngineHealth:
    """Whether the engine answers. Fed with every scrape."""

    def __init__(self) -> None:
        self.state = ReplicaState.STARTING
        self.asleep = False  # it is down because it was put to sleep
        self.detail: str | None = None  # of the last scrape, if that failed
        self._failures = 0
        self._down_since = float("-inf")
        self._last_content_at = float("-inf")
        self.wants_proof = False  # that it answers a request

    def succeeded(self, *, wants_proof: bool = False) -> None:
        self._failures = 0
        self.state, self.asleep, self.detail = ReplicaState.READY, False, None
        self.wants_proof = wants_proof

    def slept(self, now: float) -> None:
        """A good scrape of an engine that sleeps: it computes nothing until it is woken up."""
        if not self.asleep:
            self._down_since = now
        self._failures, self.detail = 0, None
        self.state, self.asleep, self.wants_proof = ReplicaState.DOWN, True, False

    def failed(self, event: ScrapeFailed, now: float) -> None:
        self._last_content_at = max(self._last_content_at, event.last_content_at)
        self.wants_proof, self.detail = event.wants_proof, event.detail
        if event.is_up:
            self._failures = 0
            return
        if event.timed_out and event.last_content_at > event.began_at:
            return
        self._failures += 1
        if self._failures >= FAILURES_MAX and self.state is ReplicaState.READY:
            self.state, self._down_since = ReplicaState.DOWN, now

    def restart_clock(self, now: float) -> None:
        """The agent itself was stopped until now: silence counts from here on."""
        self._last_content_at = now

    def lost(self, now: float) -> bool:
        """Whether its running requests can be given up."""
        if self.state is not ReplicaState.DOWN:
            return False
        return now - max(self._down_since, self._last_content_at) >= SILENCE_S


class EngineBacklog(NamedTuple):
    """Requests at the engine. `prompt_tokens`: the longest prompt without a first byte."""

    requests: int
    prompt_tokens: int
    is_loading: bool = False  # the engine loads a model that some of them are for, or may


class HangDetector:
    """Whether the engine computes. Fed with every good scrape, first bytes, and ends of probes."""

    def __init__(self, load_s: float | None = None) -> None:
        """`load_s`: the operator's patience before a first answer; None: by what it shows."""
        self._load_s = load_s
        self._answered_at: dict[ModelId, float] = {}  # by model, the oldest first
        self.hung = False  # it accepts requests and computes none
        self._sign_at = float("-inf")  # the last sign, or the last scrape without a backlog
        self._progress: ProgressCounters = ()
        self._has_backlog = False  # by the last scrape
        self._seen = False  # a sign, ever, while there was a backlog
        self._usual_s = 0.0  # longest time between two signs, as of `_usual_at`
        self._tokens = float(PROMPT_TOKENS_MIN)  # of the longest prompt that has begun, as of then
        self._usual_at = 0.0
        self._scraped_at = float("-inf")  # the last good scrape
        self._scrape_failed = False  # one since then
        self._unseen_s = 0.0  # since the last sign, by which `_sign_at` was moved
        self._alarm_at = float("-inf")  # of the last alarm
        self._patience_s = 0.0  # of the last alarm
        self._given_up_s = 0.0  # after that alarm
        self._suspected = self._is_probing = False
        self._probe_at = float("-inf")  # not before then
        self._example: tuple[str, ModelId] | None = None  # of requests: a path and a model
        self._has_answered = False  # that one

    def silent_s(self, now: float) -> float:
        """How long ago the last sign of work was, while there is a backlog."""
        return now - self._sign_at

    def begun(self, prompt_tokens: int, sent_at: float, now: float) -> None:
        """A response to a prompt of that length has its first byte: a sign between two scrapes."""
        if self.hung:
            return  # the next scrape decides
        self._learn(now - max(sent_at, self._sign_at), now)
        if prompt_tokens > self._tokens:
            self._tokens = float(prompt_tokens)

    def shows_restart(self, progress: ProgressCounters) -> bool:
        """Whether these counters, beside those of the last good scrape, are of a process that
        began since."""
        return any(new < old for old, new in zip(self._progress, progress, strict=False))

    def scraped(
        self,
        progress: ProgressCounters,
        last_content_at: float,
        backlog: EngineBacklog,
        line: PrefillLine | None,
        now: float,
    ) -> bool:
        """Take in a good scrape. True if the engine counts as hung from now on.

        `last_content_at`: of any good response; `line`: the engine's time to first token.
        """
        moved = _rose(self._progress, progress) or last_content_at > self._sign_at
        self._progress = progress
        if self._scrape_failed and not moved:
            self._skip_unseen(now)
        self._scraped_at, self._scrape_failed = now, False
        if moved:
            self._sign(now)
        elif not (self._has_backlog or self._suspected or self.hung):
            self.restart_clock(now)
        self._has_backlog = backlog.requests > 0
        if moved or not self._has_backlog or self._suspected or self.hung:
            return False
        patience_s = self.patience_s(bool(progress), backlog, line, now)
        if now - self._sign_at < patience_s:
            return False
        self._patience_s = self._given_up_s = patience_s
        if progress:
            self._raise_alarm(now)
        else:
            if backlog.is_loading or not self._seen:
                self._given_up_s = max(patience_s, BLIND_GIVEN_UP * BLIND_S)
            else:
                self._given_up_s *= BLIND_GIVEN_UP
            self._suspected = True
        return self.hung

    def patience_s(
        self, has_progress: bool, backlog: EngineBacklog, line: PrefillLine | None, now: float
    ) -> float:
        """Seconds without a sign after which it counts as hung, or is probed."""
        guess_s = S_PER_TOKEN * backlog.prompt_tokens if line is None else 0.0
        load_s = LOAD_S if self._load_s is None else self._load_s
        if not self._seen and has_progress and not backlog.is_loading:
            return (FIRST_S if self._load_s is None else load_s) + guess_s
        if not self._seen:
            return load_s + guess_s
        self._fade(now)
        usual_s = self._usual_s * max(1.0, backlog.prompt_tokens / self._tokens)
        if line is not None and backlog.prompt_tokens:
            usual_s = max(usual_s, line.ttft_s(backlog.prompt_tokens))
        patience_s = (FLOOR_S if has_progress else BLIND_S) + max(guess_s, MARGIN * usual_s)
        return max(patience_s, load_s + guess_s) if backlog.is_loading else patience_s

    def is_given_up(self, now: float) -> bool:
        """Whether its requests can be ended: it hangs for its patience once more, or far longer.

        Without progress metrics an engine that hangs looks like one that computes one long answer
        while the probe waits.
        """
        return self.hung and now - self._alarm_at >= self._given_up_s

    def answered(self, model: ModelId, now: float) -> None:
        """An engine that shows no numbers has answered a request for that model well."""
        self._answered_at.pop(model, None)
        if len(self._answered_at) >= ANSWERED_MODELS_MAX:
            del self._answered_at[next(iter(self._answered_at))]
        self._answered_at[model] = now

    def may_load(self, model: ModelId, sent_at: float) -> bool:
        """Whether an engine that shows no numbers may have to load that model for a request sent
        then."""
        return sent_at - self._answered_at.get(model, float("-inf")) > LOADED_S

    def seen(self, path: str, model: ModelId, *, answered: bool) -> None:
        """A request is about to be sent to the engine, or was `answered` well: an example for
        probes."""
        if path in COMPUTED_PATHS and (answered or self._example is None):
            self._example = path, model
            self._has_answered = answered

    def probe(
        self, models: tuple[ModelId, ...], now: float, *, wants_proof: bool = False
    ) -> ProbeEngine | None:
        """The probe to send now, if any: the smallest request of a kind that it has answered, for
        one of these models, which it serves now. `probed` takes its result.

        `wants_proof`: also if it does not hang. Not before it has answered a request: it might
        have to load the model.
        """
        wants_proof = wants_proof and self._has_answered
        if self._is_probing or now < self._probe_at:
            return None
        if not (self.hung or self._suspected or wants_proof):
            return None
        self._is_probing = True
        models = models or (ModelId(""),)
        path, model = self._example or (COMPLETIONS, models[0])
        return ProbeEngine(path, model if model in models else models[0])

    def probed(self, now: float, *, answered: bool) -> bool:
        """A probe is over. True if the engine counts as hung from now on."""
        self._is_probing = False
        self._probe_at = now + PROBE_GAP_S
        if answered:
            if self.hung or self._suspected:
                self._sign(now)
            return False
        if not self._suspected:
            return False
        self._suspected = False
        self._raise_alarm(now)
        return True

    def scrape_failed(self) -> None:
        """Work could not be seen since the last good scrape, nor can it until the next."""
        self._scrape_failed = True

    def restart_clock(self, now: float) -> None:
        """No sign was due or could be seen until now."""
        self._sign_at, self._unseen_s = now, 0.0

    def _raise_alarm(self, now: float) -> None:
        self.hung, self._alarm_at = True, now

    def _skip_unseen(self, now: float) -> None:
        """The time between two good scrapes with a failed one between them is no silence."""
        unseen_s = now - max(self._scraped_at, self._sign_at)
        unseen_s = min(unseen_s, UNSEEN_S_MAX - self._unseen_s)
        self._sign_at += unseen_s
        self._unseen_s += unseen_s

    def _sign(self, now: float) -> None:
        """It computes. The time that the sign took teaches the usual, also after an alarm: else a
        prompt that raised a false alarm would raise one again and again."""
        gap_s = now - self._sign_at
        if self.hung or self._suspected:
            self._learn(min(gap_s, LEARNED_PATIENCE * self._patience_s), now)
        elif self._has_backlog:
            self._learn(gap_s, now)
        self.restart_clock(now)
        self.hung = self._suspected = False

    def _learn(self, gap_s: float, now: float) -> None:
        self._fade(now)
        self._usual_s = max(self._usual_s, gap_s)
        self._seen = True

    def _fade(self, now: float) -> None:
        factor = 0.5 ** ((now - self._usual_at) / HALF_LIFE_S)
        self._usual_at = now
        self._usual_s *= factor
        self._tokens = max(float(PROMPT_TOKENS_MIN), self._tokens * factor)


def _rose(before: ProgressCounters, after: ProgressCounters) -> bool:
    """Whether any number rose; other numbers are those of another engine, or of a restarted one.
    A page that breaks, or comes back, is no sign."""
    if not (before and after):
        return False
    if len(before) != len(after):
        return True
    return any(new > old for old, new in zip(before, after, strict=True))
