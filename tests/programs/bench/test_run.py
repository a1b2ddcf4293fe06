"""Runs that don't go well, with real engines and a real client."""

import pytest

from tests.programs.bench import installs
from tests.programs.bench.cells import Cell, Client
from tests.programs.bench.processes import Absent
from tests.programs.bench.report import markdown
from tests.programs.bench.run import Settings, run, systems
from tests.programs.bench.systems.direct import direct
from tests.programs.bench.systems.system import System
from tests.support.ports import free_ports

SMALL = Cell("small", Client.OWN, 50, 4, 5, 2)
LONG = Cell("long", Client.OWN, 5_000, 4, 5, 2)


async def played(tmp_path, systems, *cells, rounds=1):
    shown = []
    settings = Settings(cells, rounds, systems, tmp_path)
    return await run(settings, shown.append), shown


async def test_who_does_not_start_is_absent_and_the_others_are_measured(tmp_path):
    async def ghost(place):
        raise Absent("can't be installed: no network")

    found, shown = await played(tmp_path, {"ghost": ghost, "direct": direct}, SMALL, rounds=2)
    assert found.absent == {"ghost": "can't be installed: no network"}
    assert shown[0] == "ghost is absent: can't be installed: no network"
    assert [figures["answered"] for figures in found.rounds["small"]["direct"]] == [2, 2]
    assert list(found.settings) == ["direct"]


async def test_who_stops_answering_is_absent_from_that_cell(tmp_path):
    async def gone(place):
        return System("gone", (f"http://127.0.0.1:{free_ports(1)[0]}",), "")

    found, _ = await played(tmp_path, {"gone": gone, "direct": direct}, SMALL)
    assert "no stream came through" in found.absent["gone: small"]
    assert found.rounds["small"]["gone"] == [{}]
    assert found.has("small", "direct")
    assert "gone: small: **absent**" in markdown(found)


async def test_a_system_without_long_prompts_gets_none(tmp_path):
    async def short(place):
        system = await direct(place)
        return System("short", system.urls, "", prompt_tokens_max=1_000, has_own_engines=True)

    found, _ = await played(tmp_path, {"short": short}, SMALL, LONG)
    assert found.absent == {"short: long": "prompts of at most 1,000 tokens"}
    assert found.has("small", "short")
    assert found.apart == ["short"]


@pytest.mark.parametrize("name", ["dynamo", "mesh-dynamo"])
async def test_what_needs_dynamo_is_absent_where_that_can_not_be_installed(
    tmp_path, monkeypatch, name
):
    wrong = tmp_path / "pyproject.toml"
    wrong.write_text('[dependency-groups]\nbench-dynamo = ["./nowhere-at-all"]\n')
    monkeypatch.setattr(installs, "PYPROJECT", wrong)
    start = systems(tmp_path / "environments", ())[name]
    found, _ = await played(tmp_path, {name: start}, SMALL)
    assert "can't be installed" in found.absent[name]
