import pytest

from mesh.http.cors import Cors

APP, OTHER = "https://app.example.com", "https://evil.example.com"
ALLOW = "access-control-allow-origin"


@pytest.mark.parametrize("origin", [OTHER, None, "https://app.example.com.evil.org", "null"])
def test_other_origins_are_told_nothing_but_that_it_depends(origin):
    assert Cors([APP]).headers(origin) == {"vary": "origin"}


def test_a_listed_origin_is_named_and_may_read_our_headers():
    told = Cors([APP]).headers(APP)
    assert (told[ALLOW], told["vary"]) == (APP, "origin")
    for name in ("x-request-id", "x-mesh-region", "x-mesh-decision", "retry-after"):
        assert name in told["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in told


def test_a_star_is_for_every_origin():
    assert Cors(["*"]).headers(OTHER)[ALLOW] == "*"
    assert Cors(["*"]).headers(None) == {}


def test_a_preflight_is_told_what_it_asked_about():
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-mesh-session",
    }
    told = Cors([APP]).preflight(APP, asked, ["POST"])
    assert told is not None
    assert told["access-control-allow-methods"] == "POST"
    assert told["access-control-allow-headers"] == "authorization,x-mesh-session"
    assert Cors([APP]).preflight(OTHER, asked, ["POST"]) is None
    assert Cors([APP]).preflight(APP, {}, ["POST"]) is None
    odd = Cors([APP]).preflight(
        APP, {**asked, "access-control-request-headers": "x-\udcff"}, ["POST"]
    )
    assert odd is not None and "access-control-allow-headers" not in odd
