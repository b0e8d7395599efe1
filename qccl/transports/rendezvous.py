"""The meeting of ranks over TCP: each sends some bytes to rank 0 and gets those of all. For programs without MPI.

torchrun sets MASTER_ADDR and MASTER_PORT, and so may scripts. torchrun's own store listens at MASTER_PORT, so rank 0
listens ``PORT_OFFSET`` above it, or at QCCL_PORT where that is set. Rank 0 answers when all ranks have called. It
serves all connections at once, so that a slow or silent one delays nobody. Lengths, job and checksum of every message
are checked, and nothing received is executed or unpickled. The deadline is that of the whole meeting.

A caller is a rank when it has proved that it knows the job's name, with a nonce of rank 0 that makes old messages
useless; rank 0 proves the same. If two processes want to be the same rank, the one that came first must prove it once
more. If it does, the other is told that the rank exists, and otherwise it takes the place.

With a ``key``, which follows from the job's token, all of this runs inside TLS: nobody else can read or change a byte,
and rank 0 looks at nothing that a caller sends before it has proved that it has the key.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import itertools
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost
from qccl.transports import descriptors
from qccl.transports.relayed import Relay, RelayListener, Ways
from qccl.transports.secure_socket import Connection, SecureSocket
from qccl.transports.sockets import LONGEST_SECONDS, host_of, is_host, listen, place_text, seats
from qccl.transports.strangers import NotARank, printable, report
from qccl.transports.timed import receive, send

__all__ = ["PORT_OFFSET", "gather", "meeting_place"]

PORT_OFFSET = 17
#: largest note of a rank, and reason for a refusal
NOTE_NBYTES = 64 << 10
_REASON_NBYTES = 4096

_MAGIC = b"qccl/rdv"
#: magic, version, rank, size, number of the meeting, job, process, note's length
_HELLO = struct.Struct("<8sIIII16s8sI")
_REPLY = struct.Struct("<8sIII32s")  # magic, version, verdict, length of the content, SHA-256 of verdict and content
_VERSION = 5
#: read at a time: more than the longest hello, so that nothing waits inside TLS, where select() does not see it
_MOST_NBYTES = _HELLO.size + NOTE_NBYTES + 1
_WELCOME, _LATER, _REFUSED, _PROVE = range(4)
_ACKNOWLEDGE = b"\x06"
#: content of _PROVE: a nonce, and rank 0's own proof; a proof is a keyed hash
_NONCE_NBYTES, _PROOF_NBYTES = 16, 32

#: how long a connection may take to introduce itself, or to take an answer; to prove itself; and between a rank's tries
_PATIENCE_SECONDS = 2.0
_PROOF_SECONDS = 2.0
#: when all ranks are there, those that proved themselves longer ago do so once more before the answer is made
_FRESH_SECONDS = 1.0
_RETRY_SECONDS = 0.05

#: gather() numbers its calls for each place, size and job, so that a rank ahead of the others does not take part in
#: their meeting
_numbers: dict[tuple[tuple[str, int], int, str], Iterator[int]] = {}


def meeting_place(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port from MASTER_ADDR, MASTER_PORT and QCCL_PORT. Raises ArgumentError where they do not say."""
    host = host_of(environ.get("MASTER_ADDR", ""))
    text = environ.get("QCCL_PORT") or environ.get("MASTER_PORT")
    if not host or not text:
        missing = " and ".join(
            name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT (or QCCL_PORT)", text)) if not value
        )
        raise ArgumentError(
            f"the ranks cannot find each other: {missing} {'are' if not (host or text) else 'is'} not set. Set "
            f"MASTER_ADDR and MASTER_PORT on all ranks to the host of rank 0 and a free port there; in a batch script "
            f"of Slurm: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
        )
    if not is_host(host):
        raise ArgumentError(f"MASTER_ADDR={host!r} is not the name or the address of a host")
    name = "QCCL_PORT" if environ.get("QCCL_PORT") else "MASTER_PORT"
    port = int(text) if text.isdecimal() else 0
    if not 0 < port < 65536:
        raise ArgumentError(f"{name}={text!r} is not a port number, 1 to 65535")
    if name == "MASTER_PORT":
        port = port + PORT_OFFSET if port + PORT_OFFSET < 65536 else port - PORT_OFFSET
    return host, port


def gather(
    note: bytes,
    rank: int,
    size: int,
    place: tuple[str, int],
    timeout: float,
    job: str = "",
    *,
    is_local: bool = False,
    key: bytes | None = None,
    relay: Relay | None = None,
) -> list[bytes]:
    """Collective: the notes of all ranks, in rank order.

    A note has at most NOTE_NBYTES. ``place`` is host and port of rank 0. Ranks of another ``job`` or
    size are told to go, and those of another meeting (the number of calls with this place, size and job in the process)
    to wait. ``is_local`` says that all ranks are on this machine. ``key``: 32 bytes that the ranks alone have, for TLS.
    ``relay``: by which ranks come that cannot reach rank 0; it needs a key, and the same ``place`` on all ranks.
    Raises CollectiveTimeout, MismatchError for a rank of another group, EngineError for another program at that port,
    or for one without the key.
    """
    number = _number(place, size, job)
    if len(note) > NOTE_NBYTES:
        raise ArgumentError(f"a note of {len(note)} bytes; a meeting takes at most {NOTE_NBYTES} from each rank")
    deadline = time.monotonic() + timeout
    digest = hashlib.sha256(job.encode()).digest()[:16]
    if size == 1:
        return [note]
    ways = Ways(relay, key, f"meeting {size} {job}") if relay and key else Ways()
    if rank:
        hello = _HELLO.pack(_MAGIC, _VERSION, rank, size, number, digest, os.urandom(8), len(note)) + note
        return _Call(hello, size, job.encode(), place, key, ways).ask(deadline, timeout)
    descriptors.allow(size)
    with (
        ways.listener(_listen(place, is_local), place) as server,
        _Meeting(server, note, size, number, job.encode(), key) as meeting,
    ):
        return meeting.serve(deadline, timeout)


def _number(place: tuple[str, int], size: int, job: str) -> int:
    """Which meeting of this process it is there."""
    return next(_numbers.setdefault((place, size, job), itertools.count(1)))


def _join(notes: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(notes)}I", *map(len, notes)) + b"".join(notes)


def _part(joined: bytes, size: int) -> list[bytes] | None:
    """The reverse of _join(); None if that is not what they are."""
    if len(joined) < 4 * size:
        return None
    lengths = struct.unpack_from(f"<{size}I", joined)
    ends = list(itertools.accumulate(lengths, initial=4 * size))
    return [joined[begin:end] for begin, end in itertools.pairwise(ends)] if ends[-1] == len(joined) else None


def _proof(job: bytes, who: bytes, *parts: bytes) -> bytes:
    """That its author knows the job's name."""
    return hmac.digest(hashlib.sha256(b"qccl" + job).digest(), who + b"".join(parts), "sha256")


# -- rank 0 ----------------------------------------------------------------------------------------------------------


def _listen(place: tuple[str, int], is_local: bool) -> socket.socket:
    """A listening socket at the address that the others call."""
    host, port = place
    try:
        return listen(host, port, is_local=is_local)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EngineError(
                f"rank 0 cannot listen on port {port}, which another program or a second rank 0 uses; set QCCL_PORT to "
                f"a free port, the same on all ranks"
            ) from error
        raise EngineError(f"rank 0 cannot listen on port {port} ({error}); set QCCL_PORT to another one") from error


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection to rank 0. It is closed at ``until``, a time.monotonic().

    Attributes:
        hello: its first message with the note; nothing while that is not complete.
        nonce: what it must prove to know; nothing if no proof is awaited.
        is_rank: it has proved that it is rank ``rank`` of this job.
    """

    connection: Connection
    until: float
    received: bytearray = field(default_factory=bytearray)
    hello: bytes = b""
    rank: int = 0
    process: bytes = b""
    nonce: bytes = b""
    is_rank: bool = False
    proved_at: float = 0.0
    has_answer: bool = False

    @property
    def is_stranger(self) -> bool:
        """It has proved nothing."""
        return not (self.is_rank or (isinstance(self.connection, SecureSocket) and self.connection.is_proved))


class _Meeting:
    """Rank 0's side of a meeting: hear all other ranks, and answer until all have the answer.

    Connections that are not of this meeting are closed and count for nothing.
    """

    def __init__(
        self, server: socket.socket | RelayListener, note: bytes, size: int, number: int, job: bytes, key: bytes | None
    ) -> None:
        self._server, self._note, self._size, self._number, self._job = server, note, size, number, job
        self._key = key
        self._digest = hashlib.sha256(job).digest()[:16]
        self._callers: dict[_Caller, None] = {}  # in the order in which they came
        self._ranks: dict[int, _Caller] = {}
        self._came: set[int] = set()  # perhaps they have gone again
        self._complete_at: float | None = None  # since when no rank is missing
        self._rivals: list[_Caller] = []  # they say to be a rank that another process is, too
        self._answer: bytes | None = None
        self._answered: dict[int, bytes] = {}  # the processes whose notes the answer has
        self._served: set[int] = set()
        self._why = ""  # the last caller was refused, or could not be accepted
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Meeting:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()

    def serve(self, deadline: float, timeout: float) -> list[bytes]:
        """All notes, when all ranks have them. Raises CollectiveTimeout at the deadline."""
        self._deadline = deadline
        while len(self._served) < self._size - 1:
            now = time.monotonic()
            if now > deadline:
                missing = _some(self._missing())
                raise CollectiveTimeout(f"ranks {missing} did not come to rank 0 within {timeout} s{self._why}")
            for caller in [each for each in self._callers if each.until < now]:
                self._drop(caller, "it says nothing, or too slowly")
            if self._answer is None and len(self._ranks) == self._size - 1 and not self._rivals:
                self._answer = self._make_answer()
            if self._answer is not None:
                self._send_answers(self._answer)
            until = min([deadline, *(caller.until for caller in self._callers)])
            for key, _ in self._selector.select(min(max(0.0, until - now), LONGEST_SECONDS)):
                if key.data is None:
                    self._accept()
                elif key.data in self._callers:
                    self._read(key.data)
        notes = _part(self._answer or b"", self._size)
        assert notes is not None  # size > 1
        return notes

    def _make_answer(self) -> bytes | None:
        """The notes of all; None while it is not known whether all ranks are still there.

        Once no rank is missing, each is asked once at most. If proofs expired, slow ranks would never meet.
        """
        self._complete_at = self._complete_at or time.monotonic()
        others = [self._ranks[rank] for rank in range(1, self._size)]
        for each in others:
            if not each.nonce and each.proved_at < self._complete_at - _FRESH_SECONDS:
                self._ask_for_proof(each)
        if any(each.nonce for each in others) or len(self._ranks) < len(others):
            return None
        self._answered = {each.rank: each.process for each in others}
        return _join([self._note, *(each.hello[_HELLO.size :] for each in others)])

    def _missing(self) -> list[int]:
        """The ranks for which it waits: they never came, have gone, do not prove themselves, or take no answer."""
        others = set(range(1, self._size))
        if self._answer is not None:
            return sorted(others - self._served)
        unproved = {rank for rank, caller in self._ranks.items() if caller.nonce}
        return sorted(others - self._came or others - self._ranks.keys() or unproved or others)

    def _accept(self) -> None:
        strangers = [each for each in self._callers if each.is_stranger]
        if len(strangers) >= seats():
            self._drop(strangers[0], "too many of them at once")
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._why = f"; rank 0: {descriptors.exhausted() or error}"
                if len(strangers) > 1:
                    self._drop(strangers[0], "too many of them at once")
                else:
                    time.sleep(_RETRY_SECONDS)  # the caller goes on waiting
            return  # otherwise the caller has gone
        secured = SecureSocket(connection, self._key, is_server=True) if self._key else connection
        secured.setblocking(False)
        caller = _Caller(secured, time.monotonic() + _PATIENCE_SECONDS)
        self._callers[caller] = None
        self._selector.register(secured, selectors.EVENT_READ, caller)

    def _drop(self, caller: _Caller, cause: str = "") -> None:
        if self._callers.pop(caller, caller) is caller:
            return  # it was dropped before
        if cause and not caller.is_rank:
            report(cause)
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller in self._rivals:
            self._rivals.remove(caller)
        if self._ranks.get(caller.rank) is caller:
            del self._ranks[caller.rank]
            self._complete_at = None
            for rival in [each for each in self._rivals if each.rank == caller.rank]:
                self._rivals.remove(rival)
                self._claim(rival)

    def _read(self, caller: _Caller) -> None:
        """Read what has come: a part of the hello, a proof, the acknowledgement of an answer, or the end."""
        try:
            part = caller.connection.recv(_MOST_NBYTES)
        except BlockingIOError:
            return
        except NotARank as stranger:
            self._why = "; rank 0 dropped a caller that does not have its token (QCCL_TOKEN)"
            return self._drop(caller, str(stranger))
        except OSError:
            part = b""
        caller.received += part
        if not part:
            return self._drop(caller)  # a rank without the answer calls again
        if not caller.hello and not caller.has_answer:
            self._judge_caller(caller)
        if caller.nonce and len(caller.received) >= _PROOF_NBYTES:
            self._check_proof(caller)
        if caller.hello and not caller.nonce and caller.received:
            if caller.has_answer and caller.is_rank and caller.received == _ACKNOWLEDGE:
                self._served.add(caller.rank)
            self._drop(caller)

    def _judge_caller(self, caller: _Caller) -> None:
        """Ask the caller for its proof, or refuse it, as soon as its hello is complete."""
        if len(caller.received) < _HELLO.size:
            return
        head = bytes(caller.received[: _HELLO.size])
        rank, verdict, text = _judge(head, self._size, self._number, self._digest)
        if verdict is None:
            return self._drop(caller, "it speaks another protocol")
        if verdict != _WELCOME:
            return self._refuse(caller, verdict, text)
        *_, process, length = _HELLO.unpack(head)
        if length > NOTE_NBYTES or len(caller.received) > _HELLO.size + length:
            return self._drop(caller, "a message that is too long")
        if len(caller.received) == _HELLO.size + length:
            caller.hello, caller.rank, caller.process = bytes(caller.received), rank, process
            caller.received.clear()
            self._ask_for_proof(caller)

    def _ask_for_proof(self, caller: _Caller) -> None:
        caller.nonce, caller.until = os.urandom(_NONCE_NBYTES), time.monotonic() + _PROOF_SECONDS
        self._send(caller, _PROVE, caller.nonce + _proof(self._job, b"rank 0", caller.nonce, caller.hello))

    def _check_proof(self, caller: _Caller) -> None:
        proof = bytes(caller.received[:_PROOF_NBYTES])
        if not hmac.compare_digest(proof, _proof(self._job, b"rank", caller.nonce, caller.hello)):
            return self._drop(caller, "it does not know the job")
        del caller.received[:_PROOF_NBYTES]
        caller.nonce, caller.until, caller.proved_at = b"", self._deadline, time.monotonic()
        if not caller.is_rank:
            caller.is_rank = True
            self._came.add(caller.rank)
            return self._claim(caller)
        for rival in [each for each in self._rivals if each.rank == caller.rank]:
            self._refuse_rival(rival)

    def _claim(self, caller: _Caller) -> None:
        """Give the caller its place, or find out whether the process is there that has it."""
        holder = self._ranks.get(caller.rank)
        if holder is not None and holder.process == caller.process:
            self._drop(holder)  # that connection was lost
            holder = self._ranks.get(caller.rank)
        if self._answered.get(caller.rank, caller.process) != caller.process:
            self._refuse_rival(caller)
        elif holder is None:
            self._ranks[caller.rank] = caller
        else:
            self._rivals.append(caller)
            if not holder.nonce:
                self._ask_for_proof(holder)

    def _refuse_rival(self, caller: _Caller) -> None:
        if caller in self._rivals:
            self._rivals.remove(caller)
        text = f"another process is rank {caller.rank}, too; give every process a rank of its own"
        self._refuse(caller, _REFUSED, text)

    def _refuse(self, caller: _Caller, verdict: int, text: str) -> None:
        if verdict == _REFUSED:
            self._why = f"; rank 0 refused a caller: {text}"
        caller.has_answer, caller.is_rank, caller.hello = True, False, caller.hello or b"-"
        caller.until = time.monotonic() + _PATIENCE_SECONDS
        caller.received.clear()
        self._send(caller, verdict, text.encode())

    def _send_answers(self, answer: bytes) -> None:
        for caller in [each for each in self._ranks.values() if not each.has_answer]:
            caller.has_answer = True
            self._send(caller, _WELCOME, answer)

    def _send(self, caller: _Caller, verdict: int, content: bytes) -> None:
        """Send a whole reply, or drop the caller, which then calls again."""
        try:
            until = min(self._deadline, time.monotonic() + _PATIENCE_SECONDS)
            send(caller.connection, _reply(verdict, content), until)
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


class _Call:
    """What the other ranks do: call rank 0 until it answers."""

    def __init__(
        self, hello: bytes, size: int, job: bytes, place: tuple[str, int], key: bytes | None, ways: Ways
    ) -> None:
        self._ways = ways
        self._hello, self._size, self._job, self._place, self._key = hello, size, job, place, key
        self._where = place_text(place)
        self._hint = ""  # what may be wrong where rank 0 ends connections

    def ask(self, deadline: float, timeout: float) -> list[bytes]:
        """All ranks' notes."""
        has_met = False
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectiveTimeout(self._why_not(timeout, has_met) + self._hint)
            try:
                with self._connect(left) as server:
                    send(server, self._hello, deadline)
                    has_met = True
                    notes = self._converse(server, deadline)
                    if notes is not None:
                        return notes
            except socket.gaierror as error:
                if self._ways.relay is None:  # otherwise it may be a name in rank 0's own network
                    raise PeerLost(
                        f"the address of rank 0, {self._place[0]!r}, cannot be found ({error}); see MASTER_ADDR"
                    ) from error
            except NotARank as error:
                raise EngineError(
                    f"what answers at {self._where} does not have this rank's token, or is not rank 0 of this job: set "
                    f"the same QCCL_TOKEN on all ranks"
                ) from error
            except OSError as error:  # nobody listens yet
                self._hint = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))

    def _why_not(self, timeout: float, has_met: bool) -> str:
        if has_met:
            return f"rank 0 was met at {self._where}, but not every rank came there within {timeout} s"
        return (
            f"rank 0 did not answer at {self._where} within {timeout} s; check MASTER_ADDR, and that the port is not "
            f"closed by a firewall (QCCL_PORT chooses another)"
        )

    def _connect(self, seconds: float) -> Connection:
        connection = self._ways.connect(self._place, seconds)
        if not self._key:
            return connection
        self._hint = "; perhaps rank 0 has no token: set the same QCCL_TOKEN on all ranks"
        return SecureSocket(connection, self._key, is_server=False)

    def _converse(self, server: Connection, deadline: float) -> list[bytes] | None:
        """The notes, from the process that was called; None: call again. Raises OSError where it hangs up."""
        where, is_proven, has_answered = self._where, False, False
        self._hint = ""
        while head := receive(server, _REPLY.size, deadline):
            has_answered = True
            if len(head) < _REPLY.size:
                raise _stranger(where)
            verdict, content = _receive_content(server, head, where, deadline, self._size * (4 + NOTE_NBYTES))
            if verdict == _PROVE:
                nonce, proof = content[:_NONCE_NBYTES], content[_NONCE_NBYTES:]
                if not hmac.compare_digest(proof, _proof(self._job, b"rank 0", nonce, self._hello)):
                    raise _stranger(where)
                is_proven = True
                send(server, _proof(self._job, b"rank", nonce, self._hello), deadline)
                continue
            send(server, _ACKNOWLEDGE, deadline)
            if verdict == _REFUSED:
                raise MismatchError(f"{printable(content)} (at {where})")
            if verdict == _LATER:
                return None
            notes = _part(content, self._size)
            if verdict != _WELCOME or not is_proven or notes is None:
                raise _stranger(where)
            return notes
        if not has_answered and not self._key:
            self._hint = "; it ends connections at once: perhaps it has a QCCL_TOKEN, and this rank has none"
        return None


def _receive_content(
    server: Connection, head: bytes, where: str, deadline: float, most: int = _REASON_NBYTES
) -> tuple[int, bytes]:
    """Verdict and content of a reply. Raises OSError where the connection ends before it is complete."""
    magic, version, verdict, length, checksum = _REPLY.unpack(head)
    limits = {_WELCOME: most, _LATER: _REASON_NBYTES, _REFUSED: _REASON_NBYTES, _PROVE: _NONCE_NBYTES + _PROOF_NBYTES}
    if magic != _MAGIC or version != _VERSION or length > limits.get(verdict, -1):
        raise _stranger(where)
    content = receive(server, length, deadline)
    if len(content) < length:
        raise ConnectionError("rank 0 ended the connection in the middle of its answer")
    if checksum != _checksum(verdict, content):
        raise EngineError(f"the message from rank 0 at {where} was damaged on its way")
    return verdict, content


def _stranger(where: str) -> EngineError:
    return EngineError(
        f"what answers at {where} is not rank 0 of this job, or runs another version of qccl; set QCCL_PORT to a free "
        f"port, the same on all ranks"
    )
