"""How far away a client is, on a sphere: a hint where nothing was measured.

A proxy or a DNS server in front of the mesh knows where a client is (by its address) before it
knows any round trip. The great circle is a lower bound of the way: cables follow coasts, and some
of them go round a continent, so the estimate serves to order regions and never to price them.
Routers use what they measure. Source: the haversine distance by which GORGO (3.1) sends clients to
their nearest node.
"""

from math import asin, cos, isfinite, radians, sin, sqrt
from typing import NamedTuple

EARTH_RADIUS_KM = 6371.0088  # mean radius, IUGG
# 2 ways / 200,000 km/s in glass, and the cable half as long again as the great circle.
RTT_S_PER_KM = 2 * 1.5 / 200_000
LOCATION_CHARS_MAX = 64


class GeoLocation(NamedTuple):
    """Degrees: latitude -90 … 90, longitude -180 … 180."""

    lat: float
    lon: float


def parse_location(text: str) -> GeoLocation:
    """The location in `lat,lon`, in degrees. Raises ValueError that names what fits."""
    parts = text.split(",") if len(text) <= LOCATION_CHARS_MAX else []
    try:
        lat, lon = (float(part) for part in parts)
    except ValueError:
        raise ValueError('write "latitude,longitude" in degrees, like "52.5,13.4"') from None
    return checked_location(lat, lon)


def checked_location(lat: float, lon: float) -> GeoLocation:
    """These degrees, if they are on the globe. Raises ValueError that names what fits."""
    if not (isfinite(lat) and isfinite(lon) and abs(lat) <= 90 and abs(lon) <= 180):
        raise ValueError("a latitude is from -90 to 90 degrees, a longitude from -180 to 180")
    return GeoLocation(lat, lon)


def distance_km(one: GeoLocation, other: GeoLocation) -> float:
    """Along the great circle, by the haversine formula, which is exact for small distances too."""
    lat_1, lat_2 = radians(one.lat), radians(other.lat)
    half_lat, half_lon = (lat_2 - lat_1) / 2, radians(other.lon - one.lon) / 2
    chord = sin(half_lat) ** 2 + cos(lat_1) * cos(lat_2) * sin(half_lon) ** 2
    return 2 * EARTH_RADIUS_KM * asin(sqrt(min(1.0, chord)))  # rounding may pass 1 at antipodes


def rtt_estimate_s(km: float) -> float:
    """The round trip over that distance, in seconds, without what the last mile adds."""
    return km * RTT_S_PER_KM
