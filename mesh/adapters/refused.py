"""The error of a request that is not served, as its client is told."""

from collections.abc import Mapping

from schemas.http import Fault


class RequestRefused(Exception):
    """The router won't serve this request; `message` says what to change.

    `param` names the field or header at fault. `headers` go with the answer, beside those of every
    error.
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
        self.model = ""  # as far as it was read
        self.tenant = self.detail = ""
        self.headers = dict(headers or {})

    def asked_by(self, model: str, tenant: str, key_id: str) -> None:
        """Note what was asked for, and by whom, for operators."""
        self.model, self.tenant = model, tenant
        self.detail = f"key {key_id}: {self.message}" if key_id else ""
