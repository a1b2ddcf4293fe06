import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.adapters.refused import RequestRefused
from mesh.http.files_api import (
    BESIDE_BYTES_MAX,
    FILENAME_CHARS_MAX,
    VALUE_BYTES_MAX,
    UploadForm,
)
from mesh.http.form_parts import STEP_BYTES
from schemas.http import Fault

KIND = "multipart/form-data; boundary=b"


def part(name: str, value: bytes, more: str = "", header: str = "") -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n{header}\r\n'
    return head.encode() + value + b"\r\n"


def a_file(value: bytes = b"{}\n", name: str = "in.jsonl") -> bytes:
    return part("file", value, f'; filename="{name}"', "Content-Type: application/jsonl\r\n")


PURPOSE = part("purpose", b"batch")
END = b"--b--\r\n"


def read(form: bytes, kind: str | None = KIND, step: int = STEP_BYTES) -> tuple[UploadForm, bytes]:
    made = UploadForm(kind)
    found = b"".join(made.feed(form[at : at + step]) for at in range(0, len(form), step))
    made.end()
    return made, found


NEARLY = [b"\r", b"\n", b"-", b"\r\n--b", b"\r\n--", b"--b--", b"x", b"\r\n--bX", b"\x00\xff"]


@given(
    pieces=st.lists(st.sampled_from(NEARLY), max_size=30),
    step=st.integers(1, 40),
    is_first=st.booleans(),
)
def test_a_file_comes_out_as_it_went_in_whatever_the_pieces(pieces, step, is_first):
    sent = b"".join(pieces)
    sent = sent[: (sent + b"\r\n--b").index(b"\r\n--b")]  # as a client chooses its boundary
    parts = [a_file(sent), PURPOSE, part("expires_after[seconds]", b"3600")]
    form, found = read(b"".join(parts if is_first else parts[::-1]) + END, step=step)
    assert found == sent
    assert form.filename == "in.jsonl"
    assert form.fields == {"purpose": "batch", "expires_after[seconds]": "3600"}


WRONG = {
    "no file": (PURPOSE + END, "file"),
    "no purpose": (a_file() + END, "purpose"),
    "two files": (a_file() + a_file() + PURPOSE + END, "file"),
    "two purposes": (PURPOSE + PURPOSE + a_file() + END, "purpose"),
    "an unknown field": (PURPOSE + part("porpoise", b"batch") + a_file() + END, "porpoise"),
    "a part without a name": (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END, None),
    "a part without headers": (b"--b\r\n\r\nx\r\n" + END, None),
    "a part of another kind": (b'--b\r\nContent-Disposition: x; name="file"\r\n\r\n' + END, None),
    "base64": (
        part("file", b"e30=", '; filename="x"', "Content-Transfer-Encoding: base64\r\n") + END,
        "file",
    ),
    "cut before its end": (PURPOSE + a_file(), None),
    "cut in the file": (PURPOSE + a_file()[:-6], None),
    "nothing": (b"", None),
    "another boundary": (b"--c\r\n" + PURPOSE + a_file() + END, None),
    "no form": (b'{"file": "x"}', None),
    "no UTF-8 in a field": (part("purpose", b"\xff") + a_file() + END, None),
    "a long value": (part("purpose", b"b" * (VALUE_BYTES_MAX + 1)) + a_file() + END, "purpose"),
    "a long filename": (PURPOSE + a_file(name="x" * (FILENAME_CHARS_MAX + 1)) + END, "file"),
    "many headers": (b"--b\r\n" + b"a: b\r\n" * 99 + b"\r\n" + END, None),
    "a long header": (b"--b\r\na: " + b"b" * 99_999 + b"\r\n\r\n" + END, None),
    "much before the form": (b"\r\n" * BESIDE_BYTES_MAX + PURPOSE + a_file() + END, None),
    "much behind the form": (PURPOSE + a_file() + END + b"x" * (BESIDE_BYTES_MAX + 1), None),
}


@pytest.mark.parametrize(("form", "param"), WRONG.values(), ids=WRONG)
def test_a_wrong_form_is_refused_and_the_field_is_named(form, param):
    with pytest.raises(RequestRefused) as caught:
        read(form)
    assert (caught.value.fault, caught.value.param) == (Fault.INVALID, param)


@pytest.mark.parametrize(
    "kind",
    [
        *(None, "", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"),
        *("multipart/form-data; boundary=", "multipart/form-data; boundary=" + "b" * 71),
        *('multipart/form-data; boundary="b "', "multipart/form-data; boundary=b\u00e9"),
        *("multipart/form-data; boundary=b\u0101", "multipart/form-data; boundary=b\udcff"),
    ],
)
def test_a_content_type_that_is_no_form_is_refused(kind):
    with pytest.raises(RequestRefused) as caught:
        UploadForm(kind)
    assert caught.value.param == "content-type"


@pytest.mark.parametrize("kind", [KIND, 'Multipart/Form-Data;Boundary="b"; charset=utf-8'])
def test_a_form_is_known_however_its_type_is_spelt(kind):
    assert read(PURPOSE + a_file(b"1\n2\n") + END, kind)[1] == b"1\n2\n"


def test_what_is_as_large_as_may_be_is_taken():
    name = "x" * FILENAME_CHARS_MAX
    behind = BESIDE_BYTES_MAX - len(PURPOSE + a_file(b"", name) + END)
    form, found = read(PURPOSE + a_file(b"{}" * 99, name) + END + b"x" * behind)
    assert (form.filename, found) == (name, b"{}" * 99)
    assert read(PURPOSE + a_file(name="") + END)[0].filename == "file"


def test_no_step_takes_long_whatever_is_sent():
    """Of the worst known: a boundary begins again and again, and is none."""
    made = UploadForm(KIND)
    made.feed(a_file(b"")[:-2])
    step = (b"\r\n--bX" * STEP_BYTES)[:STEP_BYTES]
    took_s = []
    for _ in range(20):
        began_at = time.process_time()
        made.feed(step)
        took_s.append(time.process_time() - began_at)
    assert min(took_s) < 0.005
