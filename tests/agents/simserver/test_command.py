"""The options of the command."""

import pytest
from click.testing import CliRunner

from agents.simserver.command import command
from agents.simserver.metrics import PageKind


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--profile", "h100"], "use one of l4-llama3.1-8b, a100-mistral-7b"),
        (["--time-scale", "0"], "time-scale"),
        (["--kv-tokens", "5"], "kv-tokens"),
        (["--fault", "slow=0"], "at least 1"),
        (["--max-model-len", "5000000"], "exceeds the KV memory"),
        (["--metrics", "tgi"], "'vllm', 'sglang', 'none'"),
    ],
)
def test_bad_options_are_usage_errors(options, complaint):
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert complaint in result.output


def test_an_address_that_is_none_is_one_clear_line():
    result = CliRunner().invoke(command, ["--host", "no such host"])
    assert result.exit_code == 1
    assert "no such host port 0 (no such address)" in result.output


def test_help_explains_the_time_scale_and_lists_every_page():
    text = CliRunner().invoke(command, ["--help"]).output
    assert "a prefill of 300 ms takes 30 ms" in " ".join(text.split())
    assert all(kind.value in text for kind in PageKind)
