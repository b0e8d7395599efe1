"""A few bytes from each rank to rank 0, and its answer to all, over TCP: how ranks meet where there is no MPI.

torchrun and scripts for Slurm name a meeting place in MASTER_ADDR and MASTER_PORT. MASTER_PORT itself belongs to
torchrun's own store, so rank 0 listens ``PORT_OFFSET`` above it, or at QCCL_PORT where that is set. Each other rank
says who it is, leaves its note, and gets the answer when all have come; both directions are of fixed size and checked,
and nothing received is executed or unpickled. Every message has a deadline as a whole, however slowly it comes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost

__all__ = ["CAPACITY", "PORT_OFFSET", "meet", "meeting_place"]

PORT_OFFSET = 17
#: largest note, and largest answer
CAPACITY = 256

_MAGIC = b"qccl/rdv"
#: magic, version, rank, size, number of the meeting, job, length, note
_HELLO = struct.Struct(f"<8sIIII16sI{CAPACITY}s")
_REPLY = struct.Struct(f"<8sIII{CAPACITY}s32s")  # magic, version, verdict, length, message, SHA-256 of what precedes
_VERSION = 2
_WELCOME, _LATER, _REFUSED = range(3)
_ACKNOWLEDGE = b"\x06"

#: how long one caller may keep rank 0 from the next (once to be heard, and once to take the answer), and the pause
#: between a caller's tries
_PATIENCE_SECONDS = 2.0
_RETRY_SECONDS = 0.05

_meetings = 0


def meeting_place(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port from MASTER_ADDR, MASTER_PORT and QCCL_PORT. Raises ArgumentError where they do not say."""
    host = environ.get("MASTER_ADDR")
    text = environ.get("QCCL_PORT") or environ.get("MASTER_PORT")
    if not host or not text:
        raise ArgumentError(
            "the ranks cannot find each other: MASTER_ADDR and MASTER_PORT are not set. torchrun sets them; under srun "
            "put into the batch script: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) "
            "MASTER_PORT=29500"
        )
    name = "QCCL_PORT" if environ.get("QCCL_PORT") else "MASTER_PORT"
    port = int(text) if text.isdecimal() else 0
    if not 0 < port < 65536:
        raise ArgumentError(f"{name}={text!r} is not a port number, 1 to 65535")
    if name == "MASTER_PORT":
        port = port + PORT_OFFSET if port + PORT_OFFSET < 65536 else port - PORT_OFFSET
    return host, port


def meet(
    note: bytes,
    decide: Callable[[Sequence[bytes]], bytes],
    rank: int,
    size: int,
    place: tuple[str, int],
    timeout: float,
    job: str = "",
) -> bytes:
    """Collective: what ``decide`` makes of all ranks' notes, in rank order, on rank 0; returned on every rank.

    Note and answer have at most CAPACITY bytes. ``place`` is host and port of rank 0. Ranks of another ``job``, size or
    meeting (this function's number of calls in the process) are not mixed up with ours. Raises CollectiveTimeout, and
    MismatchError or EngineError where who is met is not who was expected.
    """
    global _meetings
    _meetings += 1
    deadline = time.monotonic() + timeout
    digest = hashlib.sha256(job.encode()).digest()[:16]
    if rank:
        hello = _HELLO.pack(_MAGIC, _VERSION, rank, size, _meetings, digest, len(_fitting(note)), note)
        return _ask(hello, place, deadline, timeout)
    if size == 1:
        return _fitting(decide([note]))
    with _listen(place) as server:
        return _serve(server, note, decide, size, digest, deadline, timeout)


def _fitting(content: bytes) -> bytes:
    if len(content) > CAPACITY:
        raise ArgumentError(f"{len(content)} bytes cannot be said in a meeting, which takes at most {CAPACITY}")
    return content


# -- rank 0 ----------------------------------------------------------------------------------------------------------


def _listen(place: tuple[str, int]) -> socket.socket:
    """A listening socket at the address that the others call, or where that is not an own one, at all own ones."""
    host, port = place
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(port) from error
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(port) from error
        raise EngineError(f"rank 0 cannot listen on port {port} ({error}); set QCCL_PORT to another one") from error


def _in_use(port: int) -> EngineError:
    return EngineError(
        f"rank 0 cannot listen on port {port}, which another program uses; set QCCL_PORT to a free port, the same on "
        f"all ranks"
    )


def _serve(
    server: socket.socket,
    note: bytes,
    decide: Callable[[Sequence[bytes]], bytes],
    size: int,
    job: bytes,
    deadline: float,
    timeout: float,
) -> bytes:
    """Hear all other ranks, and answer them, until all have the answer. Who is none of ours does not count."""
    notes = {0: note}
    callers: dict[int, socket.socket] = {}
    served: set[int] = set()
    answer: bytes | None = None
    try:
        while len(served) < size - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = sorted(set(range(size)) - set(notes) or set(range(1, size)) - served)
                raise CollectiveTimeout(f"ranks {_some(missing)} did not come to rank 0 within {timeout} s")
            server.settimeout(left)
            try:
                caller, _ = server.accept()
            except TimeoutError:
                continue
            heard = _hear(caller, size, job, deadline)
            if heard is None:
                caller.close()
                continue
            if heard[0] in callers:  # it has lost the other connection
                callers.pop(heard[0]).close()
            callers[heard[0]], notes[heard[0]] = caller, heard[1]
            if len(notes) == size:
                answer = _fitting(decide([notes[r] for r in range(size)])) if answer is None else answer
                served |= _answer(callers, answer, deadline)
    finally:
        for caller in callers.values():
            caller.close()
    assert answer is not None  # size > 1
    return answer


def _hear(caller: socket.socket, size: int, job: bytes, deadline: float) -> tuple[int, bytes] | None:
    """The rank of a caller, and its note; None where it is none of this meeting, and has been told so."""
    until = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
    with contextlib.suppress(OSError):
        hello = _receive(caller, _HELLO.size, until)
        rank, verdict, text = _judge(hello, size, job)
        if verdict == _WELCOME:
            length, note = _HELLO.unpack(hello)[-2:]
            return rank, note[:length]
        if verdict is not None:
            _send(caller, _reply(verdict, text.encode()[:CAPACITY]), until)
            _receive(caller, 1, until)
    return None


def _answer(callers: dict[int, socket.socket], answer: bytes, deadline: float) -> set[int]:
    """The ranks that have got the answer; who has not will call again."""
    served = set()
    while callers:
        rank, caller = callers.popitem()
        until = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
        with caller, contextlib.suppress(OSError):
            _send(caller, _reply(_WELCOME, answer), until)
            if _receive(caller, 1, until) == _ACKNOWLEDGE:
                served.add(rank)
    return served


def _judge(hello: bytes, size: int, job: bytes) -> tuple[int, int | None, str]:
    """The caller's rank, what it is told (None: nothing, it does not speak our language), and why."""
    if len(hello) < _HELLO.size:
        return 0, None, ""
    magic, version, rank, their_size, meeting, their_job, _, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        return 0, None, ""
    if version != _VERSION:
        return 0, _REFUSED, f"rank 0 runs another version of qccl (its meetings are of version {_VERSION})"
    if their_job != job:
        return 0, _REFUSED, "rank 0 belongs to another job; give each job a port of its own in QCCL_PORT"
    if their_size != size or not 0 < rank < size:
        return 0, _REFUSED, f"rank 0 expects ranks 1 to {size - 1} of {size}, and this is rank {rank} of {their_size}"
    return rank, _WELCOME if meeting == _meetings else _LATER, "rank 0 is not there yet"


def _reply(verdict: int, content: bytes) -> bytes:
    head = _REPLY.pack(_MAGIC, _VERSION, verdict, len(content), content, b"")[:-32]
    return head + hashlib.sha256(head).digest()


def _some(ranks: list[int]) -> str:
    return f"{ranks[:8]} and {len(ranks) - 8} more" if len(ranks) > 8 else str(ranks)


# -- the others ------------------------------------------------------------------------------------------------------


def _ask(hello: bytes, place: tuple[str, int], deadline: float, timeout: float) -> bytes:
    """Call until rank 0 answers."""
    where = f"{place[0]}:{place[1]}"
    has_met = False
    while True:
        left = deadline - time.monotonic()
        if left <= 0 and has_met:
            raise CollectiveTimeout(f"rank 0 was met at {where}, but not every rank came there within {timeout} s")
        if left <= 0:
            raise CollectiveTimeout(
                f"rank 0 did not answer at {where} within {timeout} s; check MASTER_ADDR, and that the port is not "
                f"closed by a firewall (QCCL_PORT chooses another)"
            )
        try:
            with socket.create_connection(place, timeout=left) as server:
                _send(server, hello, deadline)
                has_met = True
                reply = _receive(server, _REPLY.size, deadline)
                if len(reply) == _REPLY.size:
                    verdict, content = _understand(reply, where)
                    _send(server, _ACKNOWLEDGE, deadline)
                    if verdict == _WELCOME:
                        return content
                    if verdict == _REFUSED:
                        raise MismatchError(f"{content.decode(errors='replace')} (at {where})")
                elif reply:
                    raise _stranger(where)
        except socket.gaierror as error:
            raise PeerLost(
                f"the address of rank 0, {place[0]!r}, cannot be found ({error}); see MASTER_ADDR"
            ) from error
        except OSError:
            pass  # nobody listens yet
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _understand(reply: bytes, where: str) -> tuple[int, bytes]:
    magic, version, verdict, length, content, digest = _REPLY.unpack(reply)
    if magic != _MAGIC or version != _VERSION:
        raise _stranger(where)
    if hashlib.sha256(reply[:-32]).digest() != digest or length > CAPACITY:
        raise EngineError(f"the message from rank 0 at {where} was damaged on its way")
    return verdict, content[:length]


def _stranger(where: str) -> EngineError:
    return EngineError(
        f"what answers at {where} is not rank 0 of this version of qccl; set QCCL_PORT to a free port, the same on all "
        f"ranks"
    )


# -- messages --------------------------------------------------------------------------------------------------------


def _send(connection: socket.socket, message: bytes, deadline: float) -> None:
    """Raises TimeoutError where not all of it has left by ``deadline``."""
    _set_timeout(connection, deadline)
    connection.sendall(message)  # whose timeout is for the whole, unlike recv's


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """``nbytes``, or fewer where the other side ends. Raises TimeoutError where they have not come by ``deadline``."""
    received = b""
    while len(received) < nbytes:
        _set_timeout(connection, deadline)
        part = connection.recv(nbytes - len(received))
        if not part:
            break
        received += part
    return received


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
