"""The pages that benchmarks keep say what was measured, with what, and how."""

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support import result_page
from tests.support.result_page import command_line, commit, page

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import click
from rich.console import Console
from tests.support.result_page import result_page

@result_page("small", "A small benchmark")
@click.command()
@click.option("--rounds", type=int, default=1)
def main(rounds):
    click.echo("| a | b |")
    Console(width=80).print("| 1 | 2 |")
    if rounds > 2:
        raise ValueError
    sys.exit(rounds)

main()
"""


def run(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = tmp_path / "small.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


def test_a_program_keeps_its_output_with_its_conditions(tmp_path):
    done = run(tmp_path, "--write", str(tmp_path / "pages"), "--rounds", "2")
    assert (done.returncode, done.stdout) == (2, "| a | b |\n| 1 | 2 |\n")
    text = (tmp_path / "pages" / "small.md").read_text()
    today = datetime.now(UTC).date().isoformat()
    assert text.startswith("# A small benchmark\n")
    assert f"| command | `python {tmp_path}/small.py --rounds 2` |\n" in text
    assert f"| commit | {commit()} |\n| date | {today} |\n| machine | " in text
    assert text.endswith("\n\n| a | b |\n| 1 | 2 |\n")


def test_without_the_option_nothing_is_kept(tmp_path):
    assert run(tmp_path).returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.py"]


def test_a_program_that_fails_leaves_no_page(tmp_path):
    assert "ValueError" in run(tmp_path, "--write", str(tmp_path), "--rounds", "3").stderr
    assert not (tmp_path / "small.md").exists()


@pytest.mark.parametrize("given", [["--write", "pages"], ["--write=pages"], []])
def test_the_command_is_shown_without_where_the_page_goes(given):
    assert command_line(["-m", "a.b", *given, "--n", "1 2"]) == "python -m a.b --n '1 2'"


def test_what_is_no_markdown_is_shown_as_printed():
    assert page("T", {"date": "today"}, "\n┃ a ┃\n").endswith(
        "| date | today |\n\n```\n┃ a ┃\n```\n"
    )


def test_a_checkout_that_differs_from_its_commit_says_so(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    (tmp_path / "a").write_text("1")
    for arguments in (["init", "-q"], ["add", "a"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    assert re.fullmatch("[0-9a-f]{7,}", clean := commit(tmp_path))
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{clean} with changes"


def test_outside_of_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert result_page.commit(tmp_path) == "unknown"
