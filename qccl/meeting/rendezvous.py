"""A meeting over TCP, for programs without MPI: each rank sends some bytes to rank 0, and gets the bytes of all.

torchrun sets MASTER_ADDR and MASTER_PORT, and so may scripts. torchrun's own store listens at MASTER_PORT, so rank 0
listens ``PORT_OFFSET`` above it, or at QCCL_PORT if that is set.

The first gather connects each rank to rank 0, and finds out who is a rank (meeting_host.py). Its connections serve all
gathers of the meeting, so that each further one takes a single round trip. With a ``key``, which follows from the job's
token, they run inside TLS: nobody else can read or change a byte, and rank 0 looks at nothing that a caller sends
before it has proved that it has the key. Without one, a rank and rank 0 prove to each other that they know the job's
name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Iterator, Mapping

from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost
from qccl.meeting import descriptors
from qccl.meeting.channel import Channel, Keys, OtherJob, OtherVersion, call, frame, retry
from qccl.meeting.meeting_host import MeetingHost
from qccl.meeting.meeting_messages import (
    NONCE_NBYTES,
    NOTE_NBYTES,
    Hello,
    MeetingKind,
    MeetingMessage,
    join,
    parse,
    part,
    seal,
)
from qccl.meeting.sockets import host_of, is_host, is_loopback, listen, own_end, place_text
from qccl.meeting.strangers import NotARank, printable

__all__ = ["PORT_OFFSET", "Rendezvous", "meeting_place"]

PORT_OFFSET = 17

#: numbers of this process's meetings, by place, size and job: a rank that is ahead must not join an earlier meeting
_numbers: dict[tuple[tuple[str, int], int, str], Iterator[int]] = {}


def meeting_place(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port from MASTER_ADDR, MASTER_PORT and QCCL_PORT. Raises ArgumentError for missing or invalid ones."""
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
    """The number of this process's next meeting with this place, size and job."""
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

        Rank 0 refuses ranks of another ``job`` or size, and tells ranks of another meeting (see _numbers) to wait.
        ``key``: 32 bytes for TLS, which only the ranks have; None: no TLS.
        """
        self._channels: dict[int, Channel] = {}  # rank 0's connections to the others, or a rank's to rank 0
        self._rank, self._size, self._place = rank, size, place
        self._is_local, self._keys = is_local, Keys(key or b"", seal(job))
        self._number = 0  # set by the first gather
        self._name = (place, size, job)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the connections. Idempotent."""
        while self._channels:
            self._channels.popitem()[1].close()

    def own_address(self) -> str | None:
        """This machine's numeric address at which rank 0 and a rank of another machine have reached each other.

        None if all ranks came over the loopback interface, or have not met.
        """
        found = (own_end(each.fileno()) for each in self._channels.values())
        return next((each for each in found if not is_loopback(each)), None)

    def gather(self, note: bytes, timeout: float) -> list[bytes]:
        """Collective: the notes of all ranks, in rank order.

        A note has at most NOTE_NBYTES. Raises CollectiveTimeout, MismatchError for a rank of another group, PeerLost if
        a rank has left the meeting, EngineError for another program at that port or a process without the key. After an
        error the meeting is over.
        """
        if len(note) > NOTE_NBYTES:
            raise ArgumentError(f"a note of {len(note)} bytes; a meeting takes at most {NOTE_NBYTES} from each rank")
        if self._size == 1:
            return [note]
        deadline = Deadline(timeout)
        try:
            if not self._number:
                self._number = _number(*self._name)
                return self._meet(note, deadline)
            return self._collect(note, deadline) if self._rank == 0 else self._exchange(note, deadline)
        except BaseException:
            self.close()
            raise

    def _meet(self, note: bytes, deadline: Deadline) -> list[bytes]:
        """Do the first gather."""
        if self._rank:
            hello = Hello(self._rank, self._size, self._number, os.urandom(8), note)
            notes, self._channels[0] = _Call(hello, self._place, self._keys).ask(deadline)
            return notes
        descriptors.allow(self._size)
        server = _listen(self._place, self._is_local)
        with MeetingHost(server, note, self._size, self._number, self._keys) as host:
            notes = host.serve(deadline)
            self._channels = host.met
            return notes

    def _collect(self, note: bytes, deadline: Deadline) -> list[bytes]:
        """Do a further gather, on rank 0."""
        notes = [note]
        for rank in range(1, self._size):
            with self._errors(f"rank {rank} did not come to the meeting again", f"rank {rank} has", deadline):
                notes.append(self._receive(rank, MeetingKind.NOTE, deadline))
        answer = frame(join(notes), self._keys.seal)
        for rank, channel in self._channels.items():
            with self._errors(f"rank {rank} did not take the notes of the others", f"rank {rank} has", deadline):
                channel.send_frame(answer, deadline.remaining())
        return notes

    def _exchange(self, note: bytes, deadline: Deadline) -> list[bytes]:
        """Do a further gather, on the other ranks."""
        late = f"rank 0 did not bring the notes of all ranks to {place_text(self._place)}"
        with self._errors(late, "rank 0, or a rank that it waited for, has", deadline):
            self._channels[0].send(MeetingMessage(MeetingKind.NOTE, note), deadline.remaining())
            notes = part(self._receive(0, MeetingKind.NOTES, deadline), self._size)
        if notes is None:
            raise _stranger(self._place, "notes of other ranks")
        return notes

    @contextlib.contextmanager
    def _errors(self, late: str, who: str, deadline: Deadline) -> Iterator[None]:
        """Turn a connection's errors into CollectiveTimeout, with the text ``late``, or PeerLost."""
        try:
            yield
        except (TimeoutError, BlockingIOError):  # BlockingIOError if no time was left
            raise CollectiveTimeout(f"{late} within {deadline.seconds} s") from None
        except OSError as error:
            raise PeerLost(
                f"{who} left the meeting at {place_text(self._place)} before its end ({error}); that rank's own error "
                f"says why"
            ) from error

    def _receive(self, rank: int, kind: MeetingKind, deadline: Deadline) -> bytes:
        """The content of a rank's next message. Raises OSError if there is none."""
        if not self._channels:
            raise ConnectionError("the meeting is over")
        found = self._channels[rank].receive(deadline)
        if found.kind is not kind:
            raise NotARank("a message that no rank sends now")
        return bytes(found.content)


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


def _stranger(place: tuple[str, int], cause: str) -> EngineError:
    """The error of a rank that has met another program."""
    return EngineError(
        f"what answers at {place_text(place)} is not rank 0 of this job, or runs another version of qccl ({cause}); "
        f"set QCCL_PORT to a free port, the same on all ranks"
    )


class _Call:
    """The first gather of a rank other than 0: call rank 0 until it answers."""

    def __init__(self, hello: Hello, place: tuple[str, int], keys: Keys) -> None:
        self._hello, self._place, self._keys = hello, place, keys
        self._where = place_text(place)
        self._has_met = False
        self._hint = ""  # a guess why rank 0 ends connections; kept until rank 0 answers
        self._unresolved = ""  # why the last try did not find rank 0's address

    def ask(self, deadline: Deadline) -> tuple[list[bytes], Channel]:
        """All ranks' notes, and the connection to rank 0."""
        found = retry(lambda: self._try(deadline), deadline)
        if found is None:
            raise CollectiveTimeout(self._why_not(deadline.seconds) + self._hint)
        return found

    def _why_not(self, timeout: float) -> str:
        if self._has_met:
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

    def _try(self, deadline: Deadline) -> tuple[list[bytes], Channel] | None:
        """Call rank 0 once. None or an OSError means: call again."""
        self._unresolved = ""
        most = 1 + self._hello.size * (4 + NOTE_NBYTES)
        try:
            channel = call(self._place, deadline.remaining(), self._keys, parse, most=most)
        except socket.gaierror as error:
            self._unresolved = str(error)
            raise
        try:
            notes = self._converse(channel, deadline)
            if notes is not None:
                return notes, channel
        except BaseException:
            channel.close()
            raise
        channel.close()
        return None

    def _converse(self, channel: Channel, deadline: Deadline) -> list[bytes] | None:
        """The notes from the called process; None: call again. Raises OSError if the process hangs up."""
        try:
            return self._answers(channel, deadline)
        except OtherJob as error:
            raise MismatchError(
                f"what answers at {self._where} is not rank 0 of this job ({error}); give each job a port of its own "
                f"in QCCL_PORT"
            ) from error
        except OtherVersion as error:
            raise MismatchError(
                f"rank 0 (at {self._where}) runs another version of qccl; install the same one on all ranks"
            ) from error
        except NotARank as error:
            if not self._keys.tls:
                raise _stranger(self._place, str(error)) from error
            raise EngineError(
                f"what answers at {self._where} does not have this rank's token, or is not rank 0 of this job: set the "
                f"same QCCL_TOKEN on all ranks"
            ) from error

    def _answers(self, channel: Channel, deadline: Deadline) -> list[bytes] | None:
        is_proven, has_answered = bool(self._keys.tls), False  # TLS proves that rank 0 has the key
        if is_proven:
            self._hint = "; perhaps rank 0 has no token: set the same QCCL_TOKEN on all ranks"
        channel.send(self._hello.message(), deadline.remaining())
        self._has_met = True
        if is_proven:
            self._hint = ""
        while True:
            try:
                kind, content = channel.receive(deadline)
            except ConnectionError:
                if channel.has_ended and not has_answered and not self._keys.tls:
                    self._hint = "; it ends connections at once: perhaps it has a QCCL_TOKEN, and this rank has none"
                raise
            has_answered, self._hint = True, ""
            match kind:
                case MeetingKind.PROVE if content[NONCE_NBYTES:] == self._hello.process:
                    is_proven = True
                    channel.send(MeetingMessage(MeetingKind.PROOF, content), deadline.remaining())
                case MeetingKind.REFUSED:
                    raise MismatchError(f"{printable(content)} (at {self._where})")
                case MeetingKind.LATER:
                    return None
                case MeetingKind.NOTES if is_proven and (notes := part(content, self._hello.size)) is not None:
                    channel.send(MeetingMessage(MeetingKind.TAKEN), deadline.remaining())
                    return notes
                case _:
                    raise NotARank("a message that no rank sends now")
