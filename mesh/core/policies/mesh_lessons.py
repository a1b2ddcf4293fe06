"""What the `mesh` policy learns from what becomes of its estimates.

* `stretch`, per candidate: time to first token that was observed over what was expected. Prefill
  shares iterations with decodes, so a busy engine is slower than its idle line says, and every
  engine differently. Sums that forget, so that ten slow answers outweigh one; bounded, because
  an outlier must not make a candidate untouchable.
* `residence_s`, per candidate: from first to last token, which is how long an answer keeps its
  memory.
* over all: the usual prompt tokens to compute and the usual answer, for work that is only
  counted in requests.
"""

from dataclasses import dataclass

from mesh.core.policies.base import Spot, Target

MEMORY = 0.97  # kept of the past at each lesson: some thirty answers
PRIOR_S = 1.0  # of seconds as expected, that the first lessons are weighed against
STRETCH_MIN, STRETCH_MAX = 0.5, 4.0
RESIDENCE_START_S = 10.0
PREFILL_TOKENS_START = 500.0
OUTPUT_TOKENS_START = 200.0
WEIGHT = 0.02  # of a new observation in the averages over all


@dataclass(slots=True)
class Lesson:
    """What is known of one candidate."""

    expected_s: float = PRIOR_S
    observed_s: float = PRIOR_S
    residence_s: float = RESIDENCE_START_S
    stretch: float = 1.0

    def began(self, expected_s: float, observed_s: float) -> None:
        """A first token came; both without what is not computing (round trip, base)."""
        self.expected_s = MEMORY * self.expected_s + expected_s
        self.observed_s = MEMORY * self.observed_s + max(0.0, observed_s)
        ratio = (self.observed_s + PRIOR_S) / (self.expected_s + PRIOR_S)
        self.stretch = min(STRETCH_MAX, max(STRETCH_MIN, ratio))

    def resided(self, seconds: float) -> None:
        """An answer was complete so long after its first token."""
        self.residence_s += 0.1 * (seconds - self.residence_s)


UNKNOWN = Lesson()


class Lessons:
    """By candidate."""

    def __init__(self) -> None:
        self._of: dict[Spot, Lesson] = {}
        self.prefill_tokens = PREFILL_TOKENS_START
        self.output_tokens = OUTPUT_TOKENS_START

    def of(self, target: Target) -> Lesson:
        """What is known of that candidate."""
        return self._of.get(Spot(target.kind, target.name), UNKNOWN)

    def at(self, spot: Spot) -> Lesson:
        """The same, to be written to."""
        return self._of.setdefault(spot, Lesson())

    def forget(self, spot: Spot) -> None:
        """Whoever comes back under that name is another."""
        self._of.pop(spot, None)

    def prompt(self, prefill_tokens: int) -> None:
        """A prompt of which so many tokens had to be computed."""
        self.prefill_tokens += WEIGHT * (prefill_tokens - self.prefill_tokens)

    def answer(self, output_tokens: int) -> None:
        """An answer of that length."""
        self.output_tokens += WEIGHT * (output_tokens - self.output_tokens)
