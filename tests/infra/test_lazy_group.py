"""A command's module is imported when the command is asked for, without collecting garbage."""

import gc

import click
import pytest
from click.testing import CliRunner

from infra.lazy_group import LazyGroup

GROUP = LazyGroup(
    modules={
        "engine-sim": ("agents.simserver.command", "It is there."),
        "gone": ("agents.simserver.gone", "It is not."),
    },
    help="",
)


def test_garbage_is_collected_again_after_the_import_even_if_that_fails():
    context = click.Context(GROUP)
    assert isinstance(GROUP.get_command(context, "engine-sim"), click.Command)
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError, match="gone"):
        GROUP.get_command(context, "gone")
    assert gc.isenabled()
    assert GROUP.get_command(context, "unknown") is None


def test_who_collects_none_still_collects_none():
    gc.disable()
    try:
        GROUP.get_command(click.Context(GROUP), "engine-sim")
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("engin-sim", "no command 'engin-sim'; did you mean \"engine-sim\"?"),
        ("xy", "no command 'xy'; there are engine-sim, gone"),
    ],
)
def test_of_a_command_that_is_none_those_there_are_are_named(given, said):
    ended = CliRunner().invoke(GROUP, [given])
    assert ended.exit_code == 2
    assert said in ended.stderr
