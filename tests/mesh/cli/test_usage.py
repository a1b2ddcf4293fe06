"""What `mesh usage` prints of accounts, whoever wrote them."""

import pytest

from mesh.cli import usage
from schemas.usage import UsageRow

ROW = UsageRow(key="k\x1b[2J", tenant="a\nb", model="tiny\x9b", served_region="us", requests=1)


@pytest.mark.parametrize("form", usage._FORMS)
def test_nothing_is_printed_that_a_terminal_obeys(form, capsys):
    usage._FORMS[form](usage.COLUMNS, [usage.DayRow("2026-11-30", ROW)], {})
    shown = capsys.readouterr().out
    assert "tiny" in shown
    assert all(one.isprintable() for one in shown.replace("\n", ""))
    assert "a\nb" not in shown
