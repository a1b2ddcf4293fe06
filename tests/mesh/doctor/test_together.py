"""Checks at once: in order on the chart, and none left behind."""

import asyncio

import pytest

from mesh.doctor.findings import Chart, Verdict
from mesh.doctor.together import together


async def test_all_run_at_once_and_their_findings_stand_in_order():
    chart, second_done = Chart("us", []), asyncio.Event()

    async def first(page):
        await second_done.wait()
        page.note("check", "first", Verdict.OK, "")

    async def second(page):
        page.note("check", "second", Verdict.OK, "")
        second_done.set()

    await together(chart, first, second)
    assert [(one.region, one.about) for one in chart.findings] == [
        ("us", "first"),
        ("us", "second"),
    ]


async def test_one_that_raises_ends_the_others_and_what_was_found_is_kept():
    chart, ended = Chart("us", []), []

    async def waits(page):
        page.note("check", "waits", Verdict.OK, "")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def raises(page):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await together(chart, waits, raises)
    assert ended == ["waits"]
    assert [one.about for one in chart.findings] == ["waits"]
