"""A region's digest: what it says, when it is due, and how often at most."""

import itertools

import pytest

from mesh.core.membership.region_digest import CHANGE_S_MIN, RegionalDigest
from mesh.core.model.served_names import served_name
from mesh.core.model.settings import SLOWEST_BYTES_PER_S, RouterSettings
from mesh.core.requests.hold_queue import HoldQueue
from mesh.core.view.outliers import IN_A_ROW, OUT_S
from mesh.core.view.peers import PeerTable
from mesh.core.view.replica_table import ReplicaTable
from schemas.http import EMBEDDINGS
from schemas.ids import ModelId, ReplicaId
from schemas.listed_replicas import LISTED_MAX
from schemas.residency import OPEN_GROUND, ground
from schemas.settings import MBIT_BYTES
from schemas.state import (
    AVOIDED_MAX,
    FirstWaiting,
    ModelCapacity,
    ReplicaState,
    decode_digest,
    encode_state,
)
from tests.mesh.core.build import EU, MODEL, ROUTER, US, beat, request

OTHER = ModelId("other")


class Region:
    """A region's tables and its digest."""

    def __init__(self, where=OPEN_GROUND, links=()):
        settings = RouterSettings(peer_queue_max=2, ground=where, links=links)
        self.replicas = ReplicaTable(ROUTER, settings)
        self.held = HoldQueue(100)
        self.peers = PeerTable(settings, US)
        tables = self.replicas, self.held, self.peers
        self.digest = RegionalDigest(US, ROUTER, 7, settings, *tables)

    def due(self, now, accepting=True, adopted=(), rtt_s=dict, routers=1):
        self.digest.busy_at = now
        return self.digest.due(
            now, accepting=accepting, adopted=dict(adopted), rtt_s=rtt_s, routers=routers
        )

    def fresh(self, now, adopted=()):
        return self.digest.fresh(now, accepting=True, adopted=dict(adopted))


def test_it_counts_what_peers_ask_about():
    region = Region()
    region.replicas.see(beat("a", prefill_s_per_token=0.1, kv_used_ratio=0.5), 0.0)
    region.replicas.see(beat("b", pending=1, prefill_s_per_token=0.3), 0.0)
    region.replicas.see(beat("c", models=(MODEL, OTHER), kv_used_ratio=0.1), 0.0)
    region.replicas.see(beat("d", state=ReplicaState.DOWN, prefill_s_per_token=9.0), 0.0)
    region.replicas.see(beat("e", models=()), 0.0)
    region.held.put(request(1))
    digest = region.due(0.1)
    assert (digest.region, digest.router, digest.epoch, digest.seq) == (US, ROUTER, 7, 1)
    assert (digest.accepting, digest.queue) == (True, 1)
    assert (digest.replicas_ready, digest.replicas_free) == (3, 2)
    assert digest.models == {
        MODEL: ModelCapacity(ready=3, free=2, running=0.0),
        OTHER: ModelCapacity(ready=1, free=1, running=0.0),
    }
    assert (digest.prefill_s_per_token, digest.kv_used_ratio) == (0.2, 0.3)


def test_it_says_which_peers_fail_what_is_forwarded_and_why():
    region = Region()
    assert b"avoided" not in encode_state(region.due(0.0))
    for _ in range(IN_A_ROW):
        region.peers.failing.failed(EU, MODEL, "HTTP 500", 1.0)
    told = decode_digest(encode_state(region.due(1.0)))
    assert told.avoided_peers == {EU: "failing: 3 of its last 3, HTTP 500"}
    for number in range(AVOIDED_MAX):
        region.peers.failing.failed(f"r{number}", MODEL, "x" * 999, 2.0, weight=IN_A_ROW)
    told = decode_digest(encode_state(region.due(2.0)))
    assert len(told.avoided_peers) == AVOIDED_MAX
    assert region.due(2.0 + 2 * OUT_S).avoided_peers == {}


def test_unknown_is_not_zero():
    region = Region()
    region.replicas.see(beat("a"), 0.0)
    digest = region.due(0.0)
    assert (digest.prefill_s_per_token, digest.kv_used_ratio) == (None, None)


def test_it_is_due_every_tenth_of_a_second_and_at_once_when_something_matters():
    region = Region()
    region.replicas.see(beat("a"), 1.0)
    assert region.due(1.0).seq == 1
    assert region.due(1.05) is None
    region.replicas.see(beat("a", 2, full=True), 1.05)
    assert region.due(1.06).seq == 2
    assert region.due(1.155) is None
    assert region.due(1.161).seq == 3


def test_crossing_the_peers_limit_matters_and_each_held_request_does_not():
    region = Region()
    assert region.due(1.0) is not None
    for key in range(2):
        region.held.put(request(key))
    assert region.due(1.02) is None
    region.held.put(request(2))
    assert region.due(1.04).queue == 3


def test_a_change_too_soon_after_another_waits():
    region = Region()
    assert region.due(1.0) is not None
    region.replicas.see(beat("a"), 1.0)
    assert region.due(1.0 + CHANGE_S_MIN / 2) is None
    assert region.due(1.0 + 2 * CHANGE_S_MIN).replicas_ready == 1


@pytest.mark.parametrize(
    ("models", "routers", "mbits"),
    [
        *((models, 1, 10.0) for models in (1, 3, 20, 64)),
        *((1, 3, 10.0), (64, 3, 10.0), (20, 2, 2.0), (64, 3, 100.0)),
    ],
)
def test_the_routers_of_a_region_take_an_eighth_of_the_slowest_link(models, routers, mbits):
    """Each placement may fill a replica, so what matters may change with every request."""
    bytes_per_s = mbits * MBIT_BYTES
    region = Region(links=((EU, bytes_per_s), ("ap", 1e9)))
    sent_bytes, peers_hear_s = 0, []
    names = tuple(ModelId(f"mistralai/Mistral-7B-Instruct-v0.{n}") for n in range(models))
    for step in range(500):
        now = step / 500
        for number in range(LISTED_MAX):
            load = {"kv_used_ratio": 0.537, "pending": step % 2, "prefill_s_per_token": 0.0001234}
            region.replicas.see(beat(f"us-{number}", step + 1, models=names, **load), now)
        if (digest := region.due(now, routers=routers)) is not None:
            peers_hear_s.append(now)
            sent_bytes += len(encode_state(digest))
    assert routers * sent_bytes <= bytes_per_s / 8 + routers * 16_384
    apart_s = max(after - before for before, after in itertools.pairwise(peers_hear_s))
    fits_in_s = routers * sent_bytes / len(peers_hear_s) / (bytes_per_s / 8)
    assert apart_s <= max(0.101, 1.5 * fits_in_s), "late digests are taken for a region in trouble"


def test_the_largest_digests_come_before_their_router_is_forgotten():
    region = Region()
    names = tuple(ModelId(f"model-{number}") for number in range(900))
    region.replicas.see(beat("a", models=names), 1.0)
    assert region.due(1.0) is not None
    assert region.due(1.49) is None
    assert region.due(1.51) is not None


def test_without_a_known_rate_a_link_carries_what_one_must():
    assert RouterSettings().slowest_bytes_per_s == SLOWEST_BYTES_PER_S == 1_250_000


def test_the_end_of_accepting_never_waits():
    region = Region()
    assert region.due(1.0).accepting
    assert not region.due(1.0, accepting=False).accepting


def test_handed_off_work_makes_a_replica_full():
    region = Region()
    region.replicas.see(beat("a", running=7), 0.0)
    assert region.due(0.0).replicas_free == 1
    region.replicas.hand_off(ReplicaId("a"), 10, 10, 0.0)
    assert region.due(0.05).replicas_free == 0


def test_arrivals_have_a_rate():
    region = Region()
    for number in range(200):
        region.digest.arrivals.count(number / 10)
        region.due(number / 10)
    assert 8.0 < region.due(20.5).requests_per_s < 12.0
    assert region.due(2000.0).requests_per_s == 0.0  # and not 1.55e-19


def test_its_numbers_are_short():
    """People read them at a terminal."""
    region = Region()
    region.replicas.see(beat("a", prefill_s_per_token=1 / 30_000, kv_used_ratio=1 / 3), 0.0)
    region.replicas.see(beat("b", prefill_s_per_token=1 / 7_000, prefill_base_s=1 / 70), 0.0)
    region.replicas.see(beat("c", running=1, prefill_queued_tokens=777), 0.0)
    for number in range(77):
        region.digest.arrivals.count(number / 13)
    digest = region.due(6.1, rtt_s=lambda: {EU: 0.0876543210123})
    capacity = digest.models[MODEL]
    numbers = [digest.requests_per_s, digest.prefill_s_per_token, digest.prefill_base_s]
    numbers += [digest.kv_used_ratio, digest.rtt_s[EU], capacity.running, capacity.wait_s]
    assert digest.rtt_s[EU] == 0.08765
    assert all(number == float(f"{number:.4g}") for number in numbers if number is not None)
    assert sum(number is None for number in numbers) <= 1


def test_it_has_the_shortest_wait_and_the_mean_of_running_requests():
    region = Region()
    queued = {"prefill_s_per_token": 0.001, "prefill_queued_tokens": 500, "running": 4}
    region.replicas.see(beat("a", **queued), 0.0)
    region.replicas.see(beat("b", **(queued | {"prefill_queued_tokens": 900, "running": 1})), 0.0)
    region.replicas.see(beat("c", running=None, pending=None, outstanding=7), 0.0)
    region.replicas.see(beat("d", state=ReplicaState.DRAINING, prefill_queued_tokens=0), 0.0)
    region.replicas.see(beat("e", models=(OTHER,), **queued), 0.0)
    digest = region.due(0.1)
    models, listed = digest.models, digest.replicas
    assert models[MODEL] == ModelCapacity(ready=3, free=3, wait_s=0.4, running=4.0, listed=(0, 2))
    assert models[OTHER] == ModelCapacity(ready=1, free=1, wait_s=0.4, running=4.0, listed=(1,))
    assert (listed.names, listed.wait_s) == (("a", "e", "b"), (0.4, 0.4, 0.8))  # c's is not known
    assert (listed.running, listed.prefill_s_per_token) == ((4, 4, 1), (0.001,) * 3)


def test_the_wait_for_a_slot_in_a_full_batch_is_a_wait():
    region = Region()
    speed = {"prefill_s_per_token": 0.001, "prefill_base_s": 0.05, "prefill_queued_tokens": 0}
    region.replicas.see(beat("a", waited=FirstWaiting(3.0, 450), **speed), 0.0)
    assert region.due(0.0).models[MODEL].wait_s == pytest.approx(3.0 - 2 * 0.5)


def test_a_wait_that_no_replica_reports_is_not_zero():
    region = Region()
    region.replicas.see(beat("a", prefill_s_per_token=0.001), 0.0)
    region.replicas.see(beat("b", prefill_queued_tokens=10), 0.0)
    assert region.due(0.0).models[MODEL].wait_s is None


def test_a_fresh_digest_changes_nothing_that_is_published():
    region = Region()
    region.replicas.see(beat("a"), 0.0)
    told = region.due(0.0)
    region.replicas.see(beat("a", 2, pending=1), 0.05)
    fresh = region.fresh(0.05)
    assert (told.replicas_free, fresh.replicas_free) == (1, 0)
    assert fresh.seq > told.seq
    news = region.due(0.06)
    assert (news.replicas_free, news.seq) == (0, fresh.seq + 1)


def test_many_fresh_digests_at_once_are_one():
    region = Region()
    region.replicas.see(beat("a"), 0.0)
    asked = [region.fresh(0.0) for _ in range(3)]
    assert asked[0] is asked[1] is asked[2]
    later = region.fresh(CHANGE_S_MIN)
    assert later.seq == asked[0].seq + 1


def test_it_has_its_labels_and_counts_by_label_where_not_all_carry_it():
    region = Region(ground({US: ("eu", "hospital")}))
    region.replicas.see(beat("a"), 0.0)
    region.replicas.see(beat("b", residency=("eu",)), 0.0)
    region.replicas.see(beat("c", residency=("eu", "hospital"), pending=1), 0.0)
    digest = region.due(0.1)
    assert digest.residency == ("eu", "hospital")
    assert digest.models[MODEL].ready == 3
    assert list(digest.models_by_label) == ["hospital"]  # all carry the other one
    apart = digest.models_by_label["hospital"][MODEL]
    assert (apart.ready, apart.free) == (2, 1)


def test_without_labels_it_names_none():
    region = Region()
    region.replicas.see(beat("a"), 0.0)
    digest = region.due(0.1)
    assert (digest.residency, digest.models_by_label) == ((), {})


def test_adopted_replicas_stand_on_their_own_ground():
    region = Region(ground({US: ("us", "hospital"), EU: ("eu", "hospital")}))
    region.replicas.see(beat("a"), 0.0)
    region.replicas.see(beat("eu/b", region=EU), 0.0)
    digest = region.due(0.1)
    assert digest.residency == ("hospital", "us")
    assert digest.models[MODEL].ready == 2
    assert {label: has[MODEL].ready for label, has in digest.models_by_label.items()} == {"us": 1}


def test_a_fresh_digest_has_adopted_regions_too():
    region = Region()
    region.replicas.see(beat("a"), 0.0)
    told = region.due(0.0, adopted={EU: 4})
    fresh = region.fresh(1.0, adopted={EU: 4})
    assert fresh.seq == told.seq + 1
    assert fresh.adopted == told.adopted == {EU: 4}


def test_round_trips_are_sent_once_a_second_as_soon_as_there_are_any():
    region = Region()
    region.replicas.see(beat("a"), 0.0)
    measured = {}

    def told(now):
        made = region.due(now, rtt_s=lambda: measured)
        return made.rtt_s

    assert told(0.0) == {}
    measured = {EU: 0.08}
    assert told(0.25) == {EU: 0.08}
    assert region.fresh(1.5).rtt_s == {}, "for one alone"
    assert [told(0.25 + eighths / 8) for eighths in range(1, 10)] == [{}] * 7 + [{EU: 0.08}, {}]


def test_models_on_optional_paths_are_named_by_path():
    region = Region()
    on_path = served_name(MODEL, EMBEDDINGS)
    region.replicas.see(beat("a", models=(MODEL, on_path)), 0.0)
    region.replicas.see(beat("b"), 0.0)
    digest = region.due(0.1)
    assert digest.models == {MODEL: ModelCapacity(ready=2, free=2, running=0.0)}
    assert digest.models_by_path == {
        EMBEDDINGS: {MODEL: ModelCapacity(ready=1, free=1, running=0.0)}
    }
    assert (digest.replicas_ready, digest.replicas_free) == (2, 2)


def test_it_lists_the_shortest_waits_of_each_model_in_turn_and_so_many_in_all():
    region = Region()
    for number in range(LISTED_MAX + 8):
        queued = {"prefill_s_per_token": 0.001, "prefill_queued_tokens": 100 * number}
        region.replicas.see(beat(f"a{number}", kv_used_ratio=0.5, **queued), 0.0)
    slow = {"prefill_s_per_token": 0.002, "prefill_queued_tokens": 9000, "prefill_base_s": 0.1}
    region.replicas.see(beat("b", models=(OTHER,), **slow), 0.0)
    digest = region.due(0.0)
    assert len(digest.replicas.names) == LISTED_MAX
    assert digest.replicas.names[:3] == ("a0", "b", "a1")
    assert digest.models[OTHER].listed == (1,)
    assert len(digest.models[MODEL].listed) == LISTED_MAX - 1
    assert (digest.replicas.wait_s[1], digest.replicas.prefill_base_s[1]) == (18.0, 0.1)
    assert decode_digest(encode_state(digest)) == digest


def test_within_a_label_only_replicas_that_carry_it_are_listed():
    region = Region(ground({US: ("us", "ny")}))
    queued = {"prefill_s_per_token": 0.001, "prefill_queued_tokens": 0}
    region.replicas.see(beat("a", residency=("us", "ny"), **queued), 0.0)
    region.replicas.see(beat("b", residency=("us",), **queued), 0.0)
    digest = region.due(0.0)
    assert digest.models[MODEL].listed == (0, 1)
    assert digest.models_by_label["ny"][MODEL].listed == (0,)


@pytest.mark.parametrize(
    "reported",
    [
        {"prefill_s_per_token": 1e300, "prefill_queued_tokens": 10**17},
        {"prefill_s_per_token": 1.7976931348623157e308, "prefill_queued_tokens": 1},
        {"prefill_s_per_token": 5e-324, "prefill_base_s": 1.7e308, "prefill_queued_tokens": 1},
        {"running": 2**63 - 1, "prefill_s_per_token": 0.1, "prefill_queued_tokens": 1},
        {"kv_capacity_tokens": 2**63 - 1, "kv_used_ratio": 0.0, "prefill_queued_tokens": 1},
    ],
)
def test_whatever_one_agent_reports_peers_can_read_the_regions_digest(reported):
    region = Region()
    region.replicas.see(beat("a", prefill_s_per_token=0.1, prefill_queued_tokens=0), 0.0)
    region.replicas.see(beat("b", **reported), 0.0)
    digest = decode_digest(encode_state(region.due(0.1)))
    assert "a" in digest.replicas.names
