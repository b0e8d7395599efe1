"""Starting the ranks of a measurement, by mpiexec or as plain processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qccl import meetings
from qccl.bench.lab import INTERFACE, Lab
from qccl.bench.mpiexec import Mpiexec, StartError, find_mpiexec
from qccl.bench.processes import LinePipe, Start, allow_descriptors, run_processes
from qccl.transports.secret import is_insecure, new_token, token_key

__all__ = ["Way", "choose_way", "commands", "environment", "free_port", "obstacle", "run_ranks", "share_of_processors"]

#: the transports of processes, the first choice first
_TRANSPORTS = ("ucx", "mpi", "gloo")
#: open files of this process besides one for each rank
_OWN_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True)
class Way:
    """How the ranks of a run are started.

    Attributes:
        transport: carries the bytes: a value of QCCL_TRANSPORT, or "loopback"; None on GPUs.
        mpi: the mpiexec that starts the ranks. Without one they are processes that meet over TCP, or, for "loopback",
            threads of one process.
    """

    transport: str | None
    mpi: Mpiexec | None = None


def choose_way(transport: str | None, plain: str | None = None, backend: str = "host") -> Way:
    """How to start ranks that use ``transport`` (None: QCCL_TRANSPORT, or the first that this machine has).

    mpiexec starts them if MPI carries the bytes or is the baseline ``plain``. Raises StartError with the reason if a
    transport cannot be used.
    """
    if backend != "host":
        return Way(None, None if obstacle("mpi") else find_mpiexec())
    reasons: dict[str, str] = {}
    wanted = transport or meetings.wanted_transport()
    for name in (wanted,) if wanted else _TRANSPORTS:
        reasons[name] = obstacle(name)
        if not reasons[name]:
            return Way(name, find_mpiexec() if "mpi" in (name, plain) else None)
    raise StartError("no transport can be used here. " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def obstacle(transport: str) -> str:
    """Why this machine cannot start ranks that use ``transport``; nothing if it can."""
    if transport in ("ucx", "gloo", "wan"):
        return meetings.obstacle(transport)
    try:
        if transport == "mpi":
            find_mpiexec()
    except StartError as error:
        return str(error)
    return ""


def run_ranks(
    ranks: int,
    command: Sequence[str],
    *,
    way: Way,
    lab: Lab | None,
    smallest: int,
    silence: float,
    on_line: Callable[[str], None],
) -> int:
    """Run ``command`` as ``ranks`` ranks (inside ``lab``, if given); the exit status of the first that failed.

    ``on_line`` gets the lines that the ranks print; their stderr is not redirected. ``smallest`` is the smallest call
    in bytes, for MPI's settings. ``silence`` and errors: see run_processes().
    """
    variables = environment(way, ranks, lab, smallest, _threads(ranks))
    allow_descriptors(ranks + _OWN_DESCRIPTORS)
    with LinePipe(on_line) as output:
        starts = [Start(arguments, variables | own, output) for arguments, own in commands(way, ranks, command, lab)]
        return run_processes(starts, [output], silence=silence)


def commands(
    way: Way, ranks: int, command: Sequence[str], lab: Lab | None
) -> Iterator[tuple[Sequence[str], dict[str, str]]]:
    """The processes to start: each one's command, and its own variables."""
    if way.mpi is not None:
        inside = lab.enter(way.mpi.rank_variable) if lab else []
        yield [way.mpi.path, *way.mpi.options(lab), "-n", str(ranks), *inside, *command], {}
        return
    inside = lab.enter("RANK") if lab else []
    for rank in range(1 if way.transport == "loopback" else ranks):
        yield [*inside, *command], {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def environment(way: Way, ranks: int, lab: Lab | None, smallest: int, defaults: Mapping[str, str]) -> dict[str, str]:
    """The variables of all ranks. What the user has set is left alone, except the ranks' numbers and address.

    ``defaults`` are more variables, which the user may have set.
    """
    settings = {**defaults, **_network(way.transport, lab)}
    if way.mpi is not None:
        settings |= way.mpi.environment(ranks, lab, smallest)
    place = {"MASTER_ADDR": lab.first_address if lab else "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "QCCL_PORT": str(free_port())}
    if way.transport is not None:
        place["QCCL_TRANSPORT"] = way.transport
    if way.transport == "wan" and lab and not _says_who_may_come_in():
        place["QCCL_TOKEN"] = new_token()
    if way.mpi is None:
        size = "1" if way.transport == "loopback" else str(ranks)
        place |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return settings | os.environ | place


def _says_who_may_come_in() -> bool:
    """Whether the user has given the ranks a token, or said that they need none."""
    return token_key() is not None or is_insecure()


def _threads(ranks: int) -> dict[str, str]:
    """Threads of each rank: its share of the processors for codecs, and one for NumPy's libraries.

    NumPy checks the results. With more threads its libraries would spin on every core for a while after each use, and
    slow down the timed calls.
    """
    return {"OMP_NUM_THREADS": str(share_of_processors(ranks)), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def share_of_processors(ranks: int) -> int:
    """The processors for each rank; at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _network(transport: str | None, lab: Lab | None) -> dict[str, str]:
    """Settings that keep the traffic on the lab's links, or without a lab on this machine."""
    if lab:
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}
    return {"GLOO_SOCKET_IFNAME": "lo"} if transport == "gloo" else {}


def free_port() -> int:
    """A port of this machine that no process has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
