"""Requests for LoRA adapters: replicas that have them, that are loading them, that would."""

from dataclasses import replace

import pytest

from mesh.core.lifecycle import ends
from mesh.core.membership.region_digest import ADAPTERS_PUBLISHED_MAX
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.served_names import served_name
from mesh.core.placement.candidates import FOR_OTHERS
from mesh.core.view.replica import LOAD_START_S
from schemas.decision import Placement
from schemas.exchange import Refusal
from schemas.http import EMBEDDINGS, MESSAGES, RESPONSES
from schemas.state import KnownRoutes, ModelCapacity, ReplicaState
from tests.mesh.core.build import EU, MODEL, US, beat, core, digest, request

SQL = "sql"
FAST = {"prefill_s_per_token": 0.0001, "prefill_base_s": 0.01}


class Region:
    """One router, the heartbeats that it gets and what it does."""

    def __init__(self, policy: str = "mesh", **settings: object) -> None:
        self.core = core(policy=policy, **settings)
        self.now, self.seq, self.key = 10.0, 0, 0

    def says(self, name: str, *, has: tuple[str, ...] = (), **fields: object) -> list[fx.Effect]:
        self.seq += 1
        return self.feed(
            ev.HeartbeatSeen(beat(name, self.seq, models=(MODEL, *has), **(FAST | fields)))
        )

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        return self.core.handle(event, self.now)

    def ask(self, model: str = SQL) -> fx.Dispatch | fx.Forward | None:
        """Where the request goes; its receipt is `decision`."""
        self.key += 1
        asked = request(self.key, arrived_at=self.now, model=model, wants_receipt=True)
        effects = self.feed(ev.RequestArrived(asked))
        self.decision = next(one.decision for one in effects if isinstance(one, fx.Decided))
        return sent(effects)

    def priced(self, name: str):
        return next(one for one in self.decision.candidates if one.name == name)

    @property
    def digest(self):
        self.now += 0.02  # sooner it is the same one
        return ends.fresh_digest(self.core.state, self.now)


def sent(effects: list) -> fx.Dispatch | fx.Forward | None:
    return next((one for one in effects if isinstance(one, fx.Dispatch | fx.Forward)), None)


@pytest.mark.parametrize("policy", ["mesh", "least-load", "skywalker", "round-robin"])
def test_a_replica_that_has_the_adapter_goes_first_then_one_that_loads_it(policy) -> None:
    region = Region(policy)
    region.says("a", loadable={SQL: 0.5})
    region.says("b", has=(SQL,))
    region.says("c", loading={SQL: 0.3})
    assert region.ask().replica == "b"
    region.says("b", state=ReplicaState.DOWN)
    assert region.ask().replica == "c"
    region.says("c", state=ReplicaState.DOWN)
    assert region.ask().replica == "a"


@pytest.mark.parametrize("policy", ["mesh", "least-load", "skywalker", "round-robin"])
def test_where_the_one_that_has_it_is_kept_for_others_another_loads_it(policy) -> None:
    """It waits only where no other may: for its share, as its tenant has had more."""
    region = Region(policy)
    region.says("a", loadable={SQL: 0.5})
    region.says("b", has=(SQL,))
    placer, asked = region.core.state.placer, request(1, model=SQL)
    assert placer.place(asked, (), region.now, kept_from=frozenset("b")).target == "a"
    region.says("a")
    held = placer.place(asked, (), region.now, kept_from=frozenset("b"))
    assert held.placement is Placement.HOLD
    assert [(one.name, one.why) for one in held.candidates] == [("b", FOR_OTHERS)]


@pytest.mark.parametrize("policy", ["mesh", "least-load", "skywalker", "round-robin"])
def test_where_the_one_that_has_it_fails_another_loads_it(policy) -> None:
    region = Region(policy)
    region.says("a", loadable={SQL: 0.5})
    region.says("b", has=(SQL,))
    failing = region.core.replicas.failing
    while not failing.bars("b", SQL, region.now, has_failed=False):
        failing.failed("b", SQL, "HTTP 500", region.now)
    assert region.ask().replica == "a"


@pytest.mark.parametrize("policy", ["mesh", "skywalker"])
def test_one_that_could_load_it_is_taken_when_those_that_have_it_are_busy(policy) -> None:
    region = Region(policy)
    region.says("a", loadable={SQL: 0.1}, adapters_free=1)
    region.says("b", has=(SQL,), pending=9, full=True, prefill_queued_tokens=50_000)
    assert region.ask().replica == "a"


def test_the_mesh_policy_shows_the_load_as_a_term_of_its_own() -> None:
    region = Region()
    region.says("a", loadable={SQL: 0.5})
    region.says("b", loadable={SQL: None}, adapters_free=1)
    region.says("c", loadable={SQL: 0.25}, adapters_free=1)
    taken = region.ask()
    a, b, c = map(region.priced, "abc")
    assert taken.replica == "c"
    assert [one.terms["load_s"] for one in (a, b, c)] == [0.5, LOAD_START_S, 0.25]
    assert a.terms["others_s"] == pytest.approx(0.5), "no room: another adapter is loaded again"
    assert b.terms["others_s"] == c.terms["others_s"] == 0.0
    for one in (a, b, c):
        assert one.seconds == pytest.approx(sum(one.terms.values()))


def test_requests_that_come_together_go_to_the_replica_that_loads_already() -> None:
    region = Region()
    for name in "abcdef":
        region.says(name, loadable={SQL: 1.0})
    assert len({region.ask().replica for _ in range(5)}) == 1


@pytest.mark.parametrize("policy", ["mesh", "least-load", "skywalker", "round-robin"])
def test_no_adapter_is_loaded_for_a_copy(policy) -> None:
    region = Region(policy)
    region.says("a", loadable={SQL: 0.5})
    region.says("b", loading={SQL: None})
    copy = request(50, arrived_at=region.now, model=SQL, shadow=True)
    assert sent(region.feed(ev.RequestArrived(copy))) is None
    assert 50 not in region.core.inflight, "it does not wait"
    region.says("c", has=(SQL,))
    copy = request(51, arrived_at=region.now, model=SQL, shadow=True)
    assert sent(region.feed(ev.RequestArrived(copy))).replica == "c"


def test_requests_for_the_model_cost_no_load() -> None:
    region = Region()
    region.says("a", loadable={SQL: 0.5}, loading={"other": 0.5}, adapters_busy=True)
    assert region.ask(MODEL).replica == "a"
    assert region.priced("a").terms["load_s"] == 0.0


@pytest.mark.parametrize("policy", ["mesh", "skywalker"])
def test_a_request_is_held_while_all_adapters_are_in_use_and_placed_when_one_is_free(
    policy,
) -> None:
    region = Region(policy)
    region.says("a", loadable={SQL: 0.5}, adapters_busy=True)
    assert region.ask() is None
    region.now += 0.1
    effects = region.says("a", loadable={SQL: 0.5})
    assert sent(effects).replica == "a"


def test_a_refused_load_goes_elsewhere() -> None:
    region = Region()
    region.says("a", loadable={SQL: 0.1})
    region.says("b", loadable={SQL: 0.2})
    first = region.ask()
    assert first.replica == "a"
    region.says("a")  # in its back-off
    effects = region.feed(
        ev.AttemptRefused(first.key, first.attempt, Refusal.WRONG_MODEL, US, "a", 0, 0)
    )
    assert sent(effects).replica == "b"


def test_loadable_adapters_are_models_of_the_mesh() -> None:
    region = Region()
    region.says("a", loadable={SQL: 0.5}, paths=("/v1/embeddings",))
    assert region.core.models() == (MODEL, SQL)
    assert region.core.known_models() == (MODEL, SQL)
    assert region.core.is_served(f"{SQL} on /v1/embeddings")
    assert region.ask(f"{SQL} on /v1/embeddings").replica == "a"


def test_a_digest_says_how_long_a_load_takes_where_no_replica_has_it() -> None:
    region = Region()
    region.says("a", loadable={SQL: 0.5})
    region.says("b", loadable={SQL: 0.4}, adapters_busy=True)
    found = region.digest.models[SQL]
    assert (found.ready, found.free, found.load_s) == (2, 1, 0.4)
    assert region.digest.models[MODEL].load_s is None
    region.now += 1.0
    region.says("b", has=(SQL,))
    assert region.digest.models[SQL].load_s is None


def test_a_digest_tells_no_more_unloaded_adapters_than_its_limit() -> None:
    region = Region()
    for part in range(3):
        names = {f"a{part}-{number:02}": 0.5 for number in range(50)}
        region.says(f"r{part}", loadable=names, paths=("/v1/messages",), has=("loaded",))
    models = region.digest.models
    assert len(models) == ADAPTERS_PUBLISHED_MAX + 2
    assert {MODEL, "loaded"} < set(models)
    assert set(region.digest.models_by_path["/v1/messages"]) == set(models)


def test_a_peers_unloaded_adapter_is_asked_for_on_the_paths_that_its_replica_has() -> None:
    there = Region()
    there.says("a", loadable={SQL: 0.5}, paths=(MESSAGES, EMBEDDINGS))
    there.says("b", has=("other",), paths=(RESPONSES,))
    region, name = Region(), served_name(SQL, MESSAGES)
    region.feed(ev.DigestSeen(replace(there.digest, region=EU)))
    assert region.core.knows(name) and region.ask(name).peer == EU
    assert region.priced(EU).terms["load_s"] == 0.5
    for path in (EMBEDDINGS, RESPONSES):
        assert not region.core.knows(served_name(SQL, path))
        assert any(path in one for one in there.digest.models_by_path)


def test_a_peer_that_has_it_is_priced_against_a_load_at_home() -> None:
    for load_s, place in ((0.05, Placement.LOCAL), (2.0, Placement.PEER)):
        region = Region()
        region.says("a", loadable={SQL: load_s}, adapters_free=1)
        known = {MODEL: ModelCapacity(ready=1, free=1), SQL: ModelCapacity(ready=1, free=1)}
        region.feed(ev.DigestSeen(digest(EU, models=known, **FAST)))
        region.feed(ev.RttMeasured(EU, 0.1))
        region.ask()
        assert region.decision.placement is place, load_s
        assert region.priced(EU).terms["load_s"] == 0.0


def test_a_load_at_a_peer_is_priced() -> None:
    region = Region()
    region.feed(
        ev.DigestSeen(digest(EU, models={SQL: ModelCapacity(ready=2, free=2, load_s=0.7)}, **FAST))
    )
    region.feed(ev.RttMeasured(EU, 0.1))
    assert region.ask().peer == EU
    assert region.priced(EU).terms["load_s"] == 0.7


def test_no_count_of_adapters_outlives_its_replica() -> None:
    region = Region()
    region.says("a", loadable={SQL: 0.5}, loading={"x": 0.1})
    region.says("a", has=(SQL,), loadable={"y": None})
    region.says("b", loadable={"y": None})
    assert dict(region.core.replicas.unloaded) == {"y": 2}
    region.says("a", state=ReplicaState.GONE, loadable={"y": None})
    region.says("b")
    assert not region.core.replicas.unloaded
    assert region.core.region == US


OTHER = "other"


@pytest.mark.parametrize("policy", ["mesh", "least-load", "skywalker", "round-robin"])
def test_a_model_that_is_not_loaded_is_asked_for_where_it_is(policy) -> None:
    region = Region(policy)
    region.says("a", has=(OTHER,), loadable={OTHER: 20.0})
    region.says("b", has=(OTHER,), loadable={MODEL: 20.0})
    for _ in range(4):
        assert region.ask(OTHER).replica == "b"
        assert region.ask(MODEL).replica == "a"
    region.says("b", has=(OTHER,), state=ReplicaState.DOWN)
    assert region.ask(OTHER).replica == "a", "what is listed is served"


def test_models_that_engines_load_themselves_are_all_told_to_peers_with_their_paths() -> None:
    names = tuple(f"m{number:03}" for number in range(2 * ADAPTERS_PUBLISHED_MAX))
    told = dict.fromkeys(names[:ADAPTERS_PUBLISHED_MAX], 20.0)
    region = Region()
    region.says("a", has=names, loadable=told, paths=(EMBEDDINGS,))
    digest = region.digest
    assert set(names) < set(digest.models) and set(names) < set(digest.models_by_path[EMBEDDINGS])
    assert digest.models[names[0]].load_s == 20.0 and digest.models[names[-1]].load_s is None


def test_a_path_that_is_not_known_is_let_through_and_missed_no_longer_than_it_is_told() -> None:
    region = Region()
    name = served_name(MODEL, EMBEDDINGS)
    region.says("a", routes=KnownRoutes(unknown=(EMBEDDINGS,)))
    assert region.core.knows(name) and region.ask(name).replica == "a"
    region.says("a", routes=KnownRoutes(unknown=(MESSAGES,)))  # the engine answered 404
    assert not region.core.knows(name), "no request is held for it"
    region.says("a", paths=(EMBEDDINGS,))
    region.says("a")
    assert region.core.knows(name), "as it may come back"
