import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.address import Address, parse_address

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str).filter(lambda host: host != "0.0.0.0"),
    st.ip_addresses(v=6).map(str).filter(lambda host: host != "::"),
    st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9](\.[a-z]{2,5}){0,3}", fullmatch=True),
).filter(lambda host: host != "localhost")


@given(HOSTS, st.integers(1, 65535))
def test_what_is_written_is_read_again(host, port):
    address = Address(host, port)
    assert parse_address(str(address)) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_value_error(text):
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert 1 <= address.port <= 65535
    assert address.host


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", 'as "host:port"'),
        (":4101", 'as "host:port"'),
        ("a b:4101", 'as "host:port"'),
        ("127.0.0.1:", "from 1 to 65535"),
        ("127.0.0.1:0", "from 1 to 65535"),
        ("127.0.0.1:65536", "from 1 to 65535"),
        ("127.0.0.1:٤", "from 1 to 65535"),
        ("0.0.0.0:4101", "can't be dialled"),
        ("[::]:4101", "can't be dialled"),
        (4101, 'as "host:port"'),
    ],
)
def test_the_error_of_a_wrong_address_shows_the_form(text, expected):
    with pytest.raises(ValueError, match=expected):
        parse_address(text)


def test_a_name_is_served_on_every_interface_and_an_ip_address_on_its_own():
    assert parse_address("us.example.com:4101").listen == Address("0.0.0.0", 4101)
    assert parse_address("10.0.0.7:4101").listen == Address("10.0.0.7", 4101)


def test_localhost_is_loopback_and_nothing_wider():
    assert parse_address("localhost:4101").listen == Address("127.0.0.1", 4101)
