"""Choices of routing on a command line are checked where they are read."""

import pytest
from click.testing import CliRunner

from mesh.cli.main import main


@pytest.mark.parametrize("command", [("router", "--region", "us"), ("up",)])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fast", "unknown policy 'fast'; there are round-robin"),
        ("skywalkerch", "unknown policy 'skywalkerch'; did you mean \"skywalker-ch\"?"),
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


@pytest.mark.parametrize("command", [("router", "--region", "us"), ("up",)])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--pushing", "soon", 'write "blind", "pending" or "outstanding:N"'),
        ("--pushing", "outstanding:0", "with N from 1"),
    ],
)
def test_other_choices_say_what_there_is(command, option, value, said):
    result = CliRunner().invoke(main, [*command, option, value])
    assert result.exit_code == 2
    assert said in result.output
