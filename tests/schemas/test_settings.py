"""The settings' one model: JSON Schema, file, command line and core accept the same values."""

from typing import Annotated

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from infra.tenant_table import TenantTable
from infra.topology import MeshTable, NatsLimits, RegionTable
from mesh.cli.modelled import FieldText, fields_of
from mesh.core.model.settings import RouterSettings
from schemas.settings import LinkTable, RoutingTable, parse_pushing

TABLES = (
    RoutingTable,
    LinkTable,
    NatsLimits,
    MeshTable,
    TenantTable,
    RegionTable,
)
# Hosts of addresses have no pattern that all readers of JSON Schemas know, and replicas have two
# forms in a file: tests/infra/test_topology_schema.py.
NOT_IN_THE_SCHEMA = {"http", "nats", "leaf", "cluster", "monitor", "metrics", "console", "replicas"}
FIELDS = [
    (table, name)
    for table in TABLES
    for name in table.model_fields
    if not (table is RegionTable and name in NOT_IN_THE_SCHEMA | {"routers"})
]

WORDS = [
    *("", "blind", "pending", "outstanding:0", "outstanding:1", "outstanding:100000"),
    *("outstanding:100001", "outstanding:500000", "outstanding:08", "outstanding:", "Blind"),
    *("mesh", "region-local", "central:us", "eu", "US", "a" * 32),
    *("a" * 33, "a" * 100, "a" * 101, "-a", "https://us.example.com/v1", "us.example.com/v1"),
    *("https://app.example.com", "https://app.example.com/", "*", "null", "0" * 64, "0" * 63),
]
NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([4095, 4096, 4097, 3_600_000, 3_600_001, 65_536, 65_537, 1 << 20, 2**64]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 1.0, 1.5, 8.0, 90.0, -90.5, 180.0, 3600.0, 10_000.5]),
)
TEXTS = st.one_of(st.sampled_from(WORDS), st.text("abcz019-:.*/_ ü", max_size=12))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["high", "low", "hgh", "idle_share", "eu"]), SCALARS),
)


def accepts(adapter, value):
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def schema_and_model(table, name):
    field = table.model_fields[name]
    kind = field.annotation
    adapter = TypeAdapter(Annotated[kind, *field.metadata] if field.metadata else kind)
    return jsonschema.Draft202012Validator(adapter.json_schema()), adapter


@pytest.mark.parametrize(("table", "name"), FIELDS, ids=str)
def test_schema_and_model_accept_the_same_values(table, name):
    schema, adapter = schema_and_model(table, name)

    @given(VALUES)
    def agree(value):
        assert schema.is_valid(value) == accepts(adapter, value), value

    agree()


@pytest.mark.parametrize(
    ("rule", "is_right"),
    [
        ("blind", True),
        ("pending", True),
        ("outstanding:1", True),
        ("outstanding:100000", True),
        ("outstanding:0", False),
        ("outstanding:100001", False),
        ("outstanding:500000", False),
        ("outstanding:", False),
        ("outstanding:٣", False),
        ("soon", False),
    ],
)
def test_a_pushing_rule_is_right_or_wrong_everywhere(rule, is_right):
    schema, adapter = schema_and_model(RoutingTable, "pushing")
    assert schema.is_valid(rule) is is_right
    assert accepts(adapter, rule) is is_right
    for read in (
        parse_pushing,
        lambda text: RouterSettings(pushing=text),
        lambda text: FieldText(fields_of(RoutingTable)["pushing"]).convert(text, None, None),
    ):
        if is_right:
            read(rule)
        else:
            with pytest.raises(Exception, match=r'outstanding:N"? with N from 1 to 100000'):
                read(rule)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(RoutingTable.model_fields, VALUES)))
def test_what_a_table_accepts_the_core_accepts(values):
    right = {
        name: value
        for name, value in values.items()
        if accepts(schema_and_model(RoutingTable, name)[1], value)
    }
    RouterSettings(**RoutingTable.model_validate(right).as_settings())


@pytest.mark.parametrize(
    "table",
    [
        {
            "queue_delay_s_max": 3600,
            "hops_max": 1,
            "own_ttft_goal_ms": 1,
            "gossip_kib_per_s": 65_536,
        },
        {
            "queue_delay_s_max": 0,
            "hops_max": 0,
            "own_ttft_goal_ms": 3_600_000,
            "gossip_kib_per_s": 0,
        },
    ],
)
def test_the_core_accepts_a_table_at_its_limits(table):
    RouterSettings(**RoutingTable.model_validate(table).as_settings())


def test_a_command_line_s_text_is_read_as_the_field_s_type():
    assert FieldText(fields_of(RouterSettings)["hold_max"]).convert("7", None, None) == 7
    assert FieldText(fields_of(RouterSettings)["hold_s_max"]).convert("1.5", None, None) == 1.5
    with pytest.raises(Exception, match="must be more than 0, not 0"):
        FieldText(fields_of(RouterSettings)["hold_max"]).convert("0", None, None)
