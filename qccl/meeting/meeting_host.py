"""Rank 0's side of the first gather of a meeting over TCP: it finds the ranks among its callers.

Rank 0 serves all connections at once, so that a slow or silent one delays nobody. A caller is a rank when it has proved
that it knows the job's name, with a nonce of rank 0 that makes old messages useless; inside TLS the handshake has
proved that it has the key, and no nonce is needed. If two processes want to be the same rank, the one that came first
must prove once more that it is there. If it does, the later process is told that the rank exists; otherwise the later
process takes the place.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time

from qccl.base.deadline import Deadline
from qccl.base.errors import CollectiveTimeout
from qccl.meeting.callers import Caller, Callers
from qccl.meeting.channel import RETRY_SECONDS, Channel, Keys, OtherJob, OtherVersion, frame
from qccl.meeting.meeting_messages import MOST_NBYTES, NONCE_NBYTES, Hello, MeetingKind, MeetingMessage, join, parse
from qccl.meeting.sockets import LONGEST_SECONDS
from qccl.meeting.strangers import NotARank

__all__ = ["MeetingHost"]

#: seconds in which a caller must take an answer, and prove itself
_PATIENCE_SECONDS = 2.0
_PROOF_SECONDS = 2.0
_SAME_TOKEN = ": set the same QCCL_TOKEN on all ranks, or on none"
#: seconds for which a proof counts; when all ranks are there, those with older ones prove themselves once more
_FRESH_SECONDS = 1.0


class _Caller(Caller):
    """A connection to rank 0.

    Attributes:
        hello: the caller's first message; before that, a hello of rank 0.
        proof: the content that the caller must send as its proof; empty if no proof is awaited.
        is_rank: the caller has proved that it is the rank of its hello.
        proved_at: the time of the proof, in time.monotonic() seconds.
    """

    may_be_plain = False
    hello = Hello(0, 0, 0, b"", b"")
    proof = b""
    is_rank = has_answer = False
    proved_at = 0.0

    @property
    def nbytes(self) -> int:
        """The received bytes, with those of the caller's note."""
        return super().nbytes + len(self.hello.note)


class MeetingHost(Callers[_Caller]):
    """Rank 0 in the first gather: it hears all other ranks, and answers until all have the answer.

    Connections that do not belong to this meeting are closed and ignored.

    Attributes:
        met: the connections to the ranks that have the answer, which belong to the user of this object.
    """

    def __init__(self, server: socket.socket, note: bytes, size: int, number: int, keys: Keys) -> None:
        super().__init__(server, keys)
        self.met: dict[int, Channel] = {}
        self._note, self._size, self._number = note, size, number
        self._ranks: dict[int, _Caller] = {}
        self._came: set[int] = set()  # ranks that came; some may have gone again
        self._complete_at: float | None = None  # the time since which no rank is missing
        self._rivals: list[_Caller] = []  # callers with the rank of another process
        self._notes: list[bytes] | None = None
        self._answered: dict[int, bytes] = {}  # rank -> the process whose note is in the answer
        self._why = ""  # why the last caller was refused, or could not be accepted
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

    def serve(self, deadline: Deadline) -> list[bytes]:
        """Return all notes when all ranks have them. Raises CollectiveTimeout at the deadline."""
        self._deadline = deadline
        while len(self.met) < self._size - 1:
            if deadline.is_over:
                who = f"ranks {_some(self._missing())}"
                raise CollectiveTimeout(f"{who} did not come to rank 0 within {deadline.seconds} s{self._why}")
            self.drop_late()
            if self._notes is None and len(self._ranks) == self._size - 1 and not self._rivals:
                self._notes = self._make_answer()
            if self._notes is not None:
                self._send_answers(self._notes)
            first = min((deadline, *(each.until for each in (*self._unknown, *self._known))), key=lambda each: each.end)
            for key, _ in self._selector.select(min(first.remaining(), LONGEST_SECONDS)):
                if key.data is None:
                    self._accept_all()
                elif key.data in self:
                    self._hear(key.data)
        assert self._notes is not None  # a meeting of one rank needs no host
        return self._notes

    def _accept_all(self) -> None:
        if why := self.accept():
            self._why = f"; rank 0: {why}"
            time.sleep(RETRY_SECONDS)  # the caller goes on waiting

    def _welcome(self, connection: socket.socket) -> _Caller:
        caller = _Caller(connection, self._keys, parse, MOST_NBYTES)
        self._selector.register(caller, selectors.EVENT_READ, caller)
        return caller

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller)
        if caller in self._rivals:
            self._rivals.remove(caller)
        rank = caller.hello.rank
        if self._ranks.get(rank) is caller and rank not in self.met:
            del self._ranks[rank]
            self._complete_at = None
            for rival in self._rivals_of(rank):
                self._rivals.remove(rival)
                self._claim(rival)

    def _rivals_of(self, rank: int) -> list[_Caller]:
        return [each for each in self._rivals if each.hello.rank == rank]

    # -- the answer --------------------------------------------------------------------------------------------------

    def _make_answer(self) -> list[bytes] | None:
        """The notes of all ranks; None while it is not known whether all ranks are still there.

        Once no rank is missing, each is asked at most once: if new proofs expired, slow ranks would never meet.
        """
        self._complete_at = self._complete_at or time.monotonic()
        others = [self._ranks[rank] for rank in range(1, self._size)]
        for each in others:
            if not each.proof and each.proved_at < self._complete_at - _FRESH_SECONDS:
                self._ask_for_proof(each)
        if any(each.proof for each in others) or len(self._ranks) < len(others):
            return None
        self._answered = {each.hello.rank: each.hello.process for each in others}
        return [self._note, *(each.hello.note for each in others)]

    def _missing(self) -> list[int]:
        """The ranks that never came, have gone, do not prove themselves, or take no answer."""
        others = set(range(1, self._size))
        if self._notes is not None:
            return sorted(others - self.met.keys())
        unproved = {rank for rank, caller in self._ranks.items() if caller.proof}
        return sorted(others - self._came or others - self._ranks.keys() or unproved or others)

    def _send_answers(self, notes: list[bytes]) -> None:
        waiting = [each for each in self._ranks.values() if not each.has_answer]
        framed = frame(join(notes), self._keys.seal) if waiting else b""
        for caller in waiting:
            caller.has_answer = True
            self._send(caller, framed)

    def _send(self, caller: _Caller, framed: bytes) -> None:
        """Send a whole message, or drop the caller, which then calls again."""
        try:
            caller.send_frame(framed, min(self._deadline.remaining(), _PATIENCE_SECONDS))
        except OSError:
            self.drop(caller)

    # -- callers -----------------------------------------------------------------------------------------------------

    def _judge(self, caller: _Caller) -> None:
        while caller.inbox and caller in self:  # messages after TAKEN belong to the next gather
            self._obey(caller, caller.inbox.pop(0))
        if caller.has_ended:
            self.drop(caller)  # a rank without the answer calls again

    def _refuse(self, caller: _Caller, stranger: NotARank) -> None:
        if self._keys.tls and not caller.is_proved:
            self._why = f"; rank 0 dropped a caller that does not have its token{_SAME_TOKEN}"
        elif caller.begins_with_tls and not self._keys.tls:
            self._why = f"; rank 0 has no token, and a caller seems to have one{_SAME_TOKEN}"
        elif isinstance(stranger, OtherJob) and not caller.hello.size:
            self._dismiss(caller, "rank 0 belongs to another job; give each job a port of its own in QCCL_PORT")
        elif isinstance(stranger, OtherVersion) and not caller.hello.size:
            self._dismiss(caller, "rank 0 runs another version of qccl; install the same one on all ranks")
        super()._refuse(caller, stranger)

    def _obey(self, caller: _Caller, message: MeetingMessage) -> None:
        match message.kind:
            case MeetingKind.HELLO if not caller.hello.size:
                self._greet(caller, Hello.of(message.content))
            case MeetingKind.PROOF if caller.proof:
                if not hmac.compare_digest(message.content, caller.proof):
                    raise NotARank("an old message")
                self._admit(caller)
            case MeetingKind.TAKEN if caller.is_rank and caller.has_answer:
                self.met[caller.hello.rank] = caller
                self.take(caller)
            case _:
                raise NotARank("a message that no rank sends now")

    def _greet(self, caller: _Caller, hello: Hello) -> None:
        """Ask the caller for its proof, or refuse it."""
        refusal = hello.refusal(self._size, self._number)
        if refusal is not None:
            return self._dismiss(caller, refusal.content.decode())
        caller.hello = hello
        if self._keys.tls:
            self._admit(caller)
        else:
            self._ask_for_proof(caller)

    def _ask_for_proof(self, caller: _Caller) -> None:
        caller.proof, caller.until = os.urandom(NONCE_NBYTES) + caller.hello.process, Deadline(_PROOF_SECONDS)
        self._send(caller, frame(MeetingMessage(MeetingKind.PROVE, caller.proof), self._keys.seal))

    def _admit(self, caller: _Caller) -> None:
        """Accept a caller that has proved that it is a rank of this job."""
        caller.proof, caller.until, caller.proved_at = b"", self._deadline, time.monotonic()
        if not caller.is_rank:
            caller.is_rank = True
            self._set_known(caller)
            self._came.add(caller.hello.rank)
            return self._claim(caller)
        for rival in self._rivals_of(caller.hello.rank):
            self._dismiss_rival(rival)

    def _claim(self, caller: _Caller) -> None:
        """Give the caller its rank's place, or find out whether the process is still there that has the place."""
        rank, process = caller.hello.rank, caller.hello.process
        holder = self._ranks.get(rank)
        if rank in self.met or self._answered.get(rank, process) != process:
            return self._dismiss_rival(caller)
        if holder is not None and holder.hello.process == process:
            self.drop(holder)  # the holder's connection was lost
            holder = self._ranks.get(rank)
        if holder is None:
            self._ranks[rank] = caller
        else:
            self._rivals.append(caller)
            if not holder.proof:
                self._ask_for_proof(holder)

    def _dismiss_rival(self, caller: _Caller) -> None:
        rank = caller.hello.rank
        self._dismiss(caller, f"another process is rank {rank}, too; give every process a rank of its own")

    def _dismiss(self, caller: _Caller, reason: str) -> None:
        """Refuse a caller for a reason, or tell it to come later if the reason is empty."""
        if reason:
            self._why = f"; rank 0 refused a caller: {reason}"
        message = MeetingMessage(MeetingKind.REFUSED, reason.encode()) if reason else MeetingMessage(MeetingKind.LATER)
        self._send(caller, frame(message, self._keys.seal))
        self.drop(caller)


def _some(ranks: list[int]) -> str:
    return f"{ranks[:8]} and {len(ranks) - 8} more" if len(ranks) > 8 else str(ranks)
