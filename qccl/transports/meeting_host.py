"""Rank 0's side of the beginning of a meeting over TCP: who of those that call is a rank, and their first notes.

Rank 0 serves all connections at once, so that a slow or silent one delays nobody. A caller is a rank when it has proved
that it knows the job's name, with a nonce of rank 0 that makes old messages useless; inside TLS the handshake has
proved that it has the key, and no nonce is needed. If two processes want to be the same rank, the one that came first
must prove once more that it is there. If it does, the other is told that the rank exists, and otherwise it takes the
place.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from dataclasses import dataclass, field

from qccl.errors import CollectiveTimeout
from qccl.transports.callers import Callers
from qccl.transports.meeting_messages import (
    HELLO_NBYTES,
    NONCE_NBYTES,
    NOTE_NBYTES,
    PROOF_NBYTES,
    Hello,
    Kind,
    join,
    message,
    proof,
)
from qccl.transports.secure_socket import Connection, SecureSocket
from qccl.transports.sockets import LONGEST_SECONDS
from qccl.transports.strangers import NotARank
from qccl.transports.timed import send

__all__ = ["ACKNOWLEDGE", "RETRY_SECONDS", "MeetingHost"]

ACKNOWLEDGE = b"\x06"
#: read at a time: more than the longest hello, so that nothing waits inside TLS, where select() does not see it
_MOST_NBYTES = HELLO_NBYTES + NOTE_NBYTES + 1
#: how long a connection may take to take an answer; to prove itself; and between a rank's tries
_PATIENCE_SECONDS = 2.0
_PROOF_SECONDS = 2.0
RETRY_SECONDS = 0.05
#: the first bytes of a caller that speaks TLS, as ranks with a token do
_TLS = b"\x16\x03"
_SAME_TOKEN = ": set the same QCCL_TOKEN on all ranks, or on none"
#: when all ranks are there, those that proved themselves longer ago do so once more before the answer is made
_FRESH_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection to rank 0. It is closed at ``until``, a time.monotonic().

    Attributes:
        hello: its first message with the note; nothing while that is not complete.
        nonce: what it must prove to know; nothing if no proof is awaited.
        is_rank: it has proved that it is rank ``rank`` of this job.
    """

    connection: Connection
    until: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    hello: bytes = b""
    rank: int = 0
    process: bytes = b""
    nonce: bytes = b""
    is_rank: bool = False
    proved_at: float = 0.0
    has_answer: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.received) + len(self.hello)

    @property
    def is_proved(self) -> bool:
        return isinstance(self.connection, SecureSocket) and self.connection.is_proved

    def close(self) -> None:
        self.connection.close()


class MeetingHost(Callers[_Caller]):
    """Rank 0 in the first gather: it hears all other ranks, and answers until all have the answer.

    Connections that are not of this meeting are closed and count for nothing.

    Attributes:
        met: the connections to the ranks that have the answer, which belong to the user of this object.
    """

    def __init__(
        self, server: socket.socket, note: bytes, size: int, number: int, job: bytes, key: bytes | None
    ) -> None:
        super().__init__(server)
        self.met: dict[int, Connection] = {}
        self._note, self._size, self._number, self._job, self._key = note, size, number, job, key
        self._ranks: dict[int, _Caller] = {}
        self._came: set[int] = set()  # perhaps they have gone again
        self._complete_at: float | None = None  # since when no rank is missing
        self._rivals: list[_Caller] = []  # they say to be a rank that another process is, too
        self._notes: list[bytes] | None = None
        self._answered: dict[int, bytes] = {}  # the processes whose notes the answer has
        self._why = ""  # the last caller was refused, or could not be accepted
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> MeetingHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close()
        self._selector.close()
        if kind is not None:
            for connection in self.met.values():
                connection.close()

    def serve(self, deadline: float, timeout: float) -> list[bytes]:
        """All notes, when all ranks have them. Raises CollectiveTimeout at the deadline."""
        self._deadline = deadline
        while len(self.met) < self._size - 1:
            now = time.monotonic()
            if now > deadline:
                missing = _some(self._missing())
                raise CollectiveTimeout(f"ranks {missing} did not come to rank 0 within {timeout} s{self._why}")
            self.bound()
            if self._notes is None and len(self._ranks) == self._size - 1 and not self._rivals:
                self._notes = self._make_answer()
            if self._notes is not None:
                self._send_answers(self._notes)
            until = min([deadline, *(each.until for each in (*self._unknown, *self._known))])
            for key, _ in self._selector.select(min(max(0.0, until - now), LONGEST_SECONDS)):
                if key.data is None:
                    self._accept_all()
                elif key.data in self._unknown or key.data in self._known:
                    self._hear(key.data)
        assert self._notes is not None  # size > 1
        return self._notes

    def _accept_all(self) -> None:
        if why := self.accept():
            self._why = f"; rank 0: {why}"
            time.sleep(RETRY_SECONDS)  # the caller goes on waiting

    def _welcome(self, connection: socket.socket) -> _Caller:
        secured = SecureSocket(connection, self._key, is_server=True) if self._key else connection
        secured.setblocking(False)
        caller = _Caller(secured)
        self._selector.register(secured, selectors.EVENT_READ, caller)
        return caller

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        if caller in self._rivals:
            self._rivals.remove(caller)
        if self._ranks.get(caller.rank) is caller and caller.rank not in self.met:
            del self._ranks[caller.rank]
            self._complete_at = None
            for rival in [each for each in self._rivals if each.rank == caller.rank]:
                self._rivals.remove(rival)
                self._claim(rival)

    # -- the answer --------------------------------------------------------------------------------------------------

    def _make_answer(self) -> list[bytes] | None:
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
        return [self._note, *(each.hello[HELLO_NBYTES:] for each in others)]

    def _missing(self) -> list[int]:
        """The ranks for which it waits: they never came, have gone, do not prove themselves, or take no answer."""
        others = set(range(1, self._size))
        if self._notes is not None:
            return sorted(others - self.met.keys())
        unproved = {rank for rank, caller in self._ranks.items() if caller.nonce}
        return sorted(others - self._came or others - self._ranks.keys() or unproved or others)

    def _send_answers(self, notes: list[bytes]) -> None:
        for caller in [each for each in self._ranks.values() if not each.has_answer]:
            caller.has_answer = True
            self._send(caller, Kind.NOTES, join(notes))

    def _send(self, caller: _Caller, kind: Kind, content: bytes) -> None:
        """Send a whole message, or drop the caller, which then calls again."""
        try:
            send(caller.connection, message(kind, content), min(self._deadline, time.monotonic() + _PATIENCE_SECONDS))
            caller.connection.setblocking(False)
        except OSError:
            self.drop(caller)

    # -- callers -----------------------------------------------------------------------------------------------------

    def _hear(self, caller: _Caller) -> None:
        """Read what has come: a part of the hello, a proof, the acknowledgement of an answer, or the end."""
        try:
            # what follows an acknowledgement is of the next gather
            found = caller.connection.recv(len(ACKNOWLEDGE) if caller.has_answer else _MOST_NBYTES)
        except BlockingIOError:
            return
        except NotARank as stranger:
            self._why = f"; rank 0 dropped a caller that does not have its token{_SAME_TOKEN}"
            return self.drop(caller, str(stranger))
        except OSError:
            found = b""
        if not found:
            return self.drop(caller)  # a rank without the answer calls again
        if caller.has_answer:
            return self._take_acknowledgement(caller, found)
        caller.received += found
        if not caller.hello:
            self._judge_caller(caller)
        if caller.nonce and len(caller.received) >= PROOF_NBYTES:
            self._check_proof(caller)
        if caller.hello and not caller.nonce and caller.received and not caller.has_answer:
            self.drop(caller)  # more than a rank says

    def _take_acknowledgement(self, caller: _Caller, found: bytes) -> None:
        if not caller.is_rank or found != ACKNOWLEDGE:
            return self.drop(caller)
        self.met[caller.rank] = caller.connection
        self._remove(caller)

    def _judge_caller(self, caller: _Caller) -> None:
        """Ask the caller for its proof, or refuse it, as soon as its hello is complete."""
        if len(caller.received) < HELLO_NBYTES:
            return
        hello = Hello.unpack(bytes(caller.received[:HELLO_NBYTES]))
        try:
            refusal = hello.refusal(self._size, self._number, self._job)
        except ValueError:
            if caller.received.startswith(_TLS):
                self._why = f"; rank 0 has no token, and a caller seems to have one{_SAME_TOKEN}"
            return self.drop(caller, "it speaks another protocol")
        if refusal is not None:
            return self._refuse(caller, *refusal)
        nbytes = HELLO_NBYTES + hello.note_nbytes
        if hello.note_nbytes > NOTE_NBYTES or len(caller.received) > nbytes:
            return self.drop(caller, "a message that is too long")
        if len(caller.received) == nbytes:
            caller.hello, caller.rank, caller.process = bytes(caller.received), hello.rank, hello.process
            caller.received.clear()
            if self._key:
                self._admit(caller)
            else:
                self._ask_for_proof(caller)

    def _ask_for_proof(self, caller: _Caller) -> None:
        caller.nonce, caller.until = os.urandom(NONCE_NBYTES), time.monotonic() + _PROOF_SECONDS
        self._send(caller, Kind.PROVE, caller.nonce + proof(self._job, b"rank 0", caller.nonce, caller.hello))

    def _check_proof(self, caller: _Caller) -> None:
        found = bytes(caller.received[:PROOF_NBYTES])
        if not hmac.compare_digest(found, proof(self._job, b"rank", caller.nonce, caller.hello)):
            return self.drop(caller, "it does not know the job")
        del caller.received[:PROOF_NBYTES]
        self._admit(caller)

    def _admit(self, caller: _Caller) -> None:
        """A caller is there, and is a rank of this job."""
        caller.nonce, caller.until, caller.proved_at = b"", self._deadline, time.monotonic()
        if not caller.is_rank:
            caller.is_rank = True
            self._set_known(caller)
            self._came.add(caller.rank)
            return self._claim(caller)
        for rival in [each for each in self._rivals if each.rank == caller.rank]:
            self._refuse_rival(rival)

    def _claim(self, caller: _Caller) -> None:
        """Give the caller its place, or find out whether the process is there that has it."""
        holder = self._ranks.get(caller.rank)
        if caller.rank in self.met or self._answered.get(caller.rank, caller.process) != caller.process:
            return self._refuse_rival(caller)
        if holder is not None and holder.process == caller.process:
            self.drop(holder)  # that connection was lost
            holder = self._ranks.get(caller.rank)
        if holder is None:
            self._ranks[caller.rank] = caller
        else:
            self._rivals.append(caller)
            if not holder.nonce:
                self._ask_for_proof(holder)

    def _refuse_rival(self, caller: _Caller) -> None:
        if caller in self._rivals:
            self._rivals.remove(caller)
        text = f"another process is rank {caller.rank}, too; give every process a rank of its own"
        self._refuse(caller, Kind.REFUSED, text)

    def _refuse(self, caller: _Caller, kind: Kind, text: str) -> None:
        if kind is Kind.REFUSED:
            self._why = f"; rank 0 refused a caller: {text}"
        caller.has_answer, caller.is_rank, caller.hello = True, False, caller.hello or b"-"
        caller.until = time.monotonic() + _PATIENCE_SECONDS
        caller.received.clear()
        self._set_known(caller, False)
        self._send(caller, kind, text.encode())


def _some(ranks: list[int]) -> str:
    return f"{ranks[:8]} and {len(ranks) - 8} more" if len(ranks) > 8 else str(ranks)
