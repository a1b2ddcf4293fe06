"""Reads the form of an upload (multipart/form-data, RFC 7578) step by step: one file, short fields.

Nothing of the file is kept here. What is kept and what may come beside the file is limited.
"""

import logging
import re
from collections.abc import Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mesh.adapters.read_request import RequestRefused
from schemas.http import Fault
from schemas.problems import did_you_mean

FORM = "multipart/form-data"
FILE, PURPOSE = "file", "purpose"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
NAMES = (FILE, PURPOSE, ANCHOR, SECONDS)
VALUE_BYTES_MAX = 256
FILENAME_CHARS_MAX = 255
BESIDE_BYTES_MAX = 64 * 1024  # of a form: all that is not the file
# The parser takes a Python step for each byte that might end a part: of these, half a millisecond.
STEP_BYTES = 4096
_BOUNDARY = re.compile(r"[ -~]{0,69}[!-~]")  # RFC 2046, 5.1.1, and what clients make besides
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients could fill the log
_PLAIN_ENCODINGS = (b"binary", b"8bit", b"7bit")


class UploadForm:
    """One form. Every method raises RequestRefused for what it can't take."""

    def __init__(self, content_type: str | None) -> None:
        self.fields: dict[str, str] = {}  # those that are whole
        self.filename: str | None = None  # once the file has begun
        self._beside_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._header = b"", b""
        self._name = ""  # of the part that is read
        self._names: set[str] = set()
        self._value = bytearray()
        self._of_file: list[bytes] = []
        self._is_whole = False
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._part_began,
                "on_header_field": self._header_name_came,
                "on_header_value": self._header_value_came,
                "on_header_end": self._header_ended,
                "on_headers_finished": self._headers_ended,
                "on_part_data": self._data_came,
                "on_part_end": self._part_ended,
                "on_end": self._ended,
            },
        )

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in the next ones of the form: STEP_BYTES at most, or the caller
        takes too long at once."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken() from error
        of_file = b"".join(self._of_file)
        self._of_file.clear()
        self._beside_bytes += len(data) - len(of_file)
        if self._beside_bytes > BESIDE_BYTES_MAX:
            raise _refused(f"the form has more than {BESIDE_BYTES_MAX} bytes beside its file")
        return of_file

    def end(self) -> None:
        """No more bytes come."""
        if not self._is_whole:
            raise _broken()
        for name in (FILE, PURPOSE):
            if name not in self._names:
                raise _refused(f"the form has no part {name!r}; add it", name)

    # What the parser calls.

    def _part_began(self) -> None:
        self._headers, self._header = {}, (b"", b"")
        self._value.clear()

    def _header_name_came(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0] + data[start:end], b""

    def _header_value_came(self, data: bytes, start: int, end: int) -> None:
        self._header = self._header[0], self._header[1] + data[start:end]

    def _header_ended(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = b"", b""

    def _headers_ended(self) -> None:
        kind, options = parse_options_header(
            self._headers.get(b"content-disposition", b"").decode("latin-1")
        )
        if kind != b"form-data" or b"name" not in options:
            raise _refused("a part of the form has no content-disposition with a name")
        name = _text(options[b"name"])
        if name not in NAMES:
            raise _refused(f"unknown field {name!r:.60}{did_you_mean(name, NAMES)}", name[:60])
        if name in self._names:
            raise _refused(f"{name} is given twice; give it once", name)
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise _refused("send the parts of the form without a content-transfer-encoding", name)
        self._name = name
        self._names.add(name)
        if name == FILE:
            self.filename = _filename(options)

    def _data_came(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._of_file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > VALUE_BYTES_MAX:
            raise _refused(f"{self._name} has more than {VALUE_BYTES_MAX} bytes", self._name)

    def _part_ended(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = _text(bytes(self._value))

    def _ended(self) -> None:
        self._is_whole = True


def _boundary(content_type: str | None) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != FORM.encode() or _BOUNDARY.fullmatch(boundary.decode("latin-1")) is None:
        message = f"an upload is {FORM} with a boundary, as its content-type says"
        raise _refused(message, "content-type")
    return boundary


def _filename(options: Mapping[bytes, bytes]) -> str:
    name = _text(options.get(b"filename", b"")) or FILE
    if len(name) > FILENAME_CHARS_MAX:
        raise _refused(f"the filename has more than {FILENAME_CHARS_MAX} characters", FILE)
    return name


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _refused("a field or a name of the form is not UTF-8") from error


def _broken() -> RequestRefused:
    return _refused("the form is cut or broken: it is no multipart/form-data of that boundary")


def _refused(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(Fault.INVALID, message, param)
