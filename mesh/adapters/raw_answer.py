"""Errors for connections on which no request was read: the bytes of a whole HTTP answer."""

import os

from schemas import http
from schemas.http import Fault

REASONS = {408: "Request Timeout", 503: "Service Unavailable"}
REQUEST_ID_BYTES = 16


def raw_error(fault: Fault, message: str, region: str) -> bytes:
    """What to write before closing the connection; it has the headers of every error."""
    body = http.error_body(fault, message)
    status = fault.value.status
    headers = {
        http.H_REQUEST_ID: os.urandom(REQUEST_ID_BYTES).hex(),
        http.H_REGION: region,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **http.error_headers(fault),
    }
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + body
