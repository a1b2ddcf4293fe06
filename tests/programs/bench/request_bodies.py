"""The requests that clients send: of a given length, each unlike every other from its middle on.

Every prompt begins with the same half, as prompts under one system prompt do, and goes on with a
number of its own: a router that remembers prompts can't answer from memory alone.
"""

from dataclasses import dataclass

from tests.programs.bench.engine import MODEL, OUT_OF_STEP

CHARS_PER_TOKEN = 4  # of plain English, about
NUMBER_DIGITS = 12
_WORDS = "Seven wizards count their coins while the quick brown fox jumps over the lazy dog. "
_ESSENCE = '{"model":"%s","max_tokens":%d,"seed":%d,"user":"%s","stream":%s,"messages":['
_SYSTEM = '{"role":"system","content":"%s"},'
_USER = '{"role":"user","content":"'
_END = ' %s"}]}'


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A request's body, but for its number between the two parts."""

    before: str
    after: str

    def body(self, number: int) -> bytes:
        """The whole of it."""
        return f"{self.before}{number:0{NUMBER_DIGITS}d}{self.after}".encode()


def request_body(
    prompt_tokens: int, events: int, gap_ms: int, *, model: str = MODEL, in_step: bool = True
) -> RequestBody:
    """A chat of about that many tokens; `events` 0: a plain one, else streamed at that pace, in
    step with the engine's other streams of the pace or not."""
    half = prompt_tokens * CHARS_PER_TOKEN // 2
    user = "anybody" if in_step else OUT_OF_STEP
    essence = _ESSENCE % (model, events or 1, gap_ms, user, "true" if events else "false")
    return RequestBody(essence + _SYSTEM % _text(half) + _USER, _END % _text(half - NUMBER_DIGITS))


def _text(chars: int) -> str:
    return (_WORDS * (chars // len(_WORDS) + 1))[: max(0, chars)]
