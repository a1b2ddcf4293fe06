"""The benchmark of many replicas with few, and for seconds."""

import pytest
from click.testing import CliRunner

from tests.programs.live.many_replicas import main, what_became


@pytest.mark.timeout(120)
def test_a_short_form_measures_all_and_answers_all():
    words = ("--replicas=20", "--quiet-s=3", "--blocks=1000", "--rate=40", "--busy-s=1")
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    rows = {
        cells[0].strip(): cells[1].strip()
        for line in result.output.splitlines()
        if len(cells := line.strip("│┃").replace("┃", "│").split("│")) == 2
    }
    assert rows["requests"] == "40 answered, 0 shed, 0 failed"
    assert set(rows) > {"a heartbeat", "a decision", "memory with blocks", "clients were late by"}
    assert all(name in rows["cores of"] for name in ("nats-server", "replicas", "clients"))


def test_what_was_refused_for_want_of_room_is_not_what_went_wrong():
    statuses = {"200": 5, "429": 2, "503": 1, "500": 3, "failed": 4}
    assert what_became(statuses) == "5 answered, 3 shed, 7 failed"
