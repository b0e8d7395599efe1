"""The command ``qccl-bench``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click

import qccl
from qccl.bench.codec import codec
from qccl.bench.collective import command
from qccl.bench.columns import columns_help
from qccl.bench.info import info
from qccl.bench.kinds import KINDS
from qccl.launchers import detect

__all__ = ["main"]


class _Group(click.Group):
    """Says what is wrong with the arguments once, where a launcher started this program as several ranks.

    The other ranks end well: launchers end all ranks when one fails, and rank 0 must have said why.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _said_by_one():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _said_by_one():
            return super().invoke(ctx)


@contextlib.contextmanager
def _said_by_one() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if _rank() > 0:
            raise click.exceptions.Exit(0) from error
        raise


def _rank() -> int:
    try:
        launcher = detect()
    except qccl.QcclError:
        return 0
    return launcher.rank if launcher else 0


@click.group(cls=_Group, epilog=columns_help(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qccl.__version__, prog_name="qccl-bench")
def main() -> None:
    """Measure what compressed collectives gain on this machine and this network."""


for _command in (*map(command, KINDS), codec, info):
    main.add_command(_command)
