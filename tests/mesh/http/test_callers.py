"""What a request, its key and its region say of residency, put together."""

from dataclasses import replace

import pytest

from infra.tenant_table import Caller, TenantTable, key_hash
from mesh.adapters.refused import RequestRefused
from mesh.http.callers import Callers, owner
from mesh.http.http_request import with_labels
from mesh.http.wrong_keys import TRIES
from schemas.http import H_RESIDENCY, Fault
from schemas.ids import RegionId
from schemas.keys import KeyRecord, Scope
from schemas.residency import ground

US, EU, FR = RegionId("us"), RegionId("eu"), RegionId("fr")
GROUND = ground({US: ("us",), EU: ("eu",), FR: ("eu", "fr")}, {FR: ("eu", "fr")})
KEYS = {key_hash("acme"): Caller(tenant="acme", residency=("eu", "us"))}
ACME = {"authorization": "Bearer acme"}


def callers(keys=KEYS, home=US, where=GROUND, **more):
    made = Callers(home)
    made.know(where, keys, {}, **more)
    return made


def said(home, *wanted, **headers):
    some = callers(KEYS, home)
    return some.residency(wanted, some.known(headers))


@pytest.mark.parametrize(
    ("home", "wanted", "headers", "labels"),
    [
        (US, (), {}, ()),
        (US, ("eu",), {}, ("eu",)),
        (US, (), ACME, ("eu", "us")),
        (US, ("eu",), ACME, ("eu",)),
        (US, ("eu", "fr"), ACME, ("eu",)),
        (FR, (), {}, ("eu", "fr")),
        (FR, (), ACME, ("eu",)),
        (FR, ("fr",), {}, ("fr",)),
        (US, (), {"authorization": "bearer  acme"}, ("eu", "us")),
        (US, (), {"authorization": "Bearer other"}, ()),
        (US, (), {"authorization": "Basic acme"}, ()),
        (US, (), {"authorization": ""}, ()),
    ],
)
def test_each_narrows_the_others(home, wanted, headers, labels):
    assert said(home, *wanted, **headers) == labels


@pytest.mark.parametrize(
    ("home", "wanted", "headers", "why"),
    [
        (US, ("fr",), ACME, "the request wants fr, its key is for eu,us: nothing is left"),
        (FR, ("us",), {}, "the request wants us, this region is confined to eu,fr"),
        (FR, ("us",), ACME, "wants us, its key is for eu,us, this region is confined to eu,fr"),
    ],
)
def test_nothing_in_common_is_forbidden_and_never_anywhere(home, wanted, headers, why):
    with pytest.raises(RequestRefused, match=why) as caught:
        said(home, *wanted, **headers)
    assert (caught.value.fault, caught.value.param) == (Fault.RESIDENCY, H_RESIDENCY)


def test_a_label_that_nobody_carries_is_a_mistake_that_names_those_there_are():
    with pytest.raises(
        RequestRefused, match="no region carries uk; labels of this mesh: eu,fr,us"
    ) as bad:
        said(US, "eu", "uk")
    assert bad.value.fault is Fault.INVALID
    with pytest.raises(RequestRefused, match="labels of this mesh: none"):
        callers({}, where=ground({US: ()})).residency(("eu",), None)


def test_the_key_itself_is_in_no_message():
    with pytest.raises(RequestRefused) as caught:
        said(FR, "us", **ACME)
    assert "acme" not in caught.value.message


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        (ACME, "acme"),
        ({"authorization": "bearer  acme"}, "acme"),
        ({"authorization": "Bearer other"}, ""),
        ({"authorization": "Basic acme"}, ""),
        ({"x-api-key": "acme"}, "acme"),
        ({"x-api-key": "other"}, ""),
        ({"x-api-key": "acme", "authorization": "Bearer other"}, ""),
        ({"x-api-key": "acme", "authorization": "Basic acme"}, ""),
        ({}, ""),
    ],
)
def test_whose_it_is_says_the_key(headers, tenant):
    assert callers().known(headers).tenant == tenant
    assert not callers({}).are_told_apart, "where none are listed"


def test_files_belong_to_a_tenant_or_to_the_holders_of_an_unlisted_key():
    def owner_of(headers):
        return owner(callers().known(headers), headers)

    assert owner_of(ACME) == "acme"
    owners = {owner_of({"authorization": f"Bearer {key}"}) for key in ("a", "b", "a")}
    assert len(owners) == 2 and all(owner.startswith("key:") for owner in owners)
    assert owner(None, {}) == "", "where none are listed"
    for nothing in ({}, {"authorization": "Basic acme"}, {"authorization": "Bearer  "}):
        with pytest.raises(RequestRefused) as caught:
            owner_of(nothing)
        assert caught.value.fault is Fault.KEY_MISSING


def test_where_a_label_is_required_a_request_without_one_is_refused():
    """Gateways leave headers out: without this, what the client labelled goes anywhere."""
    where = ground(dict(GROUND.carried), None, (US,))
    asked = callers(where=where)
    with pytest.raises(RequestRefused, match="/labels/NAME before /v1") as caught:
        asked.residency((), asked.known({"authorization": "Bearer other"}))
    assert caught.value.fault is Fault.RESIDENCY
    assert asked.residency((), asked.known(ACME)) == ("eu", "us")
    assert asked.residency(("eu",), None) == ("eu",)
    assert callers(home=EU, where=where).residency((), None) == ()


@pytest.mark.parametrize(
    ("target", "header", "path", "labels"),
    [
        ("/v1/models", [], "/v1/models", []),
        ("/labels/eu/v1/models", [], "/v1/models", ["eu"]),
        ("/labels/fr,eu/v1/models", [], "/v1/models", ["eu,fr"]),
        ("/labels/fr,eu/v1/models", ["eu,us"], "/v1/models", ["eu"]),
        ("/labels/eu", [], "/", ["eu"]),
    ],
)
def test_a_base_url_may_hold_the_labels(target, header, path, labels):
    headers = {H_RESIDENCY: header} if header else {}
    assert with_labels(target, headers) == (path, None)
    assert headers.get(H_RESIDENCY, []) == labels


@pytest.mark.parametrize(
    ("target", "header", "fault"),
    [
        ("/labels/eu/v1/models", ["us"], Fault.RESIDENCY),
        ("/labels//v1/models", [], Fault.INVALID),
        ("/labels/e u/v1/models", [], Fault.INVALID),
        ("/labels/eu/v1/models", ["?"], Fault.INVALID),
        (f"/labels/{'eu,' * 999}/v1/models", [], Fault.INVALID),
    ],
)
def test_labels_that_exclude_each_other_or_are_none_are_refused(target, header, fault):
    _, problem = with_labels(target, {H_RESIDENCY: header})
    assert problem is not None
    assert problem.fault is fault


def test_labels_in_the_path_hide_no_second_header():
    headers = {H_RESIDENCY: ["eu", "us"]}
    assert with_labels("/labels/us/v1/models", headers) == ("/v1/models", None)
    assert headers[H_RESIDENCY] == ["eu", "us"], "it is refused where all headers are"


NOW = 1_800_000_000.0
BOUND = TenantTable(residency=("eu",))
RECORD = KeyRecord(
    id="k1",
    sha256=key_hash("mesh-one"),
    tenant="acme",
    scopes=(Scope.INFERENCE,),
    created_at_unix_s=NOW - 9,
)


def bound(*made: KeyRecord, tenants=None, keys=None) -> Callers:
    some = Callers(US, lambda: NOW, lambda: NOW)
    some.know(GROUND, keys or {}, {"acme": BOUND} if tenants is None else tenants)
    if made:
        some.know_made(made)
    return some


@pytest.mark.parametrize(
    ("some", "fault", "logged"),
    [
        (bound(), Fault.KEYS_UNREAD, ""),
        (bound(replace(RECORD, revoked_at_unix_s=NOW - 1)), Fault.KEY_WRONG, "is revoked"),
        (bound(replace(RECORD, expires_at_unix_s=NOW - 1)), Fault.KEY_WRONG, "is expired"),
        (bound(replace(RECORD, origin=EU)), Fault.KEY_FORBIDDEN, "is for the region eu"),
        (bound(replace(RECORD, tenant="beta")), Fault.KEY_WRONG, "toml does not list"),
        (
            bound(replace(RECORD, limits=(("requests_per_minute", -1.0),))),
            Fault.KEY_WRONG,
            "whose limits this router can't read",
        ),
    ],
    ids=["unread", "revoked", "expired", "elsewhere", "of no listed tenant", "limits unreadable"],
)
async def test_a_tenants_key_that_does_not_hold_is_refused_and_never_nobodys(some, fault, logged):
    """Also where none is required: nobody's prompts may go anywhere."""
    assert some.are_told_apart
    for _ in range(int(TRIES) + 1):
        with pytest.raises(RequestRefused) as caught:
            await some.identified({"x-api-key": "mesh-one"}, Scope.INFERENCE, "192.0.2.1")
        assert caught.value.fault is fault, "no guess, so it uses up no tries"
        assert logged in caught.value.detail and "mesh-one" not in caught.value.detail
        assert caught.value.detail.startswith("key k1: ") == bool(logged), "for operators"
        assert bool(caught.value.tenant) == bool(logged)
    assert await some.identified({}, Scope.INFERENCE, "192.0.2.1") == Caller()


async def test_a_known_key_that_is_over_says_so_however_many_wrong_ones_its_address_sent():
    some = bound(tenants={})
    some.know(GROUND, {}, {}, is_required=True)
    some.know_made([replace(RECORD, expires_at_unix_s=NOW - 1)])
    told = []
    for key in (*["mesh-guess"] * (int(TRIES) + 1), "mesh-one"):
        with pytest.raises(RequestRefused) as caught:
            await some.identified({"x-api-key": key}, Scope.INFERENCE, "192.0.2.1")
        told.append(caught.value)
    assert told[-2].fault is Fault.KEYS_WRONG and told[-1].fault is Fault.KEY_WRONG
    assert told[-1].message == "this API key is expired; ask the mesh's operator for another"


async def test_of_a_key_that_nobody_has_operators_are_told_that_and_nothing_that_was_sent():
    some = callers({key_hash("sk-batch"): Caller("k3", "acme", frozenset())}, is_required=True)
    some.know_made(())
    for key, logged, tenant in (
        ("sk-guess", "unknown key", ""),
        ("sk-batch", "key k3: this needs a key with the scope inference; ", "acme"),
    ):
        with pytest.raises(RequestRefused) as caught:
            await some.identified({"x-api-key": key}, Scope.INFERENCE, "192.0.2.1")
        assert caught.value.detail.startswith(logged) and caught.value.tenant == tenant
        assert key not in caught.value.detail + caught.value.message


async def test_a_key_that_nobody_has_is_nobodys_where_none_is_required():
    some = bound(RECORD)
    assert some.known({"x-api-key": "unused"}) == Caller()
    assert some.known({"x-api-key": "mesh-one"}).residency == ("eu",)


def test_a_router_waits_for_the_keys_of_tenants_that_are_bound_to_places():
    assert bound().must_be_read
    listed = BOUND.model_copy(update={"key_sha256": (key_hash("k"),)})
    assert not bound(tenants={"acme": listed}).must_be_read, "as before there were keys on the bus"
    assert not bound(tenants={"acme": TenantTable()}).must_be_read


def test_a_key_that_mesh_toml_lists_is_revoked_on_the_bus_too():
    listed = {RECORD.sha256: Caller("", "acme")}
    assert bound(RECORD, keys=listed).known({"x-api-key": "mesh-one"})
    assert (
        bound(replace(RECORD, revoked_at_unix_s=NOW), keys=listed).known({"x-api-key": "mesh-one"})
        is None
    )


def test_limits_come_with_the_key_or_from_its_tenant_s_table():
    """And a key whose limits can't be read takes no other key with it."""
    tables = {"acme": TenantTable.model_validate({"key_limits": {"requests_per_minute": 9}})}
    other = replace(RECORD, id="k2", sha256=key_hash("two"), limits=(("concurrent_requests", 2.0),))
    bad = replace(RECORD, id="k3", sha256=key_hash("three"), limits=(("priority_max", "urgent"),))
    some = bound(RECORD, other, bad, tenants=tables)
    found = some.limits()
    assert set(found) == {"k:k1", "k:k2"}
    assert found["k:k1"].requests_per_minute == 9
    assert found["k:k2"].requests_per_minute is None and found["k:k2"].concurrent_requests == 2
    assert some.known({"x-api-key": "two"}).limited == (("k:k2", found["k:k2"]),)
