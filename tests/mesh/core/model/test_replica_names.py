"""Names of adopted replicas are distinct from those at home, whatever the names are."""

from hypothesis import given

from mesh.core.view.replica import is_adopted, replica_name_at, split_replica_name
from tests.schemas.strategies import NAMES


@given(NAMES, NAMES, NAMES)
def test_a_known_name_comes_apart_again(region, replica, home):
    name = replica_name_at(region, replica, home)
    assert split_replica_name(name) == (None if region == home else region, replica)
    assert is_adopted(name) == (region != home)
