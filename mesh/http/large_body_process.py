"""The process that parses large bodies for a router: bytes of bodies in, their few fields out.

Parsing JSON holds the interpreter's lock in any thread: for 0.1 s where 32 MiB are one text, and
for seconds where they are ten million empty lists, which take a gigabyte. Here that blocks no
other request, the memory is freed with the process, and where memory is short the kernel ends this
process first. (A limit of address space would not do: orjson asks for gigabytes that it never
touches, and does not survive a refusal.)

    in:  >IQ  bytes of the path and content-type, bytes of the body;  path, space, type;  the body
    out: >BBIQ whether it is to be ended, what it is (fields or problem), bytes of its msgpack,
         bytes of the prompt's text;  both

It ends when its input ends, as it does with its router. Run this module with `python -m`.
"""

import contextlib
import gc
import resource
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgpack

from mesh.adapters.refused import RequestRefused
from mesh.core.model.prompt import PromptText
from mesh.core.model.prompt_parts import Part, PartKind
from mesh.http.form_parts import model_place
from mesh.http.read_request import BodyFields, read_fields
from mesh.session.body_model import ModelPlace
from schemas.http import Fault

ASKED = struct.Struct(">IQ")
ANSWERED = struct.Struct(">BBIQ")
FIELDS, PROBLEM = 0, 1
OOM_SCORE = Path("/proc/self/oom_score_adj")  # Linux
KEPT_BYTES_MAX = 256 * 1024**2  # a process that needed more is ended, and replaced


def pack(fields: BodyFields) -> tuple[bytes, ...]:
    """An answer, in pieces."""
    text = fields.text
    place = fields.model_place
    values = [fields.model, fields.options, fields.adds_usage, fields.streams, place, *text[1:]]
    about = msgpack.packb(values, unicode_errors="surrogatepass")
    return ANSWERED.pack(_has_grown(), FIELDS, len(about), len(text.data)), about, text.data


def pack_problem(problem: RequestRefused) -> tuple[bytes, ...]:
    """The same, for a body that can't be served."""
    about = msgpack.packb(
        [problem.fault.name, problem.message, problem.param], unicode_errors="surrogatepass"
    )
    return ANSWERED.pack(_has_grown(), PROBLEM, len(about), 0), about


def unpack(kind: int, about: bytes, text: bytes) -> BodyFields:
    """What was packed. Raises RequestRefused if it was one."""
    values = msgpack.unpackb(about, unicode_errors="surrogatepass")
    if kind == PROBLEM:
        name, message, param = values
        raise RequestRefused(Fault[name], message, param)
    model, options, adds_usage, streams, place, parts, *rest = values
    found = tuple(Part(PartKind(kind), end) for kind, end in parts)
    at = None if place is None else ModelPlace(*place)
    prompt = PromptText(text, found, *rest)
    return BodyFields(model, options, prompt, adds_usage, streams, at)


def serve(asked: BinaryIO, answered: BinaryIO) -> None:
    """Answer until the input ends."""
    while len(head := asked.read(ASKED.size)) == ASKED.size:
        path_bytes, body_bytes = ASKED.unpack(head)
        about, body = asked.read(path_bytes).decode(), asked.read(body_bytes)
        path, _, content_type = about.partition(" ")
        if len(body) < body_bytes:
            return
        try:
            fields = read_fields(path, body, content_type)
            pieces = pack(replace(fields, model_place=model_place(body, content_type)))
        except RequestRefused as problem:
            pieces = pack_problem(problem)
        except MemoryError:
            pieces = pack_problem(too_complex())
        del body
        answered.writelines(pieces)
        answered.flush()
        del pieces


def _has_grown() -> bool:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > KEPT_BYTES_MAX


def too_complex() -> RequestRefused:
    """The error for a body whose values take too much memory or time."""
    message = "the body has too many values to be read; send less at once"
    return RequestRefused(Fault.BODY_TOO_LARGE, message)


def main() -> None:
    gc.disable()  # what is parsed has no cycles, and many parts to look at
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text("1000")
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
