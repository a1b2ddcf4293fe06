"""Lines of a job's output file and error file, as OpenAI writes them.

A line's result is made when its answer is there, and stored as it will stand in the file: `status`
says in which, the output file for an answer below 400, else the error file.
"""

import hashlib
from typing import Any, NamedTuple

import orjson

from schemas.http_statuses import INVALID

ID_HEX_DIGITS = 32
ENGINE_TEXT_CHARS_MAX = 2000  # of an engine's error answer that is no JSON
NO_ANSWER = 0  # the status of a line that has no answer
TOKENS_MAX = 2**32  # of one line; an engine that reports more is not believed

# Codes of lines without an answer, beside those of `job_file`.
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
TOO_LARGE = "response_too_large"
BROKEN = "invalid_response"


class Tokens(NamedTuple):
    """Of prompts and of answers."""

    input: int = 0
    output: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        return Tokens(self.input + other.input, self.output + other.output)


NO_TOKENS = Tokens()


class Result(NamedTuple):
    """A line's result."""

    status: int  # HTTP status of its answer, or NO_ANSWER
    line: bytes  # JSON, without a line break

    @property
    def is_error(self) -> bool:
        """Whether it belongs to the error file."""
        return is_error(self.status)


def is_error(status: int) -> bool:
    """Whether a result of that status belongs to the error file."""
    return status == NO_ANSWER or status >= INVALID


def answered(
    job: str, number: int, custom_id: str, status: int, request_id: str, body: bytes
) -> Result:
    """The result of a line that an engine answered with that status and body."""
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        if status < INVALID:
            message = f"The engine answered {status} with a body that is no JSON."
            return unanswered(job, number, custom_id, BROKEN, message)
        text = body.decode(errors="replace")[:ENGINE_TEXT_CHARS_MAX]
        content = {"error": {"message": text, "type": "engine_error", "param": None, "code": None}}
    response = {"status_code": status, "request_id": request_id, "body": content}
    try:
        return Result(status, _line(job, number, custom_id, response, None))
    except orjson.JSONEncodeError:
        message = f"The engine answered {status} with a body that is nested too deeply."
        return unanswered(job, number, custom_id, BROKEN, message)


def unanswered(
    job: str, number: int, custom_id: str, code: str, message: str, param: str | None = None
) -> Result:
    """The result of a line that no engine answered, and why."""
    error = {"code": code, "message": message}
    if param is not None:
        error["param"] = param
    return Result(NO_ANSWER, _line(job, number, custom_id, None, error))


def _line(
    job: str,
    number: int,
    custom_id: str,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
) -> bytes:
    fields = {
        "id": result_id(job, number),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(fields)


def error_code(status: int, line: bytes) -> str:
    """The code of a line without an answer; empty for every answer of an engine."""
    return str(orjson.loads(line)["error"]["code"]) if status == NO_ANSWER else ""


def tokens_of(status: int, line: bytes) -> Tokens:
    """Tokens that the engine reported; 0 where it reported none."""
    if is_error(status):
        return NO_TOKENS
    body = orjson.loads(line)["response"]["body"]
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    return Tokens(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))


def _count(tokens: object) -> int:
    return tokens if isinstance(tokens, int) and 0 <= tokens < TOKENS_MAX else 0


def result_id(job: str, number: int) -> str:
    """The id of a line's result: the same whichever runner makes it."""
    digest = hashlib.blake2b(f"{job}:{number}".encode(), digest_size=ID_HEX_DIGITS // 2)
    return f"batch_req_{digest.hexdigest()}"
