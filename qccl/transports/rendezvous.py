"""The meeting of ranks over TCP: each sends some bytes to rank 0 and gets those of all. For programs without MPI.

torchrun sets MASTER_ADDR and MASTER_PORT, and so may scripts. torchrun's own store listens at MASTER_PORT, so rank 0
listens ``PORT_OFFSET`` above it, or at QCCL_PORT where that is set. Rank 0 answers when all ranks have called. It
serves all connections at once, so that a slow or silent one delays nobody. Lengths, job and checksum of every message
are checked, and nothing received is executed or unpickled. The deadline is that of the whole meeting.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost

__all__ = ["PORT_OFFSET", "gather", "meeting_place"]

PORT_OFFSET = 17
#: largest note of a rank, and of all ranks together
NOTE_NBYTES = 64 << 10
ANSWER_NBYTES = 256 << 20

_MAGIC = b"qccl/rdv"
_HELLO = struct.Struct(
    "<8sIIII16s8sI"
)  # magic, version, rank, size, number of the meeting, job, process, note's length
_REPLY = struct.Struct("<8sIII32s")  # magic, version, verdict, length of the content, SHA-256 of verdict and content
_VERSION = 4
_WELCOME, _LATER, _REFUSED = range(3)
_ACKNOWLEDGE = b"\x06"

#: how long a connection may take to introduce itself, or to take an answer; and the pause between a rank's tries
_PATIENCE_SECONDS = 2.0
_RETRY_SECONDS = 0.05

#: gather() numbers its calls in a process, so that a rank ahead of the others does not take part in their meeting
_numbers = itertools.count(1)


def meeting_place(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port from MASTER_ADDR, MASTER_PORT and QCCL_PORT. Raises ArgumentError where they do not say."""
    host = environ.get("MASTER_ADDR")
    text = environ.get("QCCL_PORT") or environ.get("MASTER_PORT")
    if not host or not text:
        raise ArgumentError(
            "the ranks cannot find each other: MASTER_ADDR and MASTER_PORT are not set. Set them on all ranks to the "
            "host of rank 0 and a free port there; in a batch script of Slurm: export MASTER_ADDR=$(scontrol show "
            "hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
        )
    name = "QCCL_PORT" if environ.get("QCCL_PORT") else "MASTER_PORT"
    port = int(text) if text.isdecimal() else 0
    if not 0 < port < 65536:
        raise ArgumentError(f"{name}={text!r} is not a port number, 1 to 65535")
    if name == "MASTER_PORT":
        port = port + PORT_OFFSET if port + PORT_OFFSET < 65536 else port - PORT_OFFSET
    return host, port


def gather(note: bytes, rank: int, size: int, place: tuple[str, int], timeout: float, job: str = "") -> list[bytes]:
    """Collective: the notes of all ranks, in rank order.

    A note has at most NOTE_NBYTES. ``place`` is host and port of rank 0. Ranks of another ``job``, size or meeting
    (this function's number of calls in the process) are told to go or to wait. Raises CollectiveTimeout, MismatchError
    for a rank of another group, EngineError for another program at that port.
    """
    number = next(_numbers)
    if len(note) > NOTE_NBYTES:
        raise ArgumentError(f"a note of {len(note)} bytes; a meeting takes at most {NOTE_NBYTES} from each rank")
    deadline = time.monotonic() + timeout
    digest = hashlib.sha256(job.encode()).digest()[:16]
    if size == 1:
        return [note]
    if rank:
        hello = _HELLO.pack(_MAGIC, _VERSION, rank, size, number, digest, os.urandom(8), len(note)) + note
        joined = _ask(hello, place, deadline, timeout)
    else:
        with _listen(place) as server, _Meeting(server, note, size, number, digest) as meeting:
            joined = meeting.serve(deadline, timeout)
    lengths = struct.unpack_from(f"<{size}I", joined)
    ends = [4 * size + sum(lengths[: r + 1]) for r in range(size)]
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _join(notes: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(notes)}I", *map(len, notes)) + b"".join(notes)


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
        f"rank 0 cannot listen on port {port}, which another program or a second rank 0 uses; set QCCL_PORT to a free "
        f"port, the same on all ranks"
    )


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection to rank 0. It is closed at ``until``, a time.monotonic()."""

    connection: socket.socket
    until: float
    received: bytes = b""
    rank: int = 0  # 0 while unknown
    process: bytes = b""
    has_answer: bool = False


class _Meeting:
    """Rank 0's side of a meeting: hear all other ranks, and answer until all have the answer.

    Connections that are not of this meeting are closed and count for nothing.
    """

    def __init__(self, server: socket.socket, note: bytes, size: int, number: int, job: bytes) -> None:
        self._server, self._size, self._number, self._job = server, size, number, job
        self._notes = {0: note}
        self._served: set[int] = set()
        self._answer: bytes | None = None
        self._refusal = ""  # why the last caller was refused
        self._callers: set[_Caller] = set()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Meeting:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()

    def serve(self, deadline: float, timeout: float) -> bytes:
        """The answer, when all ranks have it. Raises CollectiveTimeout at the deadline."""
        while len(self._served) < self._size - 1:
            now = time.monotonic()
            if now > deadline:
                missing = sorted(set(range(self._size)) - set(self._notes) or set(range(1, self._size)) - self._served)
                refused = f"; rank 0 refused a caller: {self._refusal}" if self._refusal else ""
                raise CollectiveTimeout(f"ranks {_some(missing)} did not come to rank 0 within {timeout} s{refused}")
            for caller in [each for each in self._callers if each.until < now]:
                self._drop(caller)
            until = min([deadline, *(caller.until for caller in self._callers)])
            for key, _ in self._selector.select(max(0.0, until - now)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data, deadline)
            if len(self._notes) == self._size:
                self._send_answers(deadline)
        assert self._answer is not None  # size > 1
        return self._answer

    def _accept(self) -> None:
        with suppress(OSError):  # the caller has gone
            connection, _ = self._server.accept()
            connection.setblocking(False)
            caller = _Caller(connection, time.monotonic() + _PATIENCE_SECONDS)
            self._callers.add(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _drop(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _read(self, caller: _Caller, deadline: float) -> None:
        """Read what has come: a part of the hello, the acknowledgement of an answer, or the end."""
        try:
            part = caller.connection.recv(NOTE_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if caller.rank and caller.has_answer and part == _ACKNOWLEDGE:
            self._served.add(caller.rank)
        if not part or caller.has_answer or caller.rank:
            return self._drop(caller)  # a rank without the answer calls again
        caller.received += part
        self._judge_caller(caller, deadline)

    def _judge_caller(self, caller: _Caller, deadline: float) -> None:
        """Accept the caller as a rank, or refuse it, as soon as its hello is complete."""
        if len(caller.received) < _HELLO.size:
            return
        rank, verdict, text = _judge(caller.received[: _HELLO.size], self._size, self._number, self._job)
        if verdict is None:
            return self._drop(caller)
        if verdict == _WELCOME:
            *_, process, length = _HELLO.unpack_from(caller.received)
            if length > NOTE_NBYTES or len(caller.received) > _HELLO.size + length:
                return self._drop(caller)
            if len(caller.received) == _HELLO.size + length:
                others = [each for each in self._callers if each.rank == rank]
                if any(each.process != process for each in others):
                    text = f"another process is rank {rank}, too; give every process a rank of its own"
                    return self._refuse(caller, _REFUSED, text)
                for other in others:
                    self._drop(other)  # that connection was lost
                self._notes[rank] = caller.received[_HELLO.size :]
                caller.rank, caller.process, caller.until = rank, process, deadline
            return
        self._refuse(caller, verdict, text)

    def _refuse(self, caller: _Caller, verdict: int, text: str) -> None:
        if verdict == _REFUSED:
            self._refusal = text
        caller.has_answer = True
        self._send(caller, verdict, text.encode())

    def _send_answers(self, deadline: float) -> None:
        if self._answer is None:
            self._answer = _join([self._notes[rank] for rank in range(self._size)])
        for caller in [each for each in self._callers if each.rank and not each.has_answer]:
            caller.has_answer = True
            self._send(caller, _WELCOME, self._answer)

    def _send(self, caller: _Caller, verdict: int, content: bytes) -> None:
        """Send a whole reply, or drop the caller, which then calls again."""
        try:
            _send(caller.connection, _reply(verdict, content), time.monotonic() + _PATIENCE_SECONDS)
            caller.connection.setblocking(False)
        except OSError:
            self._drop(caller)


def _judge(hello: bytes, size: int, number: int, job: bytes) -> tuple[int, int | None, str]:
    """The caller's rank, the verdict (None: it does not speak this protocol), and the reason."""
    magic, version, rank, their_size, meeting, their_job, _, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        return 0, None, ""
    if version != _VERSION:
        return 0, _REFUSED, f"rank 0 runs another version of qccl (its meetings are of version {_VERSION})"
    if their_job != job:
        return 0, _REFUSED, "rank 0 belongs to another job; give each job a port of its own in QCCL_PORT"
    if their_size != size or not 0 < rank < size:
        return 0, _REFUSED, f"rank 0 expects ranks 1 to {size - 1} of {size}, and this is rank {rank} of {their_size}"
    return rank, _WELCOME if meeting == number else _LATER, "rank 0 is not there yet"


def _reply(verdict: int, content: bytes) -> bytes:
    return _REPLY.pack(_MAGIC, _VERSION, verdict, len(content), _checksum(verdict, content)) + content


def _checksum(verdict: int, content: bytes) -> bytes:
    return hashlib.sha256(bytes([verdict]) + content).digest()


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
                head = _receive(server, _REPLY.size, deadline)
                if len(head) == _REPLY.size:
                    verdict, content = _receive_content(server, head, where, deadline)
                    _send(server, _ACKNOWLEDGE, deadline)
                    if verdict == _WELCOME:
                        return content
                    if verdict == _REFUSED:
                        raise MismatchError(f"{content.decode(errors='replace')} (at {where})")
                elif head:
                    raise _stranger(where)
        except socket.gaierror as error:
            raise PeerLost(
                f"the address of rank 0, {place[0]!r}, cannot be found ({error}); see MASTER_ADDR"
            ) from error
        except OSError:
            pass  # nobody listens yet
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _receive_content(server: socket.socket, head: bytes, where: str, deadline: float) -> tuple[int, bytes]:
    """Verdict and content of a reply. Raises OSError where the connection ends before it is complete."""
    magic, version, verdict, length, checksum = _REPLY.unpack(head)
    if magic != _MAGIC or version != _VERSION or length > ANSWER_NBYTES:
        raise _stranger(where)
    content = _receive(server, length, deadline)
    if len(content) < length:
        raise ConnectionError("rank 0 ended the connection in the middle of its answer")
    if checksum != _checksum(verdict, content):
        raise EngineError(f"the message from rank 0 at {where} was damaged on its way")
    return verdict, content


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
