"""The command `mesh config`: is this mesh.toml right?"""

import sys
from pathlib import Path

import click

from infra.auth_table import OPEN, open_regions
from infra.topology import TopologyError
from mesh.runtime.mesh_file import load_mesh
from schemas.problems import counted

EXIT_MISTAKES = 1


@click.group()
def command() -> None:
    """Check mesh.toml, the configuration of a mesh."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Name every mistake in FILE with its line and what is right instead.

    Each is a line FILE:LINE:COLUMN: KEY: what to do, on stderr; exit code 1. All commands that read
    a mesh.toml refuse it with the same lines. Warnings are no mistakes.
    """
    try:
        mesh = load_mesh(file)
    except TopologyError as error:
        lines = str(error).splitlines()
        for line in lines:
            click.echo(line, err=True)
        click.echo(counted(len(lines), "mistake"), err=True)
        sys.exit(EXIT_MISTAKES)
    for region, where in open_regions(mesh.auth, mesh.regions):
        click.echo(f"{file}: warning: http of {region} ({where}): {OPEN}", err=True)
    replicas = sum(len(region.replicas) for region in mesh.regions.values())
    parts = (
        counted(len(mesh.regions), "region"),
        counted(replicas, "replica"),
        counted(len(mesh.links), "link"),
    )
    click.echo(f"{file}: no mistakes; {', '.join(parts)}")
