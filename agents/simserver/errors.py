"""Errors as an OpenAI client expects them: a status, and a JSON object that says what to do."""

from dataclasses import dataclass

import orjson


@dataclass(frozen=True, slots=True)
class ApiError(Exception):
    """Ends one HTTP request; `param` names the field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        """OpenAI's `type` for the status."""
        if self.status == 404:
            return "not_found_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The JSON body."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code or self.status,
                }
            }
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param, code)
