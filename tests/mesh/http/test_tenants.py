"""What a request, its key and its region say of residency, put together."""

import pytest

from infra.tenant_table import KeyHolder, key_hash
from mesh.adapters.refused import RequestRefused
from mesh.http.tenants import Tenants
from schemas.http import H_RESIDENCY, Fault
from schemas.ids import RegionId
from schemas.residency import ground

US, EU, FR = RegionId("us"), RegionId("eu"), RegionId("fr")
GROUND = ground({US: ("us",), EU: ("eu",), FR: ("eu", "fr")}, {FR: ("eu", "fr")})
KEYS = {key_hash("acme"): KeyHolder("acme", ("eu", "us"))}
ACME = {"authorization": "Bearer acme"}


def said(home, *wanted, **headers):
    return Tenants(home, GROUND, KEYS).residency(wanted, headers)


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
        Tenants(US, ground({US: ()}), {}).residency(("eu",), {})


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
    assert Tenants(US, GROUND, KEYS).tenant(headers) == tenant
    assert Tenants(US, GROUND, {}).tenant(headers) is None, "where none are listed"


def test_files_belong_to_a_tenant_or_to_the_holders_of_an_unlisted_key():
    some = Tenants(US, GROUND, KEYS)
    assert some.owner(ACME) == "acme"
    owners = {some.owner({"authorization": f"Bearer {key}"}) for key in ("a", "b", "a")}
    assert len(owners) == 2 and all(owner.startswith("key:") for owner in owners)
    assert Tenants(US, GROUND, {}).owner({}) == "", "where none are listed"
    for nothing in ({}, {"authorization": "Basic acme"}, {"authorization": "Bearer  "}):
        with pytest.raises(RequestRefused) as caught:
            some.owner(nothing)
        assert caught.value.fault is Fault.KEY_MISSING
