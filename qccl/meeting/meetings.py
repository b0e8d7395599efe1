"""Brings the processes of a job together where there is no MPI, so that they can exchange some bytes.

A meeting needs a place that all ranks know: a TCP address (from the launcher's environment or from the program), the
store of torch.distributed, or the key-value store of jax.distributed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError
from qccl.meeting import tls
from qccl.meeting.ancestors import ancestors
from qccl.meeting.launchers import Launcher
from qccl.meeting.rendezvous import Rendezvous, meeting_place
from qccl.meeting.secret import derive, token_key
from qccl.meeting.strangers import printable

__all__ = [
    "GroupMeeting",
    "Meeting",
    "StoreMeeting",
    "TcpMeeting",
    "alone",
    "first_host",
    "of_address",
    "of_jax",
    "of_launcher",
    "of_store",
    "of_torch",
]

#: first port, and number of ports, for jobs whose launcher gives an address but no port
_FIRST_PORT, _PORTS = 20_000, 12_000
#: seconds in which rank 0 looks for a rank after another one did not come
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Meeting:
    """The ranks of a job that can exchange bytes.

    Attributes:
        name: the launcher or library that brings the ranks together, for messages.
        rank, size: number of this process, and number of all.
        gather: (bytes, timeout in seconds) -> the bytes of all ranks in rank order. Collective; raises
            CollectiveTimeout.
        host: the host of rank 0, as all ranks reach it; None: unknown.
        own_address: -> the numeric address at which rank 0 and a rank of another machine have reached each other, on
            this machine; None: unknown.
        close: ends the meeting's connections, if it has any. Idempotent.
    """

    name: str
    rank: int
    size: int
    gather: Callable[[bytes, float], list[bytes]]
    host: str | None = None
    own_address: Callable[[], str | None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class TcpMeeting(Meeting):
    """A meeting over TCP; ``port``: a port of ``host`` that is free after close()."""

    host: str
    port: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class GroupMeeting(Meeting):
    """The ranks of a process group of torch.distributed."""

    group: Any = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class StoreMeeting(Meeting):
    """Ranks with a store of torch.distributed, which nothing else uses."""

    store: Any = field(kw_only=True)


def alone() -> Meeting:
    """A meeting of this process with itself."""
    return Meeting("", 0, 1, lambda note, timeout: [note])


def of_address(
    name: str, rank: int, size: int, place: tuple[str, int], job: str = "", *, is_local: bool = False
) -> TcpMeeting:
    """A meeting over TCP at ``place``, host and port of rank 0; ``is_local``: all ranks are on this machine.

    With a token (secret.py) it is encrypted. Raises ArgumentError for an invalid token, EngineError if a token is set
    and there is no OpenSSL.
    """
    key = None if (token := token_key()) is None else derive(token, "meeting")
    if key:
        tls.load_library()
    met = Rendezvous(rank, size, place, job, is_local=is_local, key=key)
    host, port = place
    return TcpMeeting(name, rank, size, met.gather, host, met.own_address, met.close, port=port)


def of_launcher(launcher: Launcher) -> TcpMeeting:
    """The ranks that ``launcher`` started, over TCP. Raises ArgumentError if the environment has no address."""
    job, is_local = _job(launcher, os.environ), _is_local(launcher, os.environ)
    place = _place(launcher, os.environ, job, is_local=is_local)
    return of_address(launcher.name, launcher.rank, launcher.size, place, job, is_local=is_local)


#: variables that name a job, equal on all its ranks; the first one is torchrun's
_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")
#: variables that tell the steps of a Slurm job apart; prefixes of those for groups of a heterogeneous job
_STEP_NAMES = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_STEP_PREFIXES = ("SLURM_HET_", "SLURM_PACK_")


def _job(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The name of the ranks' job; rank 0 accepts only ranks that know the name."""
    usable = {"torchrun": _JOB_NAMES, "srun": ("SLURM_JOB_ID",)}.get(launcher.name, _JOB_NAMES[1:])
    name = next((name for name in usable if environ.get(name)), "")
    names = [name] if name else []
    # unless several steps started the ranks, one step has all of them
    if name == "SLURM_JOB_ID" and environ.get("SLURM_STEP_NUM_TASKS") == str(launcher.size):
        names += [*_STEP_NAMES, *sorted(each for each in environ if each.startswith(_STEP_PREFIXES))]
    found = [f"{each}={environ[each]}" for each in names if each in environ]
    if launcher.name == "MPICH" and name != "PMI_JOBID" and launcher.local_size == launcher.size:
        found.append(f"mpiexec={_mpiexec()}")
    return " ".join(found)


def _mpiexec() -> str:
    """The process of MPICH's mpiexec above this one, or else the parent, the same for all ranks of a machine.

    Empty in the first process of a container, which has no parent there.
    """
    found = list(ancestors())
    mpiexecs = [each for each in found if each.name.startswith("hydra")]
    return next((f"{each.pid} {each.begin}" for each in mpiexecs + found), "")


def _is_local(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Whether the launcher says that all ranks are on this machine."""
    if launcher.name == "srun":
        return environ.get("SLURM_STEP_NUM_NODES") == "1"
    return launcher.local_size == launcher.size


def _place(launcher: Launcher, environ: Mapping[str, str], job: str, *, is_local: bool) -> tuple[str, int]:
    """MASTER_ADDR if it is set; otherwise this machine if it has all ranks, or the first host of Slurm's step."""
    if environ.get("MASTER_ADDR"):
        return meeting_place(environ)
    hosts = environ.get("SLURM_STEP_NODELIST") if launcher.name == "srun" else None
    if is_local:
        host = "127.0.0.1"
    elif hosts:
        host = first_host(hosts)
        _check_name(host)
    else:
        return meeting_place(environ)  # raises an error that says what to set
    own = environ.get("QCCL_PORT")
    if own:
        return meeting_place({"MASTER_ADDR": host, "QCCL_PORT": own})
    digest = hashlib.sha256(f"{job} {os.getuid()}".encode()).digest()
    return host, _FIRST_PORT + int.from_bytes(digest[:8], "little") % _PORTS


def _check_name(host: str) -> None:
    """Raise EngineError at once on all ranks if the network does not know Slurm's name of a node."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            return  # the name service does not answer; the meeting tries again
        raise EngineError(
            f"the address of rank 0's node, {host!r}, cannot be found ({error}); set MASTER_ADDR to the host of rank 0 "
            f"as the other nodes know it, and MASTER_PORT to a free port there"
        ) from error


def first_host(hosts: str) -> str:
    """The first host of Slurm's list, such as "node[03-07,9],other"."""
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", hosts)
    if found is None:
        raise ArgumentError(f"SLURM_STEP_NODELIST={hosts!r} is not readable; set MASTER_ADDR and MASTER_PORT")
    return found[1] + (found[2] or "")


def of_torch(group: Any = None) -> GroupMeeting:
    """The ranks of a torch.distributed process group (None: the default group), by its store."""
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    name = c10d._get_process_group_name(group or c10d._get_default_group())
    store = dist.PrefixStore(f"qccl/meeting/{name}", c10d._get_default_store())
    met = of_store(store, dist.get_rank(group), dist.get_world_size(group))
    group = group or c10d._get_default_group()
    return GroupMeeting(met.name, met.rank, met.size, met.gather, met.host, group=group)


#: a store's answer for a missing key
_NO_VALUE = "no such key"


def of_store(store: Any, rank: int, size: int) -> StoreMeeting:
    """The ranks that share a store of torch.distributed."""

    def get(key: str, seconds: float) -> bytes:
        store.wait([key], timedelta(seconds=seconds))
        # store.get() would wait for minutes if the key is deleted now; this call sets nothing, and answers at once
        found = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))
        if found == _NO_VALUE.encode():
            raise RuntimeError(f"{key} was deleted")
        return found

    gather = _gather_on(_Board(store.set, get, store.delete_key), rank, size)
    return StoreMeeting("torch.distributed", rank, size, gather, os.environ.get("MASTER_ADDR"), store=store)


def of_jax() -> Meeting:
    """The ranks of jax.distributed, by its key-value store."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is None:
        raise ArgumentError("jax.distributed is not initialized; call jax.distributed.initialize() first")
    assert state is not None
    client, rank, size = state.client, state.process_id, state.num_processes

    def place(key: str) -> str:
        return f"qccl/meeting/{key}"

    board = _Board(
        lambda key, value: client.key_value_set_bytes(place(key), value),
        lambda key, seconds: bytes(client.blocking_key_value_get_bytes(place(key), max(1, int(1000 * seconds)))),
        lambda key: client.key_value_delete(place(key)),
    )
    host = (state.coordinator_address or "").rpartition(":")[0]
    return Meeting("jax.distributed", rank, size, _gather_on(board, rank, size), host or None)


@dataclass(frozen=True, slots=True)
class _Board:
    """Values by key that all ranks can read.

    Attributes:
        set: (key, value).
        get: (key, seconds) -> the value, as soon as it exists; raises RuntimeError if it does not in time.
        delete: (key).
    """

    set: Callable[[str, bytes], object]
    get: Callable[[str, float], bytes]
    delete: Callable[[str], object]


def _gather_on(board: _Board, rank: int, size: int) -> Callable[[bytes, float], list[bytes]]:
    """Meeting.gather() on a board. Its first call brings the ranks together.

    A rank may give up alone and try again, so the ranks' attempts cannot be matched by counting them. Instead each
    attempt has a random name, and rank 0 tells the waiting attempts of the others to which of its own they belong.
    """
    numbers = itertools.count()
    room = ""

    def gather(note: bytes, timeout: float) -> list[bytes]:
        nonlocal room
        deadline = Deadline(timeout)
        room = room or (_find_room(board, rank, size, timeout) if rank else _open_room(board, size, deadline))
        key = f"{room}/{next(numbers)}"
        board.set(f"{key}/{rank}", note)
        return _collect(lambda other, left: board.get(f"{key}/{other}", left), range(size), deadline)

    return gather


def _open_room(board: _Board, size: int, deadline: Deadline) -> str:
    """On rank 0: wait for the others, and tell each the name under which they exchange notes."""
    room, others = uuid.uuid4().hex, range(1, size)

    def waiting(other: int, seconds: float) -> bytes:
        return board.get(f"waiting/{other}", seconds)

    try:
        names = _collect(waiting, others, deadline)
    except CollectiveTimeout as error:
        for other in others:
            with contextlib.suppress(RuntimeError):
                board.set(f"answer/{printable(waiting(other, _LOOK_SECONDS))}", f"!{error}".encode())
        raise
    for name in names:
        board.set(f"answer/{printable(name)}", room.encode())
    return room


def _find_room(board: _Board, rank: int, size: int, timeout: float) -> str:
    """On the other ranks: the name that rank 0 tells; CollectiveTimeout if a rank does not come."""
    name = uuid.uuid4().hex
    board.set(f"waiting/{rank}", name.encode())
    try:
        answer = printable(board.get(f"answer/{name}", timeout))
    except RuntimeError as error:
        raise CollectiveTimeout(f"rank 0 did not meet all {size} ranks within {timeout} s ({error})") from error
    finally:
        board.delete(f"waiting/{rank}")  # before this rank's first note: rank 0 never sees an old name later
    if answer.startswith("!"):
        raise CollectiveTimeout(answer[1:])
    return answer


def _collect(get: Callable[[int, float], bytes], ranks: Iterable[int], deadline: Deadline) -> list[bytes]:
    """The notes of ``ranks``; ``get(rank, seconds)`` raises RuntimeError if a rank has not come."""
    notes: list[bytes] = []
    for rank in ranks:
        try:
            notes.append(get(rank, deadline.remaining(_LOOK_SECONDS)))
        except RuntimeError as error:
            raise CollectiveTimeout(f"rank {rank} did not come within {deadline.seconds} s ({error})") from error
    return notes
