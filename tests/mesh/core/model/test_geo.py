"""Great circles: known distances, symmetry, and what is no location."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.core.model.geo import (
    EARTH_RADIUS_KM,
    GeoLocation,
    distance_km,
    parse_location,
    rtt_estimate_s,
)

BERLIN, LONDON, SYDNEY = (
    GeoLocation(52.52, 13.405),
    GeoLocation(51.507, -0.128),
    GeoLocation(-33.87, 151.21),
)
LOCATIONS = st.builds(GeoLocation, st.floats(-90, 90), st.floats(-180, 180))
HALF_ROUND_KM = math.pi * EARTH_RADIUS_KM


@pytest.mark.parametrize(
    ("one", "other", "km"), [(BERLIN, LONDON, 932), (LONDON, SYDNEY, 16_994), (BERLIN, BERLIN, 0)]
)
def test_distances_are_those_of_an_atlas(one, other, km):
    assert distance_km(one, other) == pytest.approx(km, rel=0.005, abs=0.001)


def test_across_the_date_line_it_is_not_far():
    assert distance_km(GeoLocation(0, 179.9), GeoLocation(0, -179.9)) == pytest.approx(
        22.2, abs=0.1
    )


@given(LOCATIONS, LOCATIONS)
def test_there_is_as_far_as_back_and_never_beyond_the_antipodes(one, other):
    km = distance_km(one, other)
    assert km == pytest.approx(distance_km(other, one), abs=1e-6)
    assert 0.0 <= km <= HALF_ROUND_KM + 1e-6


@given(LOCATIONS)
def test_the_other_side_is_half_a_round_away(here):
    there = GeoLocation(-here.lat, here.lon + (180 if here.lon <= 0 else -180))
    assert distance_km(here, there) == pytest.approx(HALF_ROUND_KM, abs=1.0)


def test_an_estimate_orders_as_distances_do():
    near, far = distance_km(BERLIN, LONDON), distance_km(BERLIN, SYDNEY)
    assert rtt_estimate_s(0.0) == 0.0 < rtt_estimate_s(near) < rtt_estimate_s(far)
    assert 0.009 < rtt_estimate_s(near) < 0.02


def test_a_location_is_read_as_people_write_it():
    assert parse_location("52.52, 13.405") == BERLIN
    assert parse_location("-90,180") == GeoLocation(-90, 180)


@pytest.mark.parametrize(
    "text",
    ["", "1", "1,2,3", "north,east", "91,0", "0,181", "nan,0", "0,inf", "1;2", "9" * 99 + ",1"],
)
def test_what_is_no_location_is_refused_with_what_fits(text):
    with pytest.raises(ValueError, match="degrees"):
        parse_location(text)


@given(st.text(max_size=70))
def test_any_text_is_a_location_or_refused(text):
    try:
        lat, lon = parse_location(text)
    except ValueError:
        return
    assert abs(lat) <= 90 and abs(lon) <= 180
