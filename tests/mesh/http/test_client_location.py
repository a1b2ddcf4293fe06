"""Where a client says that it is: the query first, then the header, or nowhere."""

from urllib.parse import parse_qs

import pytest

from mesh.adapters.refused import RequestRefused
from mesh.core.model.geo import GeoLocation
from mesh.http.routes import client_location


def near(query="", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client_location(parse_qs(query), named)


def test_the_query_goes_before_the_header():
    assert near() is None
    assert near(x_mesh_client_location="1,2") == GeoLocation(1, 2)
    assert near("near=3,4", x_mesh_client_location="1,2") == GeoLocation(3, 4)


def test_a_mistake_names_the_place_it_was_made_in():
    with pytest.raises(RequestRefused, match="near: write") as problem:
        near("near=here", x_mesh_client_location="1,2")
    assert problem.value.param == "near"
    with pytest.raises(RequestRefused, match="latitude is from") as problem:
        near(x_mesh_client_location="100,0")
    assert problem.value.param == "x-mesh-client-location"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("nera=1,2", 'did you mean "near"'),
        ("near=1,2&limit=3", "'limit'; there are near"),
        ("near=1,2&near=3,4", "near is given more than once"),
    ],
)
def test_a_query_that_is_none_is_refused(query, says):
    with pytest.raises(RequestRefused, match=says):
        near(query)
