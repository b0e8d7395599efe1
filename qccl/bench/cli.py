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
    """Lets rank 0 alone report wrong arguments, where a launcher started this program as several ranks.

    The other ranks exit with status 0: launchers end all ranks when one fails, before rank 0 has printed the reason.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _reported_by_rank_0():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _reported_by_rank_0():
            return super().invoke(ctx)


@contextlib.contextmanager
def _reported_by_rank_0() -> Iterator[None]:
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
