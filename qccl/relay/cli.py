"""The command ``qccl-relay``."""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import signal
import sys
import time
from pathlib import Path

import click

import qccl
from qccl.errors import ArgumentError
from qccl.relay.jobs import Job, key_text, read_jobs
from qccl.relay.server import MOST_UNKNOWN, Limits, Relay
from qccl.transports.relay_protocol import relay_key
from qccl.transports.secret import token_key
from qccl.transports.sockets import Place, host_and_port, listen, place_text

__all__ = ["main"]

_log = logging.getLogger("qccl.relay")
#: descriptors beside those of connections
_SPARE = MOST_UNKNOWN + 64
_MBIT = 125_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--listen", "place", default="0.0.0.0:29600", show_default=True, help="Address and port for the ranks.")
@click.option(
    "--keys",
    type=click.Path(path_type=Path),
    help="File with the relay keys of the jobs that may use it, one a line, each with a name if you like. Only you may "
    "read it. Without it: the job whose token QCCL_TOKEN_FILE or QCCL_TOKEN has.",
)
@click.option("--show-key", is_flag=True, help="Print the relay key of the token in QCCL_TOKEN_FILE or QCCL_TOKEN.")
@click.option("--connections", type=click.IntRange(min=2), default=4096, show_default=True, help="Connections at once.")
@click.option(
    "--job-connections",
    type=click.IntRange(min=2),
    default=2048,
    show_default=True,
    help="Connections of one job at once.",
)
@click.option("--idle", default=3600.0, show_default=True, help="Seconds until a pair without a byte is closed.")
@click.option("--job-mbit", type=float, help="Mbit/s of one job, both directions together.  [default: no limit]")
@click.option("--progress", is_flag=True, help="Show each second what it does, on one line of the terminal.")
@click.version_option(qccl.__version__, prog_name="qccl-relay")
def main(
    place: str,
    keys: Path | None,
    show_key: bool,
    connections: int,
    job_connections: int,
    idle: float,
    job_mbit: float | None,
    progress: bool,
) -> None:
    """Forward the encrypted traffic of ranks that cannot reach each other.

    Run it on a machine that all ranks reach, and set QCCL_RELAY=HOST:PORT on all ranks. It needs the relay key of the
    job, which follows from the job's token and opens nothing that the ranks send. The signal USR1 makes it log what it
    does.
    """
    try:
        jobs = _jobs(None if show_key else keys)
        if show_key:
            return click.echo(key_text(jobs[0].key))
        for name, value in (("--idle", idle), ("--job-mbit", job_mbit)):
            if value is not None and not 0 < value < math.inf:
                raise ArgumentError(f"{name} {value} is not a positive number")
        limits = Limits(_allow(connections), job_connections, idle, None if job_mbit is None else job_mbit * _MBIT)
        relay = Relay(listen(*_place(place)), jobs, limits)
    except (ArgumentError, OSError) as error:
        raise click.ClickException(str(error)) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.stop())
    signal.signal(signal.SIGUSR1, lambda *_: _log.info("%s", relay.totals()))
    _log.info("the relay listens at %s, for %d jobs", place_text(relay.place), len(jobs))
    relay.serve(_Progress(relay) if progress else lambda: None)
    _log.info("the relay ends: %s", relay.totals())


def _jobs(keys: Path | None) -> list[Job]:
    if keys is not None:
        return read_jobs(keys)
    token = token_key()
    if token is None:
        raise ArgumentError(
            "the relay does not know which jobs may use it: name a file of relay keys by --keys FILE (qccl-relay "
            "--show-key prints a job's key where its token is), or set QCCL_TOKEN_FILE or QCCL_TOKEN"
        )
    return [Job(relay_key(token))]


def _place(text: str) -> Place:
    found = host_and_port(text)
    if found is None:
        raise ArgumentError(f'--listen {text!r} is not an address with a port, such as "0.0.0.0:29600"')
    return found


def _allow(connections: int) -> int:
    """Raise the limit of open files; returns how many connections it allows, of so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    _log.warning("only %d open files are allowed (ulimit -Hn), so there are fewer connections", soft)
    return max(2, soft - _SPARE)


class _Progress:
    """One line of the terminal, written again at each call."""

    def __init__(self, relay: Relay) -> None:
        self._relay, self._nbytes, self._at = relay, 0, time.monotonic()

    def __call__(self) -> None:
        totals, now = self._relay.totals(), time.monotonic()
        rate = (totals.nbytes - self._nbytes) / max(1e-3, now - self._at) / _MBIT
        self._nbytes, self._at = totals.nbytes, now
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\r\033[K{rate:.1f} Mbit/s; {totals}")
            sys.stderr.flush()
