"""Argument errors under a launcher: the ranks exchange them, and rank 0 reports them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click

from qccl.errors import ArgumentError, QcclError
from qccl.launch import uses_mpi
from qccl.launchers import Launcher, detect
from qccl.meetings import of_launcher, wanted_transport

__all__ = ["LaunchedCommand", "LaunchedGroup", "check_other_ranks"]

_SECONDS = 60.0
_TEXT_NBYTES = 4096


class _OtherRanksError(click.ClickException):
    exit_code = click.UsageError.exit_code


class LaunchedCommand(click.Command):
    """A command that every rank of a launcher runs.

    One rank alone may have an error, such as a folder that its machine lacks. If it ended at once, the others would
    wait for it when they initialize MPI, which has no deadline, or until their own. So every rank, with an error or
    without, takes part in one exchange of the errors (check_other_ranks). Then rank 0 reports an error and exits with
    status 2, and the others exit with status 0, because launchers end all ranks when one fails.
    """

    exchanges_errors = True

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments. The ranks exchange the errors; rank 0 alone reports one."""
        with _reported_by_rank_0(self.exchanges_errors):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. The ranks exchange the errors; rank 0 alone reports one."""
        with _reported_by_rank_0(self.exchanges_errors):
            return super().invoke(ctx)


class LaunchedGroup(LaunchedCommand, click.Group):
    """Commands for all ranks of a launcher. An unknown command is an error on every rank, so nothing is exchanged."""

    exchanges_errors = False


@contextlib.contextmanager
def _reported_by_rank_0(exchanges_errors: bool) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if (launcher := _launcher()) is not None:
            if exchanges_errors:
                _all_errors(launcher, error.format_message())
            if launcher.rank > 0:
                raise click.exceptions.Exit(0) from error
        raise


def _launcher() -> Launcher | None:
    try:
        return detect()
    except ArgumentError:  # unreadable variables: no rank can reach the others
        return None


def check_other_ranks(launcher: Launcher) -> None:
    """Collective: end this rank if another one has an error; rank 0 reports the first one."""
    for rank, text in enumerate(_all_errors(launcher, "")):
        if text and launcher.rank > 0:
            raise click.exceptions.Exit(0)
        if text:
            raise _OtherRanksError(f"rank {rank}: {text}")


def _all_errors(launcher: Launcher, text: str) -> list[str]:
    """Collective: the ``text`` of every rank, by rank; only this rank's if it cannot reach the others."""
    try:
        if uses_mpi(launcher, wanted_transport()):
            from mpi4py import MPI

            return MPI.COMM_WORLD.allgather(text)
        with contextlib.closing(of_launcher(launcher)) as meeting:
            found = meeting.gather(text.encode()[:_TEXT_NBYTES], _SECONDS)
        return [each.decode(errors="replace") for each in found]
    except (ImportError, RuntimeError, QcclError):
        return [text]  # the run itself reports what is missing
