"""Errors under a launcher: rank 0 reports an error of all ranks, and a rank with an error ends the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import click

from qccl.base.errors import ArgumentError, QcclError
from qccl.communicator.launch import uses_mpi
from qccl.meeting.launchers import Launcher, detect
from qccl.transports.choice import wanted_transport

__all__ = ["LaunchedCommand", "let_rank_0_speak"]

#: time for rank 0 to report an error of all ranks; its launcher then ends the others
_PATIENCE_SECONDS = 2.0
#: time for the launcher to show a rank's error: MPICH's drops what it has not read when a rank aborts
_FORWARD_SECONDS = 0.5


class LaunchedCommand(click.Command):
    """A command that every rank of a launcher runs; an error of its arguments ends the job.

    All ranks may have the error, or a single rank, for example because its machine lacks a folder. Launchers then end
    the other ranks, but MPICH does not: they wait in MPI's initialization, without a deadline, for this rank. So this
    rank initializes MPI, too, and aborts it.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments."""
        with _ends_the_job():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _ends_the_job():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ends_the_job() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        launcher = None
        with contextlib.suppress(ArgumentError):  # unreadable variables: the ranks do not know each other
            launcher = detect()
        if launcher is None or launcher.processes == 1:
            raise
        abort = _abort_of_mpi(launcher)
        let_rank_0_speak(launcher)
        error.show()
        abort(error.exit_code)
        raise click.exceptions.Exit(error.exit_code) from error


def _abort_of_mpi(launcher: Launcher) -> Any:
    """Initialize MPI with all ranks. Returns its function that ends them with a status; without MPI it does nothing."""
    with contextlib.suppress(ImportError, RuntimeError, QcclError):
        if uses_mpi(launcher, wanted_transport()):
            from mpi4py import MPI

            def abort(status: int) -> None:
                time.sleep(_FORWARD_SECONDS)
                MPI.COMM_WORLD.Abort(status)

            if MPI.COMM_WORLD.size == launcher.size:  # otherwise no rank waits for this one
                return abort
    return lambda status: None


def let_rank_0_speak(launcher: Launcher | None) -> None:
    """Wait, on another rank than 0, so that rank 0 reports an error of all ranks."""
    if launcher is not None and launcher.rank > 0:
        time.sleep(_PATIENCE_SECONDS)
