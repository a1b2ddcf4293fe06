"""Names of adopted replicas are told from those at home, whatever the names are."""

from hypothesis import given

from mesh.core.region.names import apart, is_adopted, known_as
from tests.schemas.strategies import NAMES


@given(NAMES, NAMES, NAMES)
def test_a_known_name_comes_apart_again(region, replica, home):
    name = known_as(region, replica, home)
    assert apart(name) == (None if region == home else region, replica)
    assert is_adopted(name) == (region != home)
