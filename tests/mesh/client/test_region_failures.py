"""Whose fault an error is, for the errors that real libraries raise."""

import urllib.error
from email.message import Message
from types import SimpleNamespace

import aiohttp
import openai
import pytest

from mesh.client.region_choice import is_region_failure, retry_after_s


def status_error(status, **headers):
    response = SimpleNamespace(status_code=status, request=None, headers=headers)
    kind = openai.InternalServerError if status >= 500 else openai.RateLimitError
    return kind("no", response=response, body=None)


def url_error(status):
    return urllib.error.HTTPError("http://us", status, "no", Message(), None)


def caused_by(cause):
    try:
        raise RuntimeError("an SDK's own") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        OSError(113, "no route to host"),
        urllib.error.URLError("refused"),
        openai.APIConnectionError(request=None),
        openai.APITimeoutError(request=None),
        aiohttp.ServerDisconnectedError(),
        caused_by(ConnectionResetError()),
        status_error(503),
    ],
    ids=repr,
)
def test_errors_of_a_region_are_retried_elsewhere(error):
    assert is_region_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a prompt"),
        FileNotFoundError("a file of the caller's"),
        PermissionError("another"),
        KeyError("choices"),
        status_error(429),
        status_error(502),
        caused_by(ValueError("deep")),
    ],
    ids=repr,
)
def test_other_errors_are_not_retried(error):
    assert not is_region_failure(error)


def test_the_status_counts_before_the_class():
    assert is_region_failure(url_error(503))
    assert not is_region_failure(url_error(400))  # though it is an OSError


def test_retry_after_is_read():
    assert retry_after_s(status_error(503, **{"retry-after": "7"})) == 7.0
    assert retry_after_s(status_error(503)) == 0.0
    assert retry_after_s(status_error(503, **{"retry-after": "Wed, 21 Oct 2026"})) == 0.0
    assert retry_after_s(ConnectionRefusedError()) == 0.0


def test_a_circle_of_causes_ends():
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__cause__, other.__cause__ = other, one
    assert not is_region_failure(one)
