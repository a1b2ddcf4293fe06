"""The parts of a form (multipart/form-data, RFC 7578), as python-multipart finds them.

`FormParts` is for readers of a form, which say what they do with a part. `form_model` reads the one
field of a request for work that the router needs; the form itself goes to the engine as it came.
"""

import logging
import re
from collections.abc import Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mesh.session.body_model import ModelPlace, model_in_json

FORM = "multipart/form-data"
MODEL = "model"
PARTS_MAX = 64  # of a request for work; OpenAI's transcription has a dozen fields
HEADERS_BYTES_MAX = 8 * 1024  # of one part
VALUE_BYTES_MAX = 4 * 256  # of a model's name: UTF-8 takes four bytes at most
# The parser takes a Python step for each byte that might end a part: of these, half a millisecond.
STEP_BYTES = 4096
_BOUNDARY = re.compile(r"[ -~]{0,69}[!-~]")  # RFC 2046, 5.1.1, and what clients make besides
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients could fill the log
_PLAIN_ENCODINGS = (b"binary", b"8bit", b"7bit")


class FormInvalid(ValueError):
    """A form that can't be read; the message says what to change, `param` in which field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class FormParts:
    """One form, step by step. Every method raises FormInvalid for what is no form."""

    def __init__(self, content_type: str | None) -> None:
        self.is_whole = False
        self._headers: dict[bytes, bytes] = {}
        self._header = b"", b""
        self._headers_bytes = 0
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._part_began,
                "on_header_field": self._header_name_came,
                "on_header_value": self._header_value_came,
                "on_header_end": self._header_ended,
                "on_headers_finished": self._headers_ended,
                "on_part_data": self._data_came,
                "on_part_end": self.ended,
                "on_end": self._whole,
            },
        )

    def write(self, data: bytes) -> None:
        """The next bytes: STEP_BYTES at most where nothing else may wait."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise broken() from error

    # For who derives.

    def began(self, name: str, options: Mapping[bytes, bytes]) -> None:
        """A part of that name begins; `options`: of its content-disposition."""

    def came(self, data: bytes) -> None:
        """The next bytes of its value."""

    def ended(self) -> None:
        """It is whole."""

    # What the parser calls.

    def _part_began(self) -> None:
        self._headers, self._header, self._headers_bytes = {}, (b"", b""), 0

    def _header_name_came(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header = self._header[0] + data[start:end], b""

    def _header_value_came(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header = self._header[0], self._header[1] + data[start:end]

    def _count_header(self, count: int) -> None:
        self._headers_bytes += count
        if self._headers_bytes > HEADERS_BYTES_MAX:
            raise FormInvalid(
                f"a part of the form has more than {HEADERS_BYTES_MAX} bytes of headers"
            )

    def _header_ended(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = b"", b""

    def _headers_ended(self) -> None:
        kind, options = parse_options_header(
            self._headers.get(b"content-disposition", b"").decode("latin-1")
        )
        if kind != b"form-data" or b"name" not in options:
            raise FormInvalid("a part of the form has no content-disposition with a name")
        name = form_text(options[b"name"])
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            message = "send the parts of the form without a content-transfer-encoding"
            raise FormInvalid(message, name[:60])
        self.began(name, options)

    def _data_came(self, data: bytes, start: int, end: int) -> None:
        self.came(data[start:end])

    def _whole(self) -> None:
        self.is_whole = True


class _ModelField(FormParts):
    """The value of the field `model`."""

    def __init__(self, content_type: str | None) -> None:
        super().__init__(content_type)
        self.values: list[bytearray] = []
        self.ranges: list[tuple[int, int]] = []  # of its value's bytes in the form
        self._is_model = False
        self._parts = 0

    def began(self, name: str, options: Mapping[bytes, bytes]) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise FormInvalid(f"the form has more than {PARTS_MAX} parts")
        self._is_model = name == MODEL
        if self._is_model:
            if self.values:  # engines differ in which one they take
                raise FormInvalid("model is given twice; give it once", MODEL)
            self.values.append(bytearray())

    def _data_came(self, data: bytes, start: int, end: int) -> None:
        if self._is_model:
            self.ranges.append((start, end))
        super()._data_came(data, start, end)

    def came(self, data: bytes) -> None:
        if self._is_model:
            self.values[0] += data
            if len(self.values[0]) > VALUE_BYTES_MAX:
                raise FormInvalid(f"model has more than {VALUE_BYTES_MAX} bytes", MODEL)


def form_model(content_type: str, body: bytes) -> str:
    """The field `model` of a whole form; empty if there is none. Raises FormInvalid."""
    form = _ModelField(content_type)
    form.write(body)
    if not form.is_whole:
        raise broken()
    return form_text(bytes(form.values[0])) if form.values else ""


def _form_model_place(content_type: str, body: bytes) -> ModelPlace | None:
    """Where the value of `model` is in a whole form; None if that has none, or the parser found it
    in several pieces. Raises FormInvalid."""
    form = _ModelField(content_type)
    form.write(body)
    if len(form.ranges) != 1:
        return None
    start, end = form.ranges[0]
    is_it = body[start:end] == bytes(form.values[0])
    return ModelPlace(start, end, is_json=False) if is_it else None


def model_place(body: bytes, content_type: str = "") -> ModelPlace | None:
    """Where a body that was read names its model; None if it can't be replaced there."""
    if content_type[: len(FORM)].lower() == FORM:
        return _form_model_place(content_type, body)
    return model_in_json(body)


def form_text(data: bytes) -> str:
    """A name or a short value. Raises FormInvalid."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormInvalid("a field or a name of the form is not UTF-8") from error


def broken() -> FormInvalid:
    """The error for a form that ends too early, or is none."""
    return FormInvalid("the form is cut or broken: it is no multipart/form-data of that boundary")


def _boundary(content_type: str | None) -> bytes:
    try:
        kind, options = parse_options_header(content_type)
    except UnicodeEncodeError:  # it takes Latin-1 alone
        kind, options = b"", {}
    boundary = options.get(b"boundary", b"")
    if kind != FORM.encode() or _BOUNDARY.fullmatch(boundary.decode("latin-1")) is None:
        message = f"an upload is {FORM} with a boundary, as its content-type says"
        raise FormInvalid(message, "content-type")
    return boundary
