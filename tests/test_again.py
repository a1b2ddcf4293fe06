"""The second try of `make test`."""

import json

import pytest

from tests import again

FAILED, INTERRUPTED = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("status", "failed", "is_tried"),
    [
        (FAILED, 1, True),
        (FAILED, again.FEW, True),
        (FAILED, again.FEW + 1, False),
        (FAILED, 0, False),  # no test: a worker crashed, or collecting failed
        (INTERRUPTED, 1, False),
    ],
)
@pytest.mark.parametrize("second", [0, 1])
def test_few_that_failed_are_tried_once_more(
    tmp_path, monkeypatch, capsys, status, failed, is_tried, second
):
    names = [f"tests/test_x.py::test_{n}" for n in range(failed)]
    monkeypatch.setattr(again, "LAST_FAILED", tmp_path / "lastfailed")
    again.LAST_FAILED.write_text(json.dumps(dict.fromkeys(names, True)))
    tried = []
    monkeypatch.setattr(pytest, "main", lambda words: tried.append(words) or second)
    assert again.main(status, "-m", "tools") == (second if is_tried else status)
    assert tried == ([["-m", "tools", *names]] if is_tried else [])
    said = capsys.readouterr().out
    assert all((name in said) == is_tried for name in names)


def test_without_a_list_of_failed_tests_the_status_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(again, "LAST_FAILED", tmp_path / "lastfailed")
    assert again.main(FAILED) == FAILED
