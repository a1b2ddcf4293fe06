"""Reads the form of an upload (multipart/form-data, RFC 7578) step by step: one file, short fields.

Nothing of the file is kept here. What is kept and what may come beside the file is limited.
"""

from collections.abc import Mapping

from mesh.adapters.form_parts import FormInvalid, FormParts, broken, form_text
from mesh.adapters.read_request import RequestRefused
from schemas.http import Fault
from schemas.problems import did_you_mean

FILE, PURPOSE = "file", "purpose"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
NAMES = (FILE, PURPOSE, ANCHOR, SECONDS)
VALUE_BYTES_MAX = 256
FILENAME_CHARS_MAX = 255
BESIDE_BYTES_MAX = 64 * 1024  # of a form: all that is not the file


class UploadForm:
    """One form. Every method raises RequestRefused for what it can't take."""

    def __init__(self, content_type: str | None) -> None:
        self._beside_bytes = 0
        try:
            self._parts = _UploadParts(content_type)
        except FormInvalid as error:
            raise _refused(error) from error

    @property
    def fields(self) -> dict[str, str]:
        """Those that are whole."""
        return self._parts.fields

    @property
    def filename(self) -> str | None:
        """Once the file has begun."""
        return self._parts.filename

    def feed(self, data: bytes) -> bytes:
        """The bytes of the file in the next ones of the form: STEP_BYTES at most, or the caller
        takes too long at once."""
        try:
            self._parts.write(data)
            of_file = self._parts.taken()
            self._beside_bytes += len(data) - len(of_file)
            if self._beside_bytes > BESIDE_BYTES_MAX:
                message = f"the form has more than {BESIDE_BYTES_MAX} bytes beside its file"
                raise FormInvalid(message)
        except FormInvalid as error:
            raise _refused(error) from error
        return of_file

    def end(self) -> None:
        """No more bytes come."""
        if not self._parts.is_whole:
            raise _refused(broken())
        for name in (FILE, PURPOSE):
            if name not in self._parts.names:
                raise _refused(FormInvalid(f"the form has no part {name!r}; add it", name))


class _UploadParts(FormParts):
    """The file's bytes until they are taken, and the fields."""

    def __init__(self, content_type: str | None) -> None:
        super().__init__(content_type)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.names: set[str] = set()
        self._name = ""  # of the part that is read
        self._value = bytearray()
        self._of_file: list[bytes] = []

    def taken(self) -> bytes:
        of_file = b"".join(self._of_file)
        self._of_file.clear()
        return of_file

    def began(self, name: str, options: Mapping[bytes, bytes]) -> None:
        if name not in NAMES:
            message = f"unknown field {name!r:.60}{did_you_mean(name, NAMES)}"
            raise FormInvalid(message, name[:60])
        if name in self.names:
            raise FormInvalid(f"{name} is given twice; give it once", name)
        self._name = name
        self._value.clear()
        self.names.add(name)
        if name == FILE:
            self.filename = _filename(options)

    def came(self, data: bytes) -> None:
        if self._name == FILE:
            self._of_file.append(data)
            return
        self._value += data
        if len(self._value) > VALUE_BYTES_MAX:
            raise FormInvalid(f"{self._name} has more than {VALUE_BYTES_MAX} bytes", self._name)

    def ended(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = form_text(bytes(self._value))


def _filename(options: Mapping[bytes, bytes]) -> str:
    name = form_text(options.get(b"filename", b"")) or FILE
    if len(name) > FILENAME_CHARS_MAX:
        raise FormInvalid(f"the filename has more than {FILENAME_CHARS_MAX} characters", FILE)
    return name


def _refused(error: FormInvalid) -> RequestRefused:
    return RequestRefused(Fault.INVALID, str(error), error.param)
