"""Starts the ranks of a measurement, by mpiexec or as plain processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from qccl.bench.lab.lab import INTERFACE, Lab
from qccl.bench.start.mpiexec import Mpiexec, find_mpiexec
from qccl.bench.start.processes import run_processes
from qccl.meeting.launchers import without_launchers
from qccl.meeting.secret import is_insecure, new_token, token_key
from qccl.transports import choice

__all__ = ["Way", "choose_way", "commands", "environment", "free_port", "obstacle", "run_ranks", "share_of_processors"]


@dataclass(frozen=True, slots=True)
class Way:
    """The way to start the ranks of a run.

    Attributes:
        transport: the transport: a value of QCCL_TRANSPORT, or "loopback"; None on GPUs.
        mpi: the mpiexec that starts the ranks. None: the ranks are processes that meet over TCP, or, for "loopback",
            threads of one process.
    """

    transport: str | None
    mpi: Mpiexec | None = None


def choose_way(transport: str | None, plain: str | None = None, backend: str = "host") -> Way:
    """Choose how to start ranks that use ``transport`` (None: QCCL_TRANSPORT, or the first that this machine has).

    mpiexec starts them if MPI carries the bytes or is the baseline ``plain``. Raises QcclError with the reason if a
    transport cannot be used.
    """
    if backend != "host":
        return Way(None, None if obstacle("mpi") else find_mpiexec())
    if transport == "loopback":
        return Way(transport, find_mpiexec() if plain == "mpi" else None)
    own = choice.Offer.here(transport, mpi=obstacle("mpi"))
    name = choice.choose([own, own], "this machine").name
    return Way(name, find_mpiexec() if "mpi" in (name, plain) else None)


def obstacle(transport: str) -> str:
    """Say why this machine cannot start ranks that use ``transport``; an empty text if it can."""
    if transport == "mpi":
        return choice.reason_of(find_mpiexec)
    return "" if transport == "loopback" else choice.obstacle(transport)


def run_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    way: Way,
    lab: Lab | None,
    smallest: int,
    stdout: TextIO | None = None,
) -> int:
    """Run ``command`` as ``ranks`` ranks, inside ``lab`` if given. Returns the exit status of the first that failed.

    ``stdout``: see run_processes(). ``smallest`` is the smallest call in bytes, for MPI's settings.
    """
    # with more threads, NumPy's libraries, which check the results, would spin on every core after each use
    threads = {"OMP_NUM_THREADS": str(share_of_processors(ranks)), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables = environment(way, ranks, lab, smallest, threads)
    return run_processes([(words, variables | own) for words, own in commands(way, ranks, command, lab)], stdout)


def commands(
    way: Way, ranks: int, command: Sequence[str], lab: Lab | None
) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """Yield the processes to start: each one's command, and its own variables."""
    if way.mpi is not None:
        inside = lab.enter(way.mpi.rank_variable) if lab else []
        yield [way.mpi.path, *way.mpi.options(lab), "-n", str(ranks), *inside, *command], {}
        return
    inside = lab.enter("RANK") if lab else []
    for rank in range(1 if way.transport == "loopback" else ranks):
        yield [*inside, *command], {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def environment(way: Way, ranks: int, lab: Lab | None, smallest: int, defaults: Mapping[str, str]) -> dict[str, str]:
    """The variables of all ranks. The user's settings win, except for ranks' numbers and the address.

    ``defaults`` are further variables, for which the user's settings win, too.
    """
    settings = {**defaults, **_network(way.transport, lab)}
    if way.mpi is not None:
        settings |= way.mpi.environment(ranks, lab, smallest)
    place = {"MASTER_ADDR": lab.first_address if lab else "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "QCCL_PORT": str(free_port())}
    if way.transport is not None:
        place["QCCL_TRANSPORT"] = way.transport
    if way.transport == "wan" and lab and token_key() is None and not is_insecure():
        place["QCCL_TOKEN"] = new_token()
    if way.mpi is None:
        size = "1" if way.transport == "loopback" else str(ranks)
        place |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return settings | without_launchers(os.environ) | place


def share_of_processors(ranks: int) -> int:
    """The processors for each rank, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _network(transport: str | None, lab: Lab | None) -> dict[str, str]:
    """Settings that keep the traffic on the lab's links, or without a lab on this machine."""
    if lab:
        found = {"UCX_NET_DEVICES": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}
        return found if transport == "wan" else found | {"UCX_TLS": "tcp,self"}  # over wan a node's ranks share memory
    return {"GLOO_SOCKET_IFNAME": "lo"} if transport == "gloo" else {}


def free_port() -> int:
    """Find a port of this machine that no process uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
