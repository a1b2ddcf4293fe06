"""A policy's name on the command line is checked where it is read."""

import pytest
from click.testing import CliRunner

from mesh.cli.main import main


@pytest.mark.parametrize("command", [("router", "--region", "us"), ("up",)])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fast", "unknown policy 'fast'; one of round-robin"),
        ("cache-aware:x", "cache_threshold must be a number"),
        ("round-robin:1", "has no options"),
    ],
)
def test_what_is_no_policy_is_a_usage_error_that_says_what_is(command, name, said):
    result = CliRunner().invoke(main, [*command, "--policy", name])
    assert result.exit_code == 2
    assert said in result.output


def test_help_names_the_policies():
    result = CliRunner().invoke(main, ["router", "--help"])
    assert "skywalker-ch" in result.output
