"""Batch jobs of the simulator: read from a batch file, or made of a few numbers.

A job is written `[REGION=]FILE|LINES[,name=value…]`, as `us=5000,prompt=800,answer=100,window=30m`
or `eu=questions.jsonl,at=60`. It belongs to the region where it is submitted, at `at` seconds after
the first client may send; without a region it belongs to the first one.

`LINES` are made: prompts of `prompt` tokens on average and answers of `answer` (log-normal, with
half of that as standard deviation), of which the first `shared` tokens are one of `groups`
beginnings. The file's order is random; a runner orders it.

`FILE` is a file of OpenAI's Batch API. Four bytes of its prompts are a token, and each answer is as
long as `max_tokens` lets it be. What a batch runner answers with an error for
one line is an error for the whole file here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mesh.batch.job_file import FileCheck, InputLine, read_line
from mesh.core.model.prompt import BLOCK_BYTES, BYTES_PER_TOKEN_START
from mesh.sim.workload import RequestNode, Segment
from mesh.sim.workloads.content import Lengths, seeded, segment, segment_id
from schemas.batch import ENDPOINTS, window_s
from schemas.http import CHAT, EMBEDDINGS
from schemas.ids import NameInvalid, RegionId, checked_name

LINES_MAX = 50_000  # of one job, as live
FILE_BYTES_MAX = 512 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
JOBS_MAX = 100
TOKENS_MAX = 1_000_000
DEFAULT_ANSWER_TOKENS = 256  # of a line that sets no limit
WINDOW_S = 86_400.0
TIMES = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")


class OfflineInvalid(ValueError):
    """A job that can't be played; the message says what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSpec:
    """A job as it is written. `region`: None for the first one; `source`: a file, or lines."""

    region: RegionId | None
    source: Path | int
    prompt: int = 1000
    answer: int = 150
    shared: int = 0
    groups: int = 1
    window: float = WINDOW_S
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """One job: its lines in the order of their file, and when they must be answered."""

    name: str
    region: RegionId
    lines: tuple[RequestNode, ...]
    window_s: float = WINDOW_S
    at_s: float = 0.0


def parse_offline(text: str) -> OfflineSpec:
    """The job that is written so. Raises OfflineInvalid."""
    first, *parts = text.split(",")
    region, source = _source(first, text)
    found: dict[str, Any] = {"region": region, "source": source}
    for part in parts:
        name, _, value = part.partition("=")
        if name in found or name not in _READ:
            known = ", ".join(_READ)
            raise OfflineInvalid(f"{text!r}: {part!r} is none of {known}, each once with a value")
        if name in _OF_LINES and isinstance(source, Path):
            raise OfflineInvalid(f"{text!r}: {name} is for lines that are made, not for a file")
        try:
            found[name] = _READ[name](value)
        except ValueError as error:
            raise OfflineInvalid(f"{text!r}: {name}: {error}") from error
    spec = OfflineSpec(**found)
    if spec.shared >= spec.prompt:
        raise OfflineInvalid(f"{text!r}: shared tokens are part of the prompt's: give fewer")
    return spec


def make_job(spec: OfflineSpec, number: int, regions: Sequence[RegionId], seed: int) -> SimJob:
    """The `number`-th job of a run. Raises OfflineInvalid or OSError."""
    region = spec.region or regions[0]
    if region not in regions:
        raise OfflineInvalid(f"a job in {region}, which is none of {', '.join(regions)}")
    if isinstance(spec.source, Path):
        lines = read_batch_file(spec.source)
    else:
        lines = made_lines(spec, number, seed)
    return SimJob(
        name=f"job-{number}", region=region, lines=lines, window_s=spec.window, at_s=spec.at
    )


def made_lines(spec: OfflineSpec, number: int, seed: int) -> tuple[RequestNode, ...]:
    """Lines by a job's numbers; `number` and `seed` tell it from others."""
    assert isinstance(spec.source, int)
    rng = seeded(seed, "offline", number)
    own = spec.prompt - spec.shared
    prompts, answers = (Lengths(mean, max(1.0, mean / 2)) for mean in (own, spec.answer))
    lines = []
    for line in range(spec.source):
        names = ("offline", seed, number)
        group = rng.randrange(spec.groups)
        beginning = [segment(spec.shared, *names, "group", group)] if spec.shared else []
        prompt = (*beginning, segment(prompts.draw(rng), *names, "prompt", line))
        answer = segment(answers.draw(rng), *names, "answer", line)
        lines.append(RequestNode(prompt=prompt, answer=answer, priority="low"))
    return tuple(lines)


def read_batch_file(path: Path) -> tuple[RequestNode, ...]:
    """The lines of a batch file. Raises OfflineInvalid that names the line, or OSError."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise OfflineInvalid(f"{path} is larger than {FILE_BYTES_MAX >> 20} MB")
    with path.open("rb") as file:
        endpoint = _endpoint(file.readline())
        if endpoint == EMBEDDINGS:
            raise OfflineInvalid(
                f"{path}: the simulated engines generate; they play no {EMBEDDINGS}"
            )
        file.seek(0)
        check = FileCheck(endpoint, lines_max=LINES_MAX)
        while not check.is_over and (chunk := file.read(CHUNK_BYTES)):
            check.feed(chunk)
        index = check.end()
        if index is None:
            error = check.errors[0]
            where = "" if error.line is None else f", line {error.line}"
            raise OfflineInvalid(f"{path}{where}: {error.message}")
        lines = []
        for place in (*index.wrong, *index.good):
            file.seek(place.offset)
            data = file.read(place.length)
            try:
                line = read_line(data, place.number, endpoint)
                lines.append(_node(line, place.number))
            except ValueError as error:
                raise OfflineInvalid(f"{path}, line {place.number}: {error}") from error
    return tuple(lines)


def _endpoint(first_line: bytes) -> str:
    """The one that the first line asks for; chat completions where none can be read."""
    try:
        url = orjson.loads(first_line)["url"]
    except (ValueError, TypeError, KeyError):
        return CHAT
    return url if url in ENDPOINTS else CHAT


def _node(line: InputLine, number: int) -> RequestNode:
    body = orjson.loads(line.body)
    most = body.get("max_completion_tokens", body.get("max_tokens", DEFAULT_ANSWER_TOKENS))
    if type(most) is not int or not 1 <= most <= TOKENS_MAX:
        raise OfflineInvalid(f"max_tokens must be a whole number from 1 to {TOKENS_MAX}")
    answer = segment(most, "offline answer", line.custom_id, number)
    return RequestNode(prompt=_segments(line.prompt.data), answer=answer, priority="low")


def _segments(text: bytes) -> tuple[Segment, ...]:
    """A segment for each block, so that two prompts share what they begin with."""
    pieces = [text[start : start + BLOCK_BYTES] for start in range(0, len(text), BLOCK_BYTES)]
    return tuple(
        Segment(segment_id(piece.hex()), max(1, round(len(piece) / BYTES_PER_TOKEN_START)))
        for piece in pieces or [b" "]
    )


def _source(first: str, text: str) -> tuple[RegionId | None, Path | int]:
    name, equals, rest = first.partition("=")
    region = None
    if equals:
        try:
            region = RegionId(checked_name("region", name))
        except NameInvalid as error:
            raise OfflineInvalid(f"{text!r}: {error}") from error
        first = rest
    if not first:
        raise OfflineInvalid(f"{text!r}: write a file or a number of lines, as us=5000")
    if not first.isascii() or not first.isdigit():
        return region, Path(first)
    if len(first) > len(str(LINES_MAX)) or not 1 <= int(first) <= LINES_MAX:
        raise OfflineInvalid(f"{text!r}: a job has 1 to {LINES_MAX} lines; give several jobs")
    return region, int(first)


def _whole(text: str, least: int = 0) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not least <= int(text) <= TOKENS_MAX:
        raise ValueError(f"write a whole number from {least} to {TOKENS_MAX}")
    return int(text)


def _from_1(text: str) -> int:
    return _whole(text, 1)


def _seconds(text: str) -> float:
    if not TIMES.fullmatch(text):
        raise ValueError("write seconds, as 600")
    return float(text)


def _window(text: str) -> float:
    if not TIMES.fullmatch(text):
        return float(window_s(text))
    if not float(text):
        raise ValueError("write more than 0 seconds, or as 30m, 24h")
    return float(text)


_OF_LINES = ("prompt", "answer", "shared", "groups")
_READ = {
    "prompt": _from_1,
    "answer": _from_1,
    "shared": _whole,
    "groups": _from_1,
    "window": _window,
    "at": _seconds,
}
