"""No change makes a request dearer without saying so: `make gate-renew` after one that must."""

import json

from mesh.core.policies.mesh import MeshPolicy
from tests.gate import bytecodes
from tests.gate.renew import count

DEARER_MAX = 1.15
DEARER_ELSEWHERE_MAX = 1.3  # under another minor version than that of the figures


async def test_a_request_costs_no_more_bytecodes_than_it_did(nats_server):
    kept = json.loads(bytecodes.FIGURES.read_text())
    was = kept["figures"]
    most = DEARER_MAX if kept["python"] == bytecodes.python_version() else DEARER_ELSEWHERE_MAX
    now = await count(nats_server.url)
    assert set(now) == set(was), "make gate-renew"
    dearer = {
        name: f"{figure:.0f} bytecodes, {figure / was[name] - 1:+.0%}"
        for name, figure in now.items()
        if figure > was[name] * most
    }
    assert dearer == {}, "find out why; if it must be, make gate-renew"


def busy(times: int) -> None:
    """Executes bytecodes, in this module."""
    for _ in range(times):
        pass


def test_only_this_projects_own_functions_are_counted():
    with bytecodes.Bytecodes() as counter:
        busy(1000)
    assert counter.count == 0


def test_a_dearer_decision_is_seen(monkeypatch):
    before = bytecodes.count_decisions()
    choose = MeshPolicy.choose

    def twice(self, *arguments):
        choose(self, *arguments)
        return choose(self, *arguments)

    monkeypatch.setattr(MeshPolicy, "choose", twice)
    after = bytecodes.count_decisions()
    [name] = before
    assert after[name] > DEARER_MAX * before[name]
