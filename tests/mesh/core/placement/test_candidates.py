"""The layer that is kept is the one that would be made anew, whatever has happened since."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.core.model.settings import RouterSettings
from mesh.core.placement import candidates as module
from mesh.core.placement.candidates import CandidateCache
from mesh.core.placement.residency import Residency
from mesh.core.policies.base import Target
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_sampling import ALL_MAX
from mesh.core.view.replica_table import ReplicaTable
from schemas.decision import CandidateKind
from schemas.ids import ModelId, ReplicaId
from schemas.state import ReplicaState
from tests.mesh.core.build import EU, MODEL, ROUTER, US, beat, digest, request

OTHER = ModelId("other")
KNOWN = RouterSettings()


class Region:
    """Replicas to which things happen, and the layers that are kept of them."""

    def __init__(self):
        self.replicas = ReplicaTable(ROUTER, KNOWN)
        self.peers = PeerTable(KNOWN, US)
        self.peers.see(digest(EU), 0.0)
        residency, late_s = Residency(US, KNOWN.ground), KNOWN.heartbeat_late_s
        self.layers = CandidateCache(self.replicas, self.peers, residency, Random(1), late_s)
        self.now, self.seq, self.sent = 0.0, 0, []

    def says(self, name, **fields):
        self.seq += 1
        self.replicas.see(beat(name, self.seq, **fields), self.now)

    def sends(self, name):
        if self.replicas.get(name) is not None:
            self.sent.append((name, self.replicas.hand_off(name, 10, 10, self.now)))

    def layer(self, model=MODEL, avoid=(), ahead=0, busy_too=True):
        asked = request(1, model=model)
        return self.layers.of_replicas(
            asked, avoid, self.now, ahead, sampling=None, busy_too=busy_too
        )

    def new(self, model=MODEL):
        """Made anew, as for a request with a place to avoid."""
        return self.layer(model, avoid=("nobody",))


def happens(region, dice):
    """One thing, to one of five replicas or to all."""
    name = ReplicaId(f"r{dice.randrange(5)}")
    kind = dice.randrange(12)
    if kind < 5:
        region.says(
            name,
            state=dice.choice([ReplicaState.READY] * 6 + [ReplicaState.DOWN, ReplicaState.GONE]),
            models=dice.choice([(MODEL,), (MODEL,), (OTHER,), (MODEL, OTHER)]),
            outstanding=dice.randrange(4),
            outstanding_max=dice.choice([3, 4] + [256] * 20 + [None]),
            epoch=dice.choice([1, 1, 1, 2]),
            region=EU if name == "r4" else US,
        )
    elif kind < 7:
        region.sends(name)
    elif kind == 7 and region.sent:
        region.replicas.over(*region.sent.pop(dice.randrange(len(region.sent))))
    elif kind == 8:
        region.replicas.refused(name, region.now)
    elif kind == 9:
        region.now += dice.choice([0.05, 0.2, 4.0, 40.0])
        region.replicas.expire(region.now)
    elif kind == 10:
        region.peers.measured(EU, dice.choice([0.1, 0.2]))
    else:
        region.replicas.adopted_by_peer = dice.random() < 0.3


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_kept_is_as_made_anew(seed):
    region, dice = Region(), Random(seed)
    for number in range(5):
        region.says(f"r{number}", region=EU if number == 4 else US)
    for _ in range(60):
        happens(region, dice)
        for model in (MODEL, OTHER):
            assert region.layer(model) == region.new(model)


@pytest.fixture
def region():
    region = Region()
    for name in "abc":
        region.says(name)
    return region


def test_targets_of_replicas_with_another_load_are_made_anew(region):
    before = list(region.layer().free)
    assert [one.load for one in before] == [0, 0, 0]
    region.sends("b")
    after = region.layer().free
    assert [one.load for one in after] == [0, 1, 0]
    assert [one is two for one, two in zip(before, after, strict=True)] == [True, False, True]


def test_targets_have_every_field_at_its_place(region):
    """They are made past the constructor, which would see to that."""
    region.peers.measured(EU, 0.25)
    region.says("b", region=EU, outstanding=3)
    region.sends("b")
    [target] = [one for one in region.layer(ahead=7).free if one.name == "b"]
    replica = region.replicas.get(ReplicaId("b"))
    assert target._asdict() == {
        "name": "b",
        "load": 4,
        "kind": CandidateKind.REPLICA,
        "rtt_s": 0.25,
        "replica": replica,
        "peer": None,
        "ahead": 7,
        "prefill": None,
    }
    assert Target(**target._asdict()) == target


def test_replicas_of_another_model_change_nothing(region):
    region.says("d", models=(OTHER,))
    layer = region.layer()
    region.sends("d")
    region.says("d", models=(OTHER,), outstanding=1)
    assert region.layer() is layer
    region.says("d", models=(MODEL,))
    assert len(region.layer().free) == 4


@pytest.mark.parametrize("how", [{"avoid": ("a",)}, {"ahead": 2}, {"busy_too": False}])
def test_other_requests_do_not_get_the_kept_layer(region, how):
    layer = region.layer()
    other = region.layer(**how)
    assert other is not layer
    assert region.layer() is layer
    if "avoid" in how:
        busy = [(one.name, why) for one, why in other.busy]
        assert busy == [("a", "it refused or failed before")]
    if "ahead" in how:
        assert [one.ahead for one in other.free] == [2, 2, 2]


def test_replicas_that_are_left_to_others_take_nobodys_place_in_a_sample(region):
    class NoHolders:
        def holders(self, request, count):
            return ()

    names = [f"r{number}" for number in range(3 * ALL_MAX)]
    for name in names:
        region.says(name)
    for one in names[::20]:
        layer = region.layers.of_replicas(
            request(1), (), region.now, 0,
            sampling=NoHolders(), busy_too=True, kept_from=set(region.replicas.by_name) - {one},
        )  # fmt: skip
        assert [target.name for target in layer.free] == [one]


def test_layers_of_few_models_are_kept(region, monkeypatch):
    monkeypatch.setattr(module, "KEPT_MAX", 3)
    region.says("d", models=tuple(ModelId(f"m{number}") for number in range(10)))
    for number in range(10):
        assert len(region.layer(ModelId(f"m{number}"))) == 1
        assert len(region.layers._kept) <= 3
