"""Parts of a message that are no text: images, audio, video and files.

Their bytes, mostly base64 in a data URL, don't determine their tokens: 0.3 MB of image is some
hundred tokens and not 75,000. So such a part enters the prompt's bytes as a stand-in of fixed
length, made from a digest of its content, and its tokens are an estimate, per model and kind of
part, corrected by the prompt tokens that engines report.

The stand-in is as long as the text of a usual image's tokens (512), so that blocks of prompts with
images take about as much memory as others, and a prompt of one image has blocks at all. The
difference between the estimate and that length is added where the stand-in ends (`Prompt.parts`).

The digest is XXH3 over slices: 4 ms for 32 MiB on the event loop, where BLAKE2b takes 60 ms. It
stays inside this process; published is the keyed hash of blocks that contain it. Two files
constructed with one digest cause a wrong estimate of what is cached, and nothing else.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import orjson
import xxhash

STAND_IN_BYTES = 2048
PARTS_MAX = 1024  # in one prompt: their stand-ins fill the blocks that are hashed
PART_TOKENS_MAX = 65_536
SLICE_CHARS = 65_536  # encoded at once: larger copies leave the processor's cache
WEIGHT_MAX, WEIGHT_MIN = 0.5, 0.1  # of a new observation: the first ones move it more, none all
SAMPLE_RATIO_MAX = (
    4.0  # one observation is taken for at most so many times what is known, or 1 / that
)
# Of a prompt, by estimate: where parts are less, what is off in the text's estimate outweighs them.
SHARE_MIN = 0.25


class PartKind(StrEnum):
    """What kinds of parts have an estimate of their own."""

    IMAGE = "image"
    IMAGE_LOW = "image in low detail"  # `"detail": "low"`
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


# Tokens before an engine has reported any: a 720p image of recent models has 500 to 1,200 tokens,
# one in low detail 85, half a minute of speech 400 to 750.
TOKENS_START = {
    PartKind.IMAGE: 512.0,
    PartKind.IMAGE_LOW: 85.0,
    PartKind.AUDIO: 512.0,
    PartKind.VIDEO: 4096.0,
    PartKind.FILE: 1024.0,
}

# Types of parts, by the names that OpenAI's chat API and engines' extensions of it give them; the
# part holds its content under the same name. Engines infer a missing type from that name.
_KINDS = {
    "image_url": PartKind.IMAGE,
    "input_image": PartKind.IMAGE,
    "image": PartKind.IMAGE,
    "image_embeds": PartKind.IMAGE,
    "input_audio": PartKind.AUDIO,
    "audio_url": PartKind.AUDIO,
    "video_url": PartKind.VIDEO,
    "video": PartKind.VIDEO,
    "file": PartKind.FILE,
    "input_file": PartKind.FILE,
    "document": PartKind.FILE,
}


class Part(NamedTuple):
    """One of them in a prompt's bytes: its kind, and the offset behind its stand-in."""

    kind: PartKind
    end: int


def part_kind(part: Mapping[str, Any]) -> PartKind | None:
    """What kind of part it is; None for one that counts by its text, known or not."""
    name = part.get("type")
    if name is None:
        name = next(filter(_KINDS.__contains__, part), None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is not PartKind.IMAGE:
        return kind
    held = part.get("image_url")
    detail = held.get("detail") if isinstance(held, dict) else part.get("detail")
    return PartKind.IMAGE_LOW if detail == "low" else kind


def stand_in(part: Mapping[str, Any]) -> bytes:
    """STAND_IN_BYTES that are equal for equal parts only; a URL of a server is compared, not read.

    Raises orjson.JSONEncodeError for parts that are nested too deeply.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(part):
        _add(digest, name, part[name])
    return digest.digest() * (STAND_IN_BYTES // digest.digest_size)


def _add(digest: "xxhash.xxh3_128", name: str, value: Any) -> None:
    if isinstance(value, dict):
        digest.update(b"{%d " % len(value) + _bytes(name))
        for inner in sorted(value):
            held = value[inner]
            _add_plain(digest, inner, held if isinstance(held, str) else orjson.dumps(held))
    else:
        _add_plain(digest, name, value if isinstance(value, str) else orjson.dumps(value))


def _add_plain(digest: "xxhash.xxh3_128", name: str, value: str | bytes) -> None:
    kind = "text" if isinstance(value, str) else "json"
    digest.update(f"{kind} {len(name)} {len(value)} ".encode() + _bytes(name))
    if isinstance(value, bytes):
        digest.update(value)
        return
    for start in range(0, len(value), SLICE_CHARS):
        digest.update(_bytes(value[start : start + SLICE_CHARS]))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class PartTokens:
    """Tokens per part of one model, by kind, learned from engines' `usage`."""

    __slots__ = ("_seen", "_tokens")

    def __init__(self) -> None:
        self._tokens = dict(TOKENS_START)
        self._seen = dict.fromkeys(TOKENS_START, 0)

    def tokens(self, kind: PartKind) -> float:
        """The estimate for one part."""
        return self._tokens[kind]

    def observe(self, kinds: tuple[PartKind, ...], tokens: float, text_tokens: float) -> None:
        """Learn from one request whose parts came to that many tokens together, beside a text.

        Parts of several kinds share them as they were estimated. A prompt that is text for the most
        part teaches nothing.
        """
        expected = sum(self._tokens[kind] for kind in kinds)
        if expected < SHARE_MIN * (expected + text_tokens):
            return
        ratio = min(SAMPLE_RATIO_MAX, max(1.0 / SAMPLE_RATIO_MAX, tokens / expected))
        for kind in set(kinds):
            known = self._tokens[kind]
            sample = min(float(PART_TOKENS_MAX), max(1.0, ratio * known))
            self._seen[kind] += 1
            weight = min(WEIGHT_MAX, max(WEIGHT_MIN, 1.0 / self._seen[kind]))
            self._tokens[kind] += weight * (sample - known)
