"""The input file of a job: its lines, what is wrong with them, and the order they are done in.

Lines whose answers could not be distinguished by their custom_id (no JSON object, no custom_id, one
that another line has) fail the whole job, as does a file that is empty, is no UTF-8 or has too many
lines. Any other mistake is the error of its line alone, and the other lines are computed.

`stream: true` is such a mistake: a line of the output file is one JSON object, and answering
without a stream would change what the client asked for.

The file is read twice: once to index it, then, in the order of the index, line by line. Memory is a
few hundred bytes a line and one line of the longest kind; no body is kept.
"""

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from mesh.core.model.prompt import PromptInvalid, PromptText, block_hashes
from mesh.core.model.prompt_shapes import text_at
from schemas.batch import CUSTOM_ID_CHARS_MAX, ERRORS_MAX, LINE_BYTES_MAX, LineError
from schemas.ids import MODEL_CHARS_MAX, ModelId

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors put before UTF-8
NO_PART_BYTES = len(BYTE_ORDER_MARK) + len(b"\r")  # of a line's own bytes
CUSTOM_ID_DIGEST_BYTES = 16
EMPTY_LINES_MAX = 10_000  # at the end of a file
SHOWN_CHARS = 60
# Blocks of a prompt, counted from its start, whose chained hashes order the lines: lines that share
# a prefix are neighbours up to the last of these blocks that they share.
PREFIX_BLOCKS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    *(384, 512, 768, 1024, 1536, 2048, 4096, 8192),
)
HASH_BYTES = 8


class RawLine(NamedTuple):
    """One line of a file; `data` is None where it is longer than lines may be."""

    number: int  # from 1
    offset: int
    data: bytes | None


class InputLine(NamedTuple):
    """A line that can be computed."""

    custom_id: str
    url: str
    model: ModelId
    body: bytes
    prompt: PromptText


class LineInvalid(ValueError):
    """A line that can't be computed. `custom_id`: None where it has none that could name it."""

    def __init__(self, error: LineError, custom_id: str | None = None) -> None:
        super().__init__(error.message)
        self.error, self.custom_id = error, custom_id


class LineSplitter:
    """Cuts the bytes of a file, as they come, into lines ended by LF or CRLF.

    Empty lines at the end of the file are none; one before another line is a line.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._pieces: list[bytes] = []
        self._kept_bytes = 0
        self._is_too_long = False
        self.number = 0  # of the last line that has ended, empty ones included
        self._offset = 0  # of the line that is being read
        self._read_bytes = 0  # of the file
        self._empty: tuple[int, int] | None = None  # number and offset of the first of them

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """The lines that end in this chunk."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._keep(chunk[start:end])
            self._read_bytes += end + 1 - start
            yield from self._line()
            start = end + 1
        self._keep(chunk[start:])
        self._read_bytes += len(chunk) - start

    def end(self) -> Iterator[RawLine]:
        """The last line, where no line break ends it."""
        if self._pieces or self._is_too_long:
            yield from self._line()

    def _keep(self, piece: bytes) -> None:
        if not piece or self._is_too_long:
            return
        self._kept_bytes += len(piece)
        if self._kept_bytes > self._line_bytes_max + NO_PART_BYTES:
            self._pieces, self._is_too_long = [], True
        else:
            self._pieces.append(piece)

    def _line(self) -> Iterator[RawLine]:
        data = b"".join(self._pieces).removesuffix(b"\r")
        offset, self._offset = self._offset, self._read_bytes
        if not self.number and data.startswith(BYTE_ORDER_MARK):
            data, offset = data.removeprefix(BYTE_ORDER_MARK), len(BYTE_ORDER_MARK)
        too_long = self._is_too_long or len(data) > self._line_bytes_max
        self._pieces, self._kept_bytes, self._is_too_long = [], 0, False
        self.number += 1
        if not too_long and not data.strip():
            self._empty = self._empty or (self.number, offset)
            return
        if self._empty is not None:
            yield RawLine(*self._empty, b"")
            self._empty = None
        yield RawLine(self.number, offset, None if too_long else data)


def read_line(
    data: bytes, number: int, endpoint: str, body_bytes_max: int = LINE_BYTES_MAX
) -> InputLine:
    """The line, of a job for that endpoint. Raises LineInvalid."""
    fields = _object(data, number)
    custom_id = _custom_id(fields, number)
    try:
        _check_address(fields, endpoint)
        model, body, prompt = _read_body(fields, endpoint, body_bytes_max)
    except _Wrong as wrong:
        error = LineError(code=wrong.code, message=wrong.message, line=number, param=wrong.param)
        raise LineInvalid(error, custom_id) from wrong
    return InputLine(custom_id, endpoint, model, body, prompt)


class _Wrong(Exception):
    """What is wrong with a line that has a custom_id."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def _missing(param: str) -> _Wrong:
    return _Wrong("missing_required_parameter", f"Missing required parameter: {param!r}.", param)


def _check_address(fields: Mapping[str, Any], endpoint: str) -> None:
    for param in ("method", "url", "body"):
        if param not in fields:
            raise _missing(param)
    if fields["method"] != "POST":
        message = f"The method must be 'POST', not {_shown(fields['method'])}."
        raise _Wrong("invalid_method", message, "method")
    if fields["url"] != endpoint:
        message = f"The url must be the batch's endpoint {endpoint!r}, not {_shown(fields['url'])}."
        raise _Wrong("invalid_url", message, "url")


def _read_body(
    fields: Mapping[str, Any], endpoint: str, bytes_max: int
) -> tuple[ModelId, bytes, PromptText]:
    body = fields["body"]
    if not isinstance(body, dict):
        raise _Wrong("invalid_type", "The body must be a JSON object.", "body")
    if body.get("stream") not in (None, False):
        message = "Answers of a batch are not streamed: leave 'stream' out."
        raise _Wrong("unsupported_parameter", message, "body.stream")
    if "model" not in body:
        raise _missing("body.model")
    model = body["model"]
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        message = f"The model must be a string of 1 to {MODEL_CHARS_MAX} characters."
        raise _Wrong("invalid_value", message, "body.model")
    try:
        prompt = text_at(endpoint, body)
        encoded = orjson.dumps(body)
    except PromptInvalid as error:
        if error.param not in body:
            raise _missing(f"body.{error.param}") from error
        raise _Wrong("invalid_value", f"{error}.", f"body.{error.param}") from error
    except orjson.JSONEncodeError as error:
        raise _Wrong("invalid_value", "The body is nested too deeply.", "body") from error
    if len(encoded) > bytes_max:
        message = f"The body has {len(encoded)} bytes; a line's may have {bytes_max}."
        raise _Wrong("line_too_large", message, "body")
    return ModelId(model), encoded, prompt


def _object(data: bytes, number: int) -> dict[str, Any]:
    if not data.strip():
        raise _unnamed("invalid_json_line", "The line is empty.", number)
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        try:
            data.decode()
        except UnicodeDecodeError:
            raise _unnamed("invalid_encoding", "The file is not UTF-8 text.", number) from error
        message = f"The line is no valid JSON: {error.msg:.{SHOWN_CHARS}} at column {error.colno}."
        raise _unnamed("invalid_json_line", message, number) from error
    if not isinstance(fields, dict):
        raise _unnamed("invalid_json_line", "The line is no JSON object.", number)
    return fields


def _custom_id(fields: Mapping[str, Any], number: int) -> str:
    if "custom_id" not in fields:
        message = "Missing required parameter: 'custom_id'."
        raise _unnamed("missing_required_parameter", message, number, "custom_id")
    custom_id = fields["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        message = f"The custom_id must be a string of 1 to {CUSTOM_ID_CHARS_MAX} characters."
        raise _unnamed("invalid_value", message, number, "custom_id")
    return custom_id


def _unnamed(code: str, message: str, number: int, param: str | None = None) -> LineInvalid:
    return LineInvalid(LineError(code=code, message=message, line=number, param=param))


def _shown(value: Any) -> str:
    return f"{value!r:.{SHOWN_CHARS}}" if isinstance(value, str) else f"a {type(value).__name__}"


class Place(NamedTuple):
    """Where a line is in its file."""

    number: int
    offset: int
    length: int  # in bytes, without its end


@dataclass(frozen=True, slots=True)
class JobIndex:
    """A whole file that can be used: its lines in the order in which they are to be done.

    `wrong`: those that have an error of their own, in the order of the file; `read_line` says it.
    """

    good: tuple[Place, ...]
    wrong: tuple[Place, ...]

    @property
    def total(self) -> int:
        return len(self.good) + len(self.wrong)


class FileCheck:
    """One pass over an input file: `feed` it, then `end`.

    `errors`: why the job fails; the first ERRORS_MAX of them. `is_over`: whether the rest of the
    file need not be read.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        lines_max: int,
        line_bytes_max: int = LINE_BYTES_MAX,
        body_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        self._endpoint = endpoint
        self._lines_max = lines_max
        self._line_bytes_max, self._body_bytes_max = line_bytes_max, body_bytes_max
        self._splitter = LineSplitter(line_bytes_max)
        self._seen: dict[bytes, int] = {}  # digests of custom_ids, to their lines
        self._numbers, self._offsets, self._lengths = array("L"), array("Q"), array("L")
        self._orders: list[bytes | None] = []  # None for a line with an error of its own
        self._fed_bytes = 0
        self.errors: list[LineError] = []
        self.is_over = False

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the file."""
        self._fed_bytes += len(chunk)
        for line in self._splitter.feed(chunk):
            if self.is_over:
                return
            self._take(line)
        # Empty lines at the end are none, but a file of them alone is not read for minutes.
        if self._splitter.number > self._lines_max + EMPTY_LINES_MAX and not self.is_over:
            self._fail_too_many()

    def end(self) -> JobIndex | None:
        """The file's lines, after all of it; None if the job fails."""
        for line in self._splitter.end():
            if not self.is_over:
                self._take(line)
        if not self._numbers and not self.errors:
            message = "The input file is empty." if not self._fed_bytes else "It has no lines."
            self.errors.append(LineError(code="empty_file", message=message))
        if self.errors:
            return None
        places = [
            Place(*each) for each in zip(self._numbers, self._offsets, self._lengths, strict=True)
        ]
        both = list(zip(self._orders, places, strict=True))
        good = [(order, place) for order, place in both if order is not None]
        good.sort()
        wrong = tuple(place for order, place in both if order is None)
        return JobIndex(tuple(place for _, place in good), wrong)

    def _take(self, line: RawLine) -> None:
        if len(self._numbers) >= self._lines_max:
            self._fail_too_many()
            return
        if line.data is None:
            message = f"The line has more than {self._line_bytes_max} bytes."
            self._fail(LineError(code="line_too_large", message=message, line=line.number))
            return
        self._numbers.append(line.number)
        self._offsets.append(line.offset)
        self._lengths.append(len(line.data))
        order: bytes | None = None
        try:
            read = read_line(line.data, line.number, self._endpoint, self._body_bytes_max)
            custom_id: str | None = read.custom_id
            order = _order(read)
        except LineInvalid as invalid:
            custom_id = invalid.custom_id
            if custom_id is None:
                self._fail(invalid.error)
        self._orders.append(order)
        if custom_id is not None:
            self._check_unused(custom_id, line.number)

    def _fail_too_many(self) -> None:
        message = f"The input file has more than {self._lines_max} lines."
        self._fail(LineError(code="too_many_lines", message=message))
        self.is_over = True

    def _check_unused(self, custom_id: str, number: int) -> None:
        raw = custom_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(raw, digest_size=CUSTOM_ID_DIGEST_BYTES).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            message = f"The custom_id {_shown(custom_id)} is already that of line {first}."
            error = LineError(
                code="duplicate_custom_id", message=message, line=number, param="custom_id"
            )
            self._fail(error)

    def _fail(self, error: LineError) -> None:
        self.errors.append(error)
        self.is_over = self.is_over or len(self.errors) >= ERRORS_MAX


def _order(line: InputLine) -> bytes:
    """Sorts lines so that those that share the beginning of their prompt are neighbours."""
    if not line.prompt.is_prefix:
        return b""
    hashes = block_hashes(line.prompt.data, key="", model=line.model)
    chosen = [hashes[blocks - 1] for blocks in PREFIX_BLOCKS if blocks <= len(hashes)]
    return b"".join(each.to_bytes(HASH_BYTES, "big") for each in chosen)
