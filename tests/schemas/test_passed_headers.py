import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.passed_headers import BYTES_MAX, HEADERS_MAX, as_mapping, chosen, may_pass


@pytest.mark.parametrize(
    "name",
    [
        "x-ratelimit-remaining-requests",
        "x-inference-time",
        "x-vllm-version",
        "x-sglang-version",
        "x-llama-version",
        "x-queue-time",
        "openai-processing-ms",
        "server-timing",
        "retry-after",
    ],
)
def test_headers_of_engines_for_clients_pass(name):
    assert may_pass(name)
    assert chosen([(name, "12")]) == (name, "12")


@pytest.mark.parametrize(
    "name",
    [
        "connection",
        "transfer-encoding",
        "content-length",
        "set-cookie",
        "server",
        "date",
        "access-control-allow-origin",
        "x-mesh-region",
        "x-mesh_region",
        "x-meshregion",
        "x-request-id",
        "x-accel-redirect",
        "x-sendfile",
        "x-envoy-immediate-health-check-fail",
        "x-reproxy-url",
        "x-litespeed-location",
        "x-archive-files",
        "x-middleware-rewrite",
        "x-frame-options",
        "x-unknown",
        "x-vllm-" + "a" * 100,
        "x-vllm-a b",
        "x-vllm-a\r\nset-cookie",
        "X-VLLM-UPPER",
        "",
    ],
)
def test_headers_that_steer_proxies_or_are_the_mesh_s_own_do_not(name):
    assert chosen([(name, "1")]) == () == tuple(as_mapping((name, "1")))


@pytest.mark.parametrize("value", ["a\r\nset-cookie: b", "a\0", "\N{SNOWMAN}", "\t"])
def test_values_are_plain_text(value):
    assert chosen([("x-vllm-a", value)]) == ()


def test_lines_of_one_name_are_one_list():
    assert chosen([("x-vllm-a", "1"), ("x-vllm-b", "2"), ("x-vllm-a", "3")]) == (
        "x-vllm-a",
        "1, 3",
        "x-vllm-b",
        "2",
    )


def test_there_are_bounds_on_number_and_size():
    many = chosen((f"x-vllm-{number}", "1") for number in range(100))
    assert len(many) == 2 * HEADERS_MAX
    assert chosen([("x-vllm-a", "1"), ("x-vllm-b", "b" * BYTES_MAX)]) == ("x-vllm-a", "1")


@given(st.lists(st.text(max_size=20)).map(tuple))
def test_of_any_headers_from_an_agent_only_those_that_may_pass_do(sent):
    assert all(may_pass(name) for name in as_mapping(sent))


@given(
    st.dictionaries(
        st.from_regex(r"x-(vllm-)?[a-z]{1,9}", fullmatch=True), st.just("v"), max_size=9
    )
)
def test_what_an_honest_agent_chose_comes_through(headers):
    expected = {name: value for name, value in headers.items() if may_pass(name)}
    assert as_mapping(chosen(headers.items())) == expected
