"""`--credentials FILE`: values for a command's environment variables, from rendered files."""

import click
import pytest
from click.testing import CliRunner

from infra.credentials_file import credentials_option, environment, read_environment


@click.command()
@credentials_option(also=["PASSWORD"])
@click.option("--region", envvar="REGION", required=True)
@click.option("--batch", envvar="BATCH", type=int)
@click.option("--model", "models", envvar="MODELS", multiple=True)
@click.option("--plain", default="no")
def shown(**values: object) -> None:
    click.echo(f"{values} {environment().get('PASSWORD')}")


def said(tmp_path, text, *arguments, env=None, more=""):
    paths = []
    for name, content in (("bus", text), ("engine", more)):
        (tmp_path / name).write_text(content)
        paths += ["--credentials", str(tmp_path / name)]
    return CliRunner().invoke(shown, [*paths, *arguments], env=env or {})


def test_options_and_other_variables_come_from_the_files(tmp_path):
    text = "# rendered\n\nREGION=us\nPASSWORD='a=b c'\n"
    result = said(tmp_path, text, more='BATCH = "8"\nMODELS=m1 m2\n')
    assert result.output == (
        "{'region': 'us', 'batch': 8, 'models': ('m1', 'm2'), 'plain': 'no'} a=b c\n"
    )


def test_command_line_and_environment_count_before_a_file(tmp_path):
    result = said(tmp_path, "REGION=us\nPASSWORD=p\n", "--region", "eu", env={"PASSWORD": "q"})
    assert result.output.startswith("{'region': 'eu'") and result.output.endswith(" q\n")
    assert "'eu'" in said(tmp_path, "REGION=us\n", env={"REGION": "eu"}).output


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("REGION=us\nOTEL=1\n", "no OTEL is read here; known: BATCH, MODELS, PASSWORD, REGION"),
        ("REGION=us\nsecret\n", "line 2 is not NAME=value"),
        ("REGION=us\nBATCH=many\n", "'many' is not a valid integer"),
    ],
)
def test_a_mistake_is_named_without_what_is_secret(tmp_path, text, complaint):
    result = said(tmp_path, text)
    assert result.exit_code == 2 and complaint in result.output
    assert "secret" not in result.output


def test_without_files_nothing_changes(monkeypatch):
    result = CliRunner().invoke(shown, ["--region", "us"], env={"PASSWORD": "p"})
    assert result.output.endswith("} p\n")
    assert CliRunner().invoke(shown, []).exit_code == 2


def test_lines_are_read_as_systemd_reads_them(tmp_path):
    (tmp_path / "f").write_text('A=1\n; no\n # no\n B = "two words"\nC=\nD=\'\n')
    assert read_environment(tmp_path / "f") == {"A": "1", "B": "two words", "C": "", "D": "'"}
