"""The meeting of ranks over TCP: each sends some bytes to rank 0 and gets those of all. For programs without MPI.

torchrun sets MASTER_ADDR and MASTER_PORT, and so may scripts. torchrun's own store listens at MASTER_PORT, so rank 0
listens ``PORT_OFFSET`` above it, or at QCCL_PORT where that is set.

The first gather connects each rank to rank 0, and finds out who is a rank (meeting_host.py). Its connections serve all
gathers of the meeting, so that each further one takes a single round trip. With a ``key``, which follows from the job's
token, they run inside TLS: nobody else can read or change a byte, and rank 0 looks at nothing that a caller sends
before it has proved that it has the key. Without one, a rank and rank 0 prove to each other that they know the job's
name.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping

from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost
from qccl.transports import descriptors
from qccl.transports.meeting_host import ACKNOWLEDGE, RETRY_SECONDS, MeetingHost
from qccl.transports.meeting_messages import (
    NONCE_NBYTES,
    NOTE_NBYTES,
    Hello,
    Kind,
    join,
    message,
    part,
    proof,
    receive_message,
    stranger,
)
from qccl.transports.secure_socket import Connection, SecureSocket
from qccl.transports.sockets import connect, host_of, is_host, is_loopback, listen, own_end, place_text
from qccl.transports.strangers import NotARank, printable
from qccl.transports.timed import send

__all__ = ["PORT_OFFSET", "Rendezvous", "meeting_place"]

PORT_OFFSET = 17
#: between two questions for the address of a name, so that many ranks do not overload a name service
_NAME_SECONDS = 0.5

#: a process numbers its meetings for each place, size and job, so that a rank ahead of the others does not take part in
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


def _number(place: tuple[str, int], size: int, job: str) -> int:
    """Which meeting of this process it is there."""
    return next(_numbers.setdefault((place, size, job), itertools.count(1)))


class Rendezvous:
    """One rank's part in a meeting."""

    def __init__(
        self,
        rank: int,
        size: int,
        place: tuple[str, int],
        job: str = "",
        *,
        is_local: bool = False,
        key: bytes | None = None,
    ) -> None:
        """``place`` is host and port of rank 0; ``is_local`` says that all ranks are on this machine.

        Ranks of another ``job`` or size are told to go, and those of another meeting (their number with this place,
        size and job in the process) to wait. ``key``: 32 bytes that the ranks alone have, for TLS.
        """
        self._connections: dict[int, Connection] = {}  # on rank 0 to the others, on the others to rank 0
        self._rank, self._size, self._place, self._job = rank, size, place, job.encode()
        self._is_local, self._key = is_local, key
        self._number = 0  # before the first gather
        self._name = (place, size, job)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the connections. Idempotent."""
        while self._connections:
            self._connections.popitem()[1].close()

    def own_address(self) -> str | None:
        """The number of the address at which rank 0 and a rank of another machine have reached each other, of this end.

        None: all ranks came over the loopback interface, or the ranks have not met.
        """
        found = (own_end(each.fileno()) for each in self._connections.values())
        return next((each for each in found if not is_loopback(each)), None)

    def gather(self, note: bytes, timeout: float) -> list[bytes]:
        """Collective: the notes of all ranks, in rank order.

        A note has at most NOTE_NBYTES. Raises CollectiveTimeout, MismatchError for a rank of another group, PeerLost
        where a rank has left the meeting, EngineError for another program at that port, or for one without the key.
        After an error the meeting is over.
        """
        if len(note) > NOTE_NBYTES:
            raise ArgumentError(f"a note of {len(note)} bytes; a meeting takes at most {NOTE_NBYTES} from each rank")
        if self._size == 1:
            return [note]
        deadline = time.monotonic() + timeout
        try:
            if not self._number:
                self._number = _number(*self._name)
                return self._meet(note, deadline, timeout)
            return (
                self._collect(note, deadline, timeout) if self._rank == 0 else self._exchange(note, deadline, timeout)
            )
        except BaseException:
            self.close()
            raise

    def _meet(self, note: bytes, deadline: float, timeout: float) -> list[bytes]:
        """The first gather."""
        how = self._number, self._job, self._key
        if self._rank:
            call = _Call(self._rank, note, self._size, self._place, *how)
            notes, self._connections[0] = call.ask(deadline, timeout)
            return notes
        descriptors.allow(self._size)
        with MeetingHost(_listen(self._place, self._is_local), note, self._size, *how) as host:
            notes = host.serve(deadline, timeout)
            self._connections = host.met
            return notes

    def _collect(self, note: bytes, deadline: float, timeout: float) -> list[bytes]:
        """A further gather, on rank 0."""
        notes = [note]
        for rank in range(1, self._size):
            try:
                found = self._receive(rank, Kind.NOTE, deadline)
            except TimeoutError:
                raise CollectiveTimeout(f"rank {rank} did not come to the meeting again within {timeout} s") from None
            except OSError as error:
                raise self._left(f"rank {rank} has", error) from error
            notes.append(found)
        answer = message(Kind.NOTES, join(notes))
        for rank, connection in self._connections.items():
            try:
                send(connection, answer, deadline)
            except TimeoutError:
                raise CollectiveTimeout(f"rank {rank} did not take the notes of the others in {timeout} s") from None
            except OSError as error:
                raise self._left(f"rank {rank} has", error) from error
        return notes

    def _exchange(self, note: bytes, deadline: float, timeout: float) -> list[bytes]:
        """A further gather, on the others."""
        try:
            send(self._connections[0], message(Kind.NOTE, note), deadline)
            notes = part(self._receive(0, Kind.NOTES, deadline), self._size)
        except TimeoutError:
            raise CollectiveTimeout(
                f"rank 0 did not bring the notes of all ranks to {place_text(self._place)} within {timeout} s"
            ) from None
        except OSError as error:
            raise self._left("rank 0, or a rank that it waited for, has", error) from error
        if notes is None:
            raise stranger(self._place)
        return notes

    def _receive(self, rank: int, kind: Kind, deadline: float) -> bytes:
        """The content of a rank's next message. Raises OSError where there is none."""
        if not self._connections:
            raise ConnectionError("the meeting is over")
        found = receive_message(self._connections[rank], self._place, self._size, deadline, (kind,))
        if found is None:
            raise ConnectionError("the connection was ended")
        return found[1]

    def _left(self, who: str, error: OSError) -> PeerLost:
        return PeerLost(
            f"{who} left the meeting at {place_text(self._place)} before its end ({error}); that rank's own error says "
            f"why"
        )


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


class _Call:
    """What the other ranks do in the first gather: call rank 0 until it answers."""

    def __init__(
        self,
        rank: int,
        note: bytes,
        size: int,
        place: tuple[str, int],
        number: int,
        job: bytes,
        key: bytes | None,
    ) -> None:
        self._hello = Hello.of(rank, size, number, job, os.urandom(8), len(note)).pack() + note
        self._size, self._place, self._job, self._key = size, place, job, key
        self._where = place_text(place)
        self._hint = ""  # what may be wrong where rank 0 ends connections
        self._unresolved = ""  # why the last try has not found rank 0's address

    def ask(self, deadline: float, timeout: float) -> tuple[list[bytes], Connection]:
        """All ranks' notes, and the connection to rank 0."""
        has_met = False
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectiveTimeout(self._why_not(timeout, has_met) + self._hint)
            try:
                server = self._connect(left)
                try:
                    send(server, self._hello, deadline)
                    has_met = True
                    notes = self._converse(server, deadline)
                    if notes is not None:
                        return notes, server
                except BaseException:
                    server.close()
                    raise
                server.close()
            except NotARank as error:
                raise EngineError(
                    f"what answers at {self._where} does not have this rank's token, or is not rank 0 of this job: set "
                    f"the same QCCL_TOKEN on all ranks"
                ) from error
            except OSError as error:  # nobody listens yet, or the name does not exist yet
                self._unresolved = str(error) if isinstance(error, socket.gaierror) else ""
            nap = _NAME_SECONDS if self._unresolved else RETRY_SECONDS
            time.sleep(min(nap, max(0.0, deadline - time.monotonic())))

    def _why_not(self, timeout: float, has_met: bool) -> str:
        if has_met:
            return f"rank 0 was met at {self._where}, but not every rank came there within {timeout} s"
        if self._unresolved:
            return (
                f"the address of rank 0, {self._place[0]!r}, cannot be found ({self._unresolved}), and was not for "
                f"{timeout} s; see MASTER_ADDR"
            )
        return (
            f"rank 0 did not answer at {self._where} within {timeout} s; check MASTER_ADDR, and that the port is not "
            f"closed by a firewall (QCCL_PORT chooses another)"
        )

    def _connect(self, seconds: float) -> Connection:
        connection = connect(self._place, seconds)
        if not self._key:
            return connection
        self._hint = "; perhaps rank 0 has no token: set the same QCCL_TOKEN on all ranks"
        return SecureSocket(connection, self._key, is_server=False)

    def _converse(self, server: Connection, deadline: float) -> list[bytes] | None:
        """The notes, from the process that was called; None: call again. Raises OSError where it hangs up."""
        is_proven, has_answered = self._key is not None, False  # TLS has proved it
        self._hint = ""
        expected = Kind.NOTES, Kind.LATER, Kind.REFUSED, Kind.PROVE
        while found := receive_message(server, self._place, self._size, deadline, expected):
            has_answered = True
            kind, content = found
            if kind is Kind.PROVE:
                nonce, theirs = content[:NONCE_NBYTES], content[NONCE_NBYTES:]
                if not hmac.compare_digest(theirs, proof(self._job, b"rank 0", nonce, self._hello)):
                    raise stranger(self._place)
                is_proven = True
                send(server, proof(self._job, b"rank", nonce, self._hello), deadline)
                continue
            send(server, ACKNOWLEDGE, deadline)
            if kind is Kind.REFUSED:
                raise MismatchError(f"{printable(content)} (at {self._where})")
            if kind is Kind.LATER:
                return None
            notes = part(content, self._size)
            if not is_proven or notes is None:
                raise stranger(self._place)
            return notes
        if not has_answered and not self._key:
            self._hint = "; it ends connections at once: perhaps it has a QCCL_TOKEN, and this rank has none"
        return None
