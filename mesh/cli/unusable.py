"""How every subcommand ends on input that it can't use: one line, and always the same status."""

import click

EXIT_BAD_INPUT = 2


class Unusable(click.ClickException):
    """What is wrong with what was given, and what to change; nothing was started or sent."""

    exit_code = EXIT_BAD_INPUT  # units do not start a process again after it
