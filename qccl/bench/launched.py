"""Errors under a launcher: the ranks exchange those of their arguments, of which rank 0 reports one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import click

from qccl.errors import ArgumentError, QcclError
from qccl.launch import uses_mpi
from qccl.launchers import Launcher, detect
from qccl.meetings import of_launcher
from qccl.transports.choice import wanted_transport

__all__ = ["LaunchedCommand", "check_other_ranks", "let_rank_0_speak"]

_SECONDS, _TEXT_NBYTES = 60.0, 4096
#: for rank 0 to report an error that all ranks have; its launcher then ends the others
_PATIENCE_SECONDS = 2.0


class _OtherRanksError(click.ClickException):
    exit_code = click.UsageError.exit_code


class LaunchedCommand(click.Command):
    """A command that every rank of a launcher runs.

    One rank alone may have an error, such as a folder that its machine lacks. If it ended at once, the others would
    wait for it when they initialize MPI, which has no deadline, and MPICH would not end them. So every rank, with an
    error or without, takes part in one exchange (check_other_ranks). Then rank 0 reports an error and exits with status
    2, and the others exit with status 0, because other launchers end all ranks when one fails.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments."""
        with _reported_by_rank_0():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _reported_by_rank_0():
            return super().invoke(ctx)


@contextlib.contextmanager
def _reported_by_rank_0() -> Iterator[None]:
    """Let rank 0 alone report an error of the arguments; a rank that does not reach rank 0 reports its own."""
    try:
        yield
    except click.UsageError as error:
        with contextlib.suppress(ArgumentError):  # unreadable variables: no rank can reach the others
            launcher = detect()
            if launcher and len(_all_errors(launcher, error.format_message())) > 1 and launcher.rank > 0:
                raise click.exceptions.Exit(0) from error
        raise


def check_other_ranks(launcher: Launcher) -> None:
    """Collective: end this rank if another one has an error; rank 0 reports the first one."""
    for rank, text in enumerate(_all_errors(launcher, "")):
        if text and launcher.rank > 0:
            raise click.exceptions.Exit(0)
        if text:
            raise _OtherRanksError(f"rank {rank}: {text}")


def _all_errors(launcher: Launcher, text: str) -> list[str]:
    """Collective: the ``text`` of every rank, by rank; only this rank's if it cannot reach the others."""
    if launcher.processes == 1:
        return [text]
    try:
        if uses_mpi(launcher, wanted_transport()):
            from mpi4py import MPI

            return MPI.COMM_WORLD.allgather(text)
        with contextlib.closing(of_launcher(launcher)) as meeting:
            found = meeting.gather(text.encode()[:_TEXT_NBYTES], _SECONDS)
        return [each.decode(errors="replace") for each in found]
    except (ImportError, RuntimeError, QcclError):
        return [text]  # the run itself reports what is missing


def let_rank_0_speak(launcher: Launcher | None) -> None:
    """Wait before another rank than 0 reports an error of a run that all ranks have."""
    if launcher is not None and launcher.rank > 0:
        time.sleep(_PATIENCE_SECONDS)
