"""A client's request that can't be served as it is, as an exception of the edge."""

from schemas.http import Fault


class Problem(Exception):
    """What is wrong; `message` says what to change, `param` names the field or header."""

    def __init__(self, fault: Fault, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.fault, self.message, self.param = fault, message, param
