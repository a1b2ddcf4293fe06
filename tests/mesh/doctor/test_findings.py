"""Checks at once: in order on the found, and none left behind."""

import asyncio

import pytest

from mesh.doctor.findings import CheckResult, Finding, RegionFindings, Remedy, remedies


async def test_all_run_at_once_and_their_findings_stand_in_order():
    found, second_done = RegionFindings("us"), asyncio.Event()

    async def first(page):
        await second_done.wait()
        page.add("check", "first", CheckResult.OK, "")

    async def second(page):
        page.add("check", "second", CheckResult.OK, "")
        second_done.set()

    await found.run_concurrently(first, second)
    assert [(one.region, one.about) for one in found.findings] == [
        ("us", "first"),
        ("us", "second"),
    ]


async def test_one_that_raises_ends_the_others_and_what_was_found_is_kept():
    found, ended = RegionFindings("us"), []

    async def waits(page):
        page.add("check", "waits", CheckResult.OK, "")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def raises(page):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await found.run_concurrently(waits, raises)
    assert ended == ["waits"]
    assert [one.about for one in found.findings] == ["waits"]


def test_remedies_of_what_is_bad_come_first_and_each_once():
    def finding(region, verdict, what):
        remedy = what and Remedy(what, "true")
        return Finding(region, "check", "about", verdict, "", remedy=remedy)

    found = [
        finding("ap", CheckResult.WARNING, "restart"),
        finding("ap", CheckResult.OK, None),
        finding("eu", CheckResult.WARNING, "restart"),
        finding("eu", CheckResult.WARNING, "restart"),
        finding("us", CheckResult.BAD, "restart"),
        finding("us", CheckResult.WARNING, "restart"),
        finding("us", CheckResult.BAD, "repair"),
    ]
    shown = [(region, remedy.what) for region, remedy in remedies(found)]
    assert shown == [("us", "restart"), ("us", "repair"), ("ap", "restart"), ("eu", "restart")]
