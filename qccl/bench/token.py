"""``qccl-bench token``: makes a random token for QCCL_TOKEN, or for the file that QCCL_TOKEN_FILE names."""

from __future__ import annotations

from pathlib import Path

import click

from qccl.meeting.secret import new_token, write_token

__all__ = ["token"]


@click.command(short_help="Make a random token, which keeps strangers out of a job.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def token(file: Path | None) -> None:
    """Write a random token into FILE, which only you may read, or print it.

    Copy the file to all machines, and set QCCL_TOKEN_FILE to it; or set QCCL_TOKEN to the token itself. FILE must not
    exist.
    """
    if file is None:
        click.echo(new_token())
        return
    try:
        write_token(file)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from error
    click.echo(f"{file} has a new token; set QCCL_TOKEN_FILE={file.absolute()} on all ranks")
