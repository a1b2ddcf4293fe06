"""Does the engine compute? The HTTP server in front of one that hangs goes on answering looks.

vLLM, SGLang and others have an HTTP process and engine processes behind it; when those stop, every
page is served and no request is. So the signs of work are watched: bytes of good answers, and the
numbers of the metrics page that rise only with a computed step (`EngineReading.progress`). While
the engine owes something and no sign has come for longer than is usual for it, it *hangs*.

What is usual is the longest time between two signs, of late, while something was owed. A long
prompt may be computed without a sign, so that time is stretched by how much longer the longest
prompt is that waits than any that has begun before, and is never less than the learned line says;
while no line is known, S_PER_TOKEN stands for it, for a short or cached prompt says nothing of a
long one. Before the first sign nothing is usual; an engine that shows no such numbers, and may
answer one request after the other, is taken to hang only when a probe is not answered either. It
gets no new work then, and BLIND_GIVEN_UP times its patience for what it has.

A false alarm costs little: what has no byte yet is placed again and does not count as failed, what
has begun is left alone for as long once more, and the next alarm waits longer. From the alarm on
the engine is probed with one small request at a time until one is answered, or another sign comes.

Answers whose client reads slowly are not owed: the engine may have computed all of it long ago.
"""

from typing import NamedTuple

from agents.core.prefill import PrefillLine

FLOOR_S = 4.0  # engines stand still for seconds by themselves: to compile, to load an adapter
MARGIN = 3.0  # times what is usual
FIRST_S = 10.0  # before the first sign
S_PER_TOKEN = 0.02  # of a prompt, while nobody has measured it: a slow CPU computes 50 tokens/s
LEARNED_PATIENCE = 2.0  # times the patience of an alarm are learned from it at the most
BLIND_S = 60.0  # no numbers: until a probe is sent, which takes its own time to fail
UNSEEN_S_MAX = 10.0  # beside failed looks, of the time since one sign that is not counted
PROMPT_TOKENS_MIN = 256  # a shorter prompt takes no less time than this one
HALF_LIFE_S = 600.0  # in which what is usual is half forgotten
BLIND_GIVEN_UP = 5.0  # no numbers: times its patience until what it was handed is ended
PROBE_GAP_S = 1.0  # from one probe's end to the next
PROBE_TIMEOUT_S = 10.0

Progress = tuple[float, ...]


class Owed(NamedTuple):
    """What the engine has to answer. `prompt_tokens`: the longest prompt without a first byte."""

    answers: int
    prompt_tokens: int


class StallWatch:
    """Fed with every good look at the engine, and with the ends of probes."""

    __slots__ = (
        "_given_up_s",
        "_hung_at",
        "_is_probing",
        "_look_failed",
        "_looked_at",
        "_owes",
        "_patience_s",
        "_probe_at",
        "_progress",
        "_seen",
        "_sign_at",
        "_suspected",
        "_tokens",
        "_unseen_s",
        "_usual_at",
        "_usual_s",
    )

    def __init__(self) -> None:
        self._sign_at = float("-inf")  # the last sign, or the last look while nothing was owed
        self._progress: Progress = ()
        self._owes = False  # by the last look
        self._seen = False  # a sign, ever, while something was owed
        self._usual_s = 0.0  # longest time between two signs, as of `_usual_at`
        self._tokens = float(PROMPT_TOKENS_MIN)  # of the longest prompt that has begun, as of then
        self._usual_at = 0.0
        self._looked_at = float("-inf")  # the last good look
        self._look_failed = False  # one since then
        self._unseen_s = 0.0  # since the last sign, by which `_sign_at` has been moved
        self._hung_at: float | None = None
        self._patience_s = 0.0  # of the last alarm
        self._given_up_s = 0.0  # after that alarm
        self._suspected = self._is_probing = False
        self._probe_at = float("-inf")  # not before then

    @property
    def hung(self) -> bool:
        """Whether it takes requests and computes none."""
        return self._hung_at is not None

    def silent_s(self, now: float) -> float:
        """How long ago the last sign of work was, while something is owed."""
        return now - self._sign_at

    def begun(self, prompt_tokens: int, handed_at: float, now: float) -> None:
        """An answer to a prompt of that length has its first byte: a sign between two looks."""
        if self.hung:
            return  # the next look decides
        self._learn(now - max(handed_at, self._sign_at), now)
        if prompt_tokens > self._tokens:
            self._tokens = float(prompt_tokens)

    def look(
        self,
        progress: Progress,
        heard_at: float,
        owed: Owed,
        line: PrefillLine | None,
        now: float,
    ) -> bool:
        """Take in a good look. True if from now on it counts as hung.

        `heard_at`: when a good answer last brought a byte; `line`: what first tokens take.
        """
        moved = _rose(self._progress, progress) or heard_at > self._sign_at
        self._progress = progress
        if self._look_failed and not moved:
            self._skip_unseen(now)
        self._looked_at, self._look_failed = now, False
        if moved:
            self._sign(now)
        elif not (self._owes or self._suspected or self.hung):
            self._wait_from(now)
        self._owes = owed.answers > 0
        if moved or not self._owes or self._suspected or self.hung:
            return False
        patience_s = self.patience_s(bool(progress), owed, line, now)
        if now - self._sign_at < patience_s:
            return False
        self._patience_s = self._given_up_s = patience_s
        if progress:
            self._hung_at = now
        else:
            self._given_up_s *= BLIND_GIVEN_UP
            self._suspected = True
        return self.hung

    def patience_s(
        self, has_numbers: bool, owed: Owed, line: PrefillLine | None, now: float
    ) -> float:
        """Seconds without a sign after which it counts as hung, or is probed."""
        guess_s = S_PER_TOKEN * owed.prompt_tokens if line is None else 0.0
        if not self._seen:
            return (FIRST_S if has_numbers else BLIND_S) + guess_s
        self._fade(now)
        usual_s = self._usual_s * max(1.0, owed.prompt_tokens / self._tokens)
        if line is not None and owed.prompt_tokens:
            usual_s = max(usual_s, line.ttft_s(owed.prompt_tokens))
        return (FLOOR_S if has_numbers else BLIND_S) + max(guess_s, MARGIN * usual_s)

    def is_given_up(self, now: float) -> bool:
        """Whether its answers can be ended: it hangs for as long once more, or far longer.

        Without numbers nothing tells an engine that hangs from one that computes one long answer
        while the probe waits.
        """
        return self._hung_at is not None and now - self._hung_at >= self._given_up_s

    def begins_probe(self, now: float) -> bool:
        """Whether to send a probe now; its end is to be told by `probed`."""
        if self._is_probing or now < self._probe_at or not (self.hung or self._suspected):
            return False
        self._is_probing = True
        return True

    def probed(self, now: float, *, answered: bool) -> bool:
        """A probe is over. True if from now on it counts as hung."""
        self._is_probing = False
        self._probe_at = now + PROBE_GAP_S
        if answered:
            if self.hung or self._suspected:
                self._sign(now)
            return False
        if not self._suspected:
            return False
        self._suspected, self._hung_at = False, now
        return True

    def look_failed(self) -> None:
        """Whether it computes could not be seen since the last good look, nor until the next."""
        self._look_failed = True

    def wait_anew(self, now: float) -> None:
        """This process stood still: no sign could be seen until now."""
        self._wait_from(now)

    def _wait_from(self, now: float) -> None:
        self._sign_at, self._unseen_s = now, 0.0

    def _skip_unseen(self, now: float) -> None:
        """The time between two good looks with a failed one between them is no silence."""
        unseen_s = now - max(self._looked_at, self._sign_at)
        unseen_s = min(unseen_s, UNSEEN_S_MAX - self._unseen_s)
        self._sign_at += unseen_s
        self._unseen_s += unseen_s

    def _sign(self, now: float) -> None:
        """It computes. How long the sign took teaches what is usual, also after an alarm: a prompt
        that brought a false one would bring it again for ever."""
        gap_s = now - self._sign_at
        if self.hung or self._suspected:
            self._learn(min(gap_s, LEARNED_PATIENCE * self._patience_s), now)
        elif self._owes:
            self._learn(gap_s, now)
        self._wait_from(now)
        self._hung_at, self._suspected = None, False

    def _learn(self, gap_s: float, now: float) -> None:
        self._fade(now)
        self._usual_s = max(self._usual_s, gap_s)
        self._seen = True

    def _fade(self, now: float) -> None:
        factor = 0.5 ** ((now - self._usual_at) / HALF_LIFE_S)
        self._usual_at = now
        self._usual_s *= factor
        self._tokens = max(float(PROMPT_TOKENS_MIN), self._tokens * factor)


def _rose(before: Progress, after: Progress) -> bool:
    """Whether any number rose; a page with other numbers is another engine's, or a new one's."""
    if len(before) != len(after):
        return True
    return any(new > old for old, new in zip(before, after, strict=True))
