"""Which replicas serve a model, which are idle, and a sample with holders and idle ones."""

from random import Random

from mesh.core.view.replica_sampling import IDLE_MAX, OTHERS_MAX, ReplicaSampler
from schemas.ids import ModelId, ReplicaId

M, N = ModelId("m"), ModelId("n")


def sampler(count, idle=()):
    """Each member is its own name in capitals."""
    built = ReplicaSampler()
    for number in range(count):
        name = ReplicaId(f"r{number}")
        built.enter(name, (M,), name.upper())
        built.settle(name, (M,), is_idle=number in idle)
    return built


def test_a_sample_has_those_named_the_idle_ones_and_some_others():
    replicas = sampler(1000, idle=(7, 500)).replicas_of(M)
    some = replicas.some(["r3", "gone", "r999"], Random(1))
    assert some[:4] == ["R3", "R999", "R7", "R500"]
    assert 40 < len(some) == len(set(some)) <= 4 + OTHERS_MAX
    assert (
        some == replicas.some(["r3", "r999"], Random(1)) != replicas.some(["r3", "r999"], Random(2))
    )


def test_of_many_idle_ones_some_are_drawn():
    replicas = sampler(1000, idle=range(500, 1000)).replicas_of(M)
    some = replicas.some([], Random(1))
    assert len(some) <= IDLE_MAX + OTHERS_MAX
    assert all(int(name[1:]) >= 500 for name in some[:10])


def test_all_have_the_same_chance():
    replicas, dice = sampler(200).replicas_of(M), Random(1)
    seen = {name for _ in range(60) for name in replicas.some([], dice)}
    assert seen == set(replicas.members.values())


def test_who_leaves_is_drawn_no_more():
    built = sampler(100, idle=range(100))
    built.leave(ReplicaId("r5"), (M, N))
    replicas = built.replicas_of(M)
    assert "r5" not in replicas.idle
    assert all("R5" not in replicas.some(["r5"], Random(seed)) for seed in range(50))
    for number in range(100):
        built.leave(ReplicaId(f"r{number}"), (M,))
    assert (list(built.models()), built.replicas_of(M).some(["r1"], Random(1))) == ([], [])


def test_work_and_its_end_are_noticed():
    built = sampler(3, idle=(0, 1, 2))
    built.settle(ReplicaId("r1"), (M,), is_idle=False)
    assert sorted(built.replicas_of(M).idle) == ["r0", "r2"]
    built.settle(ReplicaId("r1"), (M,), is_idle=True)
    assert sorted(built.replicas_of(M).idle) == ["r0", "r1", "r2"]


def test_one_may_serve_two_models():
    built = sampler(2)
    built.enter(ReplicaId("both"), (M, N), "BOTH")
    assert list(built.replicas_of(N).members) == ["both"] and len(built.replicas_of(M).members) == 3
    built.leave(ReplicaId("both"), (N,))
    assert list(built.models()) == [M]
