"""Pairs of a prefill and a decode replica in the twin: the live core, session and agents."""

from random import Random

import pytest

from agents.core.replica_config import KvPart
from mesh.sim import kv_transfer
from mesh.sim.config import EngineCrash, ReplicaCrash, WorldInvalid
from mesh.sim.world import report
from schemas.ids import ReplicaId
from schemas.kv_transfer import KvRole, TransferKind
from tests.mesh.sim.build import EU, US, arrivals, config, leftovers, node, played, steady
from tests.mesh.sim.random_faults import random_faults

TIMEOUT_S = 10.0  # a minute of virtual time costs as much as all requests
LATE = (2 * TIMEOUT_S, US, node(300, 20))  # by then no engine waits for another one
NIXL, SGLANG = TransferKind.NIXL, TransferKind.SGLANG


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(kv_transfer, "TIMEOUT_S", TIMEOUT_S)


def parts(kind: TransferKind, pairs: int, region: str = "us") -> dict[str, KvPart]:
    """The region's first replicas compute prompts, as many after them decode."""
    found = {}
    for number in range(1, pairs + 1):
        address = "host:1" if kind is SGLANG else None
        found[f"{region}-{number}"] = KvPart(kind, KvRole.PREFILL, address)
        found[f"{region}-{number + pairs}"] = KvPart(kind, KvRole.DECODE)
    return found


def report_of(workload, world_config):
    world = played(workload, world_config)
    assert leftovers(world) == {}
    assert len(world.transfers) == 0, "every KV cache was fetched or given up"
    for router in world.all_routers():
        for replica in router.core.replicas:
            unseen = replica.on_the_way
            if any(one.sent_at > replica.seen_at for one in unseen._unseen.values()):
                unseen.expire(world.queue.now)  # the last request's: no heartbeat has come since
            assert len(unseen) == 0
    return report(world, workload), world


@pytest.mark.parametrize("kind", [NIXL, SGLANG])
def test_prompts_are_computed_by_one_engine_and_answered_by_another(kind):
    workload = steady(10, 0.5, US, prompt=400, answer=20)
    fleet = config({US: 2}, policy="least-load", parts=parts(kind, 1))
    result, world = report_of(workload, fleet)
    assert result["ok"] == 10
    prefill, decode = (world.replicas[ReplicaId(name)].engine.sim for name in ("us-1", "us-2"))
    stats = [engine.stats(world.queue.now) for engine in (prefill, decode)]
    assert [one.finished for one in stats] == [10, 10]
    assert [one.generated_tokens for one in stats] == [10, 200]
    assert stats[1].hit_tokens == 10 * 384, "all full blocks but the last token's came along"
    assert [one.kv_used_tokens for one in stats] == [0, 0]


@pytest.mark.parametrize("kind", [NIXL, SGLANG])
@pytest.mark.parametrize("fault", [EngineCrash, ReplicaCrash])
def test_one_member_of_each_role_crashes_and_every_request_ends(kind, fault):
    rows = [(0.05 * n, US, node(300, 20, name=10 + n)) for n in range(60)]
    workload = arrivals(*rows, LATE)
    crashes = tuple(fault(replica=ReplicaId(name), at_s=1.0) for name in ("us-1", "us-3"))
    fleet = config({US: 4}, policy="least-load", parts=parts(kind, 2), faults=crashes)
    result, _ = report_of(workload, fleet)
    assert result["ok"] + result["shed"] + result["failed"] == 61
    assert set(result["failures"]) <= {"engine_failed"}, "only answers that had begun"
    assert result["ok"] >= 50


def test_a_whole_role_that_crashes_leaves_the_plain_replica():
    rows = [(0.2 * n, US, node(300, 5, name=10 + n)) for n in range(19)]
    workload = arrivals(*rows, LATE)
    fleet = config(
        {US: 3},
        policy="mesh",
        parts=parts(SGLANG, 1),
        faults=(EngineCrash(replica=ReplicaId("us-2"), at_s=1.01),),
    )
    result, _ = report_of(workload, fleet)
    assert result["ok"] == 20


def test_peers_requests_are_answered_by_pairs():
    workload = steady(10, 0.5, US, prompt=300, answer=5)
    fleet = config({US: 0, EU: 2}, policy="skywalker", parts=parts(NIXL, 1, "eu"))
    result, world = report_of(workload, fleet)
    assert (result["ok"], result["forwarded"]) == (10, 10)
    assert world.replicas[ReplicaId("eu-1")].engine.sim.stats(world.queue.now).finished == 10


def test_pairs_stall_no_answers_with_long_prompts():
    """What disaggregation is for: on plain replicas long prompts hold up running answers."""
    rows = [(0.0, US, node(50, 400, name=1)), (0.0, US, node(50, 400, name=2))]
    rows += [(1.0 + 0.3 * n, US, node(900, 2, name=10 + n)) for n in range(6)]

    def gap_s(**fields):
        result, _ = report_of(arrivals(*rows), config({US: 2}, policy="least-load", **fields))
        assert result["ok"] == len(rows)
        return result["itl_s"]["p50"]

    assert gap_s(parts=parts(NIXL, 1)) < 0.1 * gap_s()


def test_the_twin_plays_two_transfer_kinds():
    with pytest.raises(WorldInvalid, match="nixl or sglang"):
        config({US: 1}, parts={"us-1": KvPart(TransferKind.P2P, KvRole.PREFILL, "host:1")})


@pytest.mark.parametrize("seed", range(2))
def test_random_faults_leave_no_request_open_and_no_stage_behind(seed):
    dice = Random(seed)
    fleet = {US: 5, EU: 5}
    names = [ReplicaId(f"{region}-{n + 1}") for region, size in fleet.items() for n in range(size)]
    schedule = random_faults(dice, replicas=names, regions=[US, EU], count=8, within_s=15.0)
    kind = dice.choice((NIXL, SGLANG))
    workload = arrivals(
        *[(0.1 * n, (US, EU)[n % 2], node(400, 30, name=10 + n)) for n in range(150)],
        (15.0 + 3 * TIMEOUT_S, US, node(50, 2)),
    )
    policy = dice.choice(("mesh", "skywalker", "least-load"))
    world_config = config(
        fleet,
        parts=parts(kind, 2) | parts(kind, 2, "eu"),
        faults=schedule,
        seed=seed,
        policy=policy,
        loss=0.05,
        hold_s_max=10.0,
        request_s_max=60.0,
    )
    result, _ = report_of(workload, world_config)
    assert result["ok"] + result["shed"] + result["failed"] == 151
    assert result["ok"] > 25, schedule
