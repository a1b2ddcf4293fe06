"""A client's request that can't be served as it is, as an exception of the edge."""

from collections.abc import Mapping

from schemas.http import Fault


class Problem(Exception):
    """What is wrong; `message` says what to change, `param` names the field or header.

    `headers` go with the answer, beside those of every error.
    """

    def __init__(
        self,
        fault: Fault,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.fault, self.message, self.param = fault, message, param
        self.headers = dict(headers or {})
