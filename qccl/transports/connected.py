"""The base of transports whose wire connects the processes itself, over UCX or between sites (wan).

Each process brings the address of its wire to a meeting, and has a membership socket (regroup.py). By their sockets the
ranks that are left after a loss agree on a new group, for which each makes a new wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import msgspec

from qccl import _host
from qccl.base.deadline import Deadline
from qccl.base.errors import (
    ArgumentError,
    CollectiveTimeout,
    EngineError,
    MismatchError,
    PeerLost,
    QcclError,
    forked,
    is_own,
    own,
    ranks_text,
)
from qccl.base.lifetime import Registry, Stage
from qccl.meeting import descriptors
from qccl.meeting.join_address import JoinAddress
from qccl.meeting.messages import Decision, Member, parse_member
from qccl.meeting.network import Network
from qccl.meeting.regroup import MembershipSocket
from qccl.meeting.strangers import NotARank, printable
from qccl.meeting.watch import Watch
from qccl.transports.base import renumbered, split_groups
from qccl.transports.native import NativeTransport

__all__ = ["ConnectedTransport", "Faults"]

#: tag of the messages that set the group up; the engine's tags are smaller
_SET_UP_TAG = 1 << 30
#: most seconds in which the end of the process, close() and abort() deliver sent messages: a program may end right
#: after calls that have left megabytes for a slow network
_EXIT_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 0.1
#: most bytes of one rank's item in an all-gather
_MOST_NBYTES = (1 << 31) - 1
#: prefix of a note with the reason why a rank's wire did not start, in place of its address; most bytes of the reason
_REFUSAL, _MOST_REASON = b"!", 1000


class Protection(NamedTuple):
    """The secret that keeps others out of a group.

    Attributes:
        secret: the job's 32 bytes, which encrypt the membership sockets; None: nothing is encrypted.
        encrypts: the wire uses the secret, too, if it can encrypt.
    """

    secret: bytes | None = None
    encrypts: bool = True

    @property
    def of_wire(self) -> bytes | None:
        """The secret of a wire that is to encrypt."""
        return self.secret if self.encrypts else None


_ANYWHERE, _OPEN = Network(), Protection()


class ConnectedTransport(NativeTransport):
    """One rank of a group whose wire connects the processes itself; meet(), regroup() and join() make it."""

    wire: _host.GroupWire
    can_regroup = True
    _is_fork = False

    def __init__(
        self,
        wire: _host.GroupWire,
        membership: MembershipSocket,
        network: Network,
        protection: Protection,
        timeout: float,
        progress_hook: Callable[[], object] = lambda: None,
        maker: ConnectedTransport | None = None,
    ) -> None:
        """Collective: connect the members of a group, and own the wire, or close it.

        ``maker``: the transport whose split() or regroup() this is.
        """
        membership.transport = weakref.ref(self)
        self._own(wire)
        self._network, self._protection = network, protection
        self.membership: MembershipSocket | None = membership
        self.rank, self.size, self._members = membership.rank, len(membership.members), membership.members
        self.progress_hook = progress_hook
        places = [member.place for member in membership.members]
        self._watch = Watch(places, places[self.rank][0], membership.greeting)
        self._set_up = 0  # transfers of allgather() so far
        self._exchanged: object = None  # the memory of the latest transfers
        _open.add(self)
        if maker is not None:
            maker.made = self
        try:
            with descriptors.or_engine_error(f"{self.name} cannot connect rank {self.rank}"):
                descriptors.allow(self.size * max(1, self._connections(network)))
                self._connect_wire([member.worker for member in membership.members])
            self._watch.begin()
            membership.look_at_names(self._watch)
            self._exchange(b"\0", [1] * self.size, Deadline(timeout))  # shows that all ranks are connected
            self._set_topology([member.machine for member in membership.members])
            membership.look(self._watch)
            membership.hear()
        except BaseException as error:
            if maker is not None and maker.engine is not None:
                maker.engine.give_up(self, error)  # other ranks may have connected
            else:
                self.abort(str(error))
            if isinstance(error, _host.WireError):
                raise own(EngineError(self._no_network(str(error)))) from error
            raise

    @classmethod
    def meet(
        cls,
        gather: Callable[[bytes], Sequence[bytes]],
        timeout: float,
        network: Network = _ANYWHERE,
        protection: Protection = _OPEN,
        progress_hook: Callable[[], object] = lambda: None,
        maker: ConnectedTransport | None = None,
        ranks: Sequence[int] = (),
    ) -> Self:
        """Collective: the transport of ranks that can exchange their addresses.

        ``gather`` returns every rank's bytes in rank order: some hundred of each, the addresses of the ranks' wires and
        sockets. ``maker``: the transport whose split() this is, with the numbers of the ``ranks`` there.
        """
        refused = descriptors.or_engine_error
        with refused(f"{cls.name} cannot start"), contextlib.ExitStack() as on_failure:
            try:
                with refused(f"{cls.name} cannot start"):
                    membership = MembershipSocket(*cls._listens(network), protection.secret)
                    on_failure.callback(membership.close)
                    wire = cls._start(network, membership, protection.of_wire)
            except (EngineError, ArgumentError) as error:
                with contextlib.suppress(QcclError):  # another rank was told meanwhile, and gave up
                    gather(_REFUSAL + str(error).encode(errors="replace")[:_MOST_REASON])
                raise
            on_failure.callback(wire.close, 0)
            notes = gather(b"%d %b" % (descriptors.left(), msgspec.json.encode(membership.member(wire.address()))))
            with contextlib.nullcontext() if maker is None else renumbered(maker, ranks):
                for rank, note in enumerate(notes):
                    if note.startswith(_REFUSAL):
                        raise EngineError(f"rank {rank}: {printable(note[len(_REFUSAL) :], _MOST_REASON)}")
                members, lefts = zip(*map(_member, range(len(notes)), notes), strict=True)
                cls._check_descriptors(network, lefts)
                membership.begin(members)
                made = cls(wire, membership, network, protection, timeout, progress_hook, maker)
            on_failure.pop_all()
            return made

    @classmethod
    @abstractmethod
    def _start(cls, network: Network, membership: MembershipSocket, secret: bytes | None) -> _host.GroupWire:
        """A wire that is not connected yet; ``secret``: the job's secret if the wire is to encrypt.

        Raises EngineError, ArgumentError.
        """

    @classmethod
    def _listens(cls, network: Network) -> tuple[str, Sequence[int]]:
        """The host at which other ranks reach this one, and the ports at which it may listen; empty: any port."""
        return network.own_host(), ()

    @classmethod
    @abstractmethod
    def _connections(cls, network: Network) -> int:
        """How many connections, and so descriptors, the wire may need for each other rank."""

    @abstractmethod
    def _ended(self, ranks: list[int]) -> list[int]:
        """The ranks among ``ranks`` whose processes have ended. Takes some milliseconds at most."""

    def _connect_wire(self, addresses: list[bytes]) -> None:
        """Connect the wire to the others; ``addresses`` by rank. Raises WireError and OSError."""
        self.wire.connect(self.rank, addresses, _weakly(self._ended))

    def _no_network(self, reason: str) -> str:
        """The message of an error of wire.connect()."""
        return f"{self.name} has no network from rank {self.rank} to {reason}"

    @classmethod
    def _check_descriptors(cls, network: Network, lefts: Sequence[int]) -> None:
        """Raise EngineError on all ranks if a rank may not open enough descriptors."""
        each = cls._connections(network)
        for rank, left in enumerate(lefts if each else ()):
            reason = descriptors.shortage(len(lefts) * each, left)
            if reason:
                raise EngineError(f"rank {rank}: {reason}")

    def split(self, color: int | None, key: int, timeout: float) -> Self | None:
        """Collective: a wire with connections of its own for each color."""
        groups = split_groups(self, color, key, timeout)
        if color is None:
            self.allgather(b"", timeout)
            return None

        def gather(address: bytes) -> list[bytes]:
            addresses = self.allgather(address, timeout)
            return [addresses[rank] for rank in groups[color]]

        how = self._network, self._protection, self.progress_hook
        return self.meet(gather, timeout, *how, maker=self, ranks=groups[color])

    @property
    def address(self) -> str:
        """The address at which this process takes in new ones, with the job's secret; for join()."""
        secret, encrypts = self._protection
        return JoinAddress(self.name, self._member().place, secret, encrypts).text()

    def waiting(self) -> int:
        """Number of the processes that wait at this rank's socket."""
        return self._member().waiting()

    def regroup(self, calls: int, timeout: float, *, grows: bool) -> tuple[Self, int]:
        """Agree on the next group by regroup.py, over TCP, and connect it. It may be called again after an error."""
        membership = self._member()
        network = self._network._replace(is_alone=self._network.is_alone and not grows)

        def agree(worker: bytes) -> Decision:
            # other ranks may still be in a call that has ended here, and need this rank's messages
            try:
                return membership.agree(worker, calls, timeout, grows=grows, meanwhile=self._drive)
            finally:
                self._end(0)

        ranks = {member.id: rank for rank, member in enumerate(self._members)}
        try:
            return self._form(membership, network, self._protection, agree, timeout, self)
        except QcclError:  # it numbers the ranks of the latest attempt's group
            with renumbered(self, [ranks.get(member.id) for member in membership.members]):
                raise

    def _drive(self) -> None:
        """Deliver sent messages, if the wire is not closed."""
        if not self._gone:
            try:
                self.wire.progress(1)
            except QcclError as error:
                if not is_own(error):
                    raise  # an own error means that ranks are lost: the next group is without them

    def _member(self) -> MembershipSocket:
        if self._is_fork:
            raise EngineError(forked(self.rank))
        latest = None if self.membership is None else self.membership.transport()
        if self.membership is None or (latest is not None and latest is not self and not latest._gone):
            raise EngineError("this communicator was closed, or replaced by another one; use that one")
        return self.membership

    @classmethod
    def join(
        cls, address: tuple[str, int], timeout: float, secret: bytes | None = None, *, encrypts: bool = True
    ) -> tuple[Self, int]:
        """Join the group of the rank at ``address`` when the group grows; the result is that of regroup().

        ``secret`` and ``encrypts`` are the group's. ``timeout`` includes the start of the library.
        """
        until = Deadline(timeout)
        with descriptors.or_engine_error(f"{cls.name} cannot start"):
            network = Network.towards(address[0])
            membership = MembershipSocket(*cls._listens(network), secret)

        def agree(worker: bytes) -> Decision:
            if membership.epoch < 0:
                return membership.knock(address, worker, until)
            return membership.agree(worker, 0, until.remaining())

        try:
            return cls._form(membership, network, Protection(secret, encrypts), agree, timeout)
        except BaseException:
            membership.close()
            raise

    @classmethod
    def _form(
        cls,
        membership: MembershipSocket,
        network: Network,
        protection: Protection,
        agree: Callable[[bytes], Decision],
        timeout: float,
        maker: ConnectedTransport | None = None,
    ) -> tuple[Self, int]:
        """Agree on a group and connect it. If ranks are lost meanwhile, do it again without them."""
        deadline = Deadline(2 * timeout)
        while True:
            with descriptors.or_engine_error(f"{cls.name} cannot start"):
                wire = cls._start(network, membership, protection.of_wire)
            worker = wire.address()
            try:
                decision = agree(worker)
            except BaseException:
                wire.close(0)
                raise
            if membership.member(worker) not in decision.members:  # an earlier decision, for a wire that was given up
                wire.close(0)
                if deadline.is_over:
                    raise CollectiveTimeout(f"the ranks agreed on groups with wires that were given up for {timeout} s")
                continue
            try:
                made = cls(wire, membership, network, protection, timeout, membership.check_whole, maker)
            except QcclError as error:
                if not is_own(error) or deadline.is_over:
                    raise
            else:
                return made, decision.calls

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        """Send this rank's item to all others, its length first, and receive theirs.

        Raises MismatchError for an impossible length.
        """
        deadline = Deadline(timeout)
        lengths = self._exchange(struct.pack("<q", len(item)), [8] * self.size, deadline)
        sizes = [struct.unpack("<q", length)[0] for length in lengths]
        for rank, nbytes in enumerate(sizes):
            if not 0 <= nbytes <= _MOST_NBYTES:
                raise MismatchError(
                    f"rank {rank} gives {nbytes} bytes to an all-gather; 0 to {_MOST_NBYTES} are allowed"
                )
        return self._exchange(item, sizes, deadline)

    def _exchange(self, item: bytes, sizes: Sequence[int], deadline: Deadline) -> list[bytes]:
        """Send ``item`` to all ranks, and receive their items, whose sizes are known.

        After an exception the wire is still open: the engine tells the other ranks over it, and then calls abort().
        """
        self._check_alive()
        mine = ctypes.create_string_buffer(item, max(len(item), 1))
        theirs = [ctypes.create_string_buffer(max(nbytes, 1)) for nbytes in sizes]
        arrived = (ctypes.c_int64 * self.size)(*[-1] * self.size)
        token, idle = _host.GroupWire.SET_UP, 0
        self._exchanged = mine, theirs, arrived  # kept until the wire is closed, if an exception leaves this method
        for peer in self._peers():
            place = ctypes.addressof(arrived) + peer * ctypes.sizeof(ctypes.c_int64)
            self.wire.receive(peer, _SET_UP_TAG, ctypes.addressof(theirs[peer]), sizes[peer], token, place)
            self.wire.send(peer, _SET_UP_TAG, ctypes.addressof(mine), len(item), token)
            self._set_up += 2
        while self.wire.set_up_completed < self._set_up:
            self.wire.progress(idle)
            if deadline.is_over:
                silent = [peer for peer in self._peers() if arrived[peer] < 0]
                what = "answer in an all-gather" if silent else f"all take what rank {self.rank} gave to an all-gather"
                who = ranks_text(silent or self._peers())
                raise own(CollectiveTimeout(f"{who} did not {what} within {deadline.seconds:.3g} s"))
            self.progress_hook()
            idle += 1
        for peer in self._peers():
            if arrived[peer] != sizes[peer]:
                counts = f"{arrived[peer]} bytes to rank {self.rank}, which expected {sizes[peer]}"
                raise own(MismatchError(f"rank {peer} sent {counts}"))
        theirs[self.rank] = mine
        return [each.raw[:nbytes] for each, nbytes in zip(theirs, sizes, strict=True)]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def abort(self, reason: str) -> None:
        """Close the wire after a tenth of a second for its last sends; other transfers are cancelled."""
        self._end(_ABORT_SECONDS)

    def close(self) -> None:
        """Close the wire after its last sends, and leave the membership: regroup() is not possible any more."""
        self._end(_CLOSE_SECONDS)
        if self.membership is not None:
            if self.membership.transport() in (self, None):  # otherwise the membership belongs to the next group
                self.membership.close()
            self.membership = None

    def _end(self, seconds: float) -> None:
        """Close the wire; its last sends have at most ``seconds``."""
        if not self._gone:
            self._gone = True
            self.wire.close(seconds)
            self._watch.close()


def _weakly(ended: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    """Wrap a method of a transport for its wire without a strong reference: native code hides cycles from Python."""
    method = weakref.WeakMethod(ended)

    def call(ranks: list[int]) -> list[int]:
        found = method()
        return found(ranks) if found is not None else []

    return call


def _member(rank: int, note: bytes) -> tuple[Member, int]:
    """A rank, and how many descriptors it may open, from its note of the meeting. Raises MismatchError."""
    try:
        left, _, member = note.partition(b" ")
        return parse_member(member), int(left)
    except (NotARank, ValueError) as error:
        raise MismatchError(
            f"rank {rank} brought a note that this version of qccl cannot read; install the same version on all ranks"
        ) from error


class Faults:
    """Raises the faults of native code on one rank.

    ``library``: the library's name for messages; ``text``: returns the library's text for the number of an error.
    """

    def __init__(self, membership: MembershipSocket, library: str, text: Callable[[int], str]) -> None:
        self._membership, self._library, self._text = membership, library, text
        #: text and rank of the first loss, which every later use of this wire raises; the group's failure is End's
        self._lost: tuple[str, int] | None = None

    def __call__(self, rank: int, status: int, reason: str, peer: int, lost: bool, got: int, expected: int) -> None:
        """Raise the error of a fault (WireFault in kernels/wires/group_wire.h)."""
        if lost:
            self._lost = self._lost or self._who_was_lost(rank, peer, reason or self._text(status))
            raise own(PeerLost(*self._lost))
        if status:
            raise own(EngineError(f"{self._library}: {self._text(status)}", code=status))
        if peer >= 0:
            raise own(MismatchError(f"rank {peer} sent {got} bytes to rank {rank}, which expected {expected}"))
        raise own(EngineError("this transport was closed or aborted; make another communicator"))

    def _who_was_lost(self, rank: int, peer: int, why: str) -> tuple[str, int]:
        ended = self._membership.find_lost(peer)
        who = f"rank {peer} gave up or cannot be reached" if ended is None else f"rank {ended} was lost"
        text = f"{who}: rank {rank} has no connection to rank {peer} any more ({why})"
        return text, peer if ended is None else ended


def _forked(transport: ConnectedTransport) -> None:
    """In a child of os.fork(): the connections belong to the parent, whose socket must close when it ends."""
    transport._gone = transport._is_fork = True
    transport.wire.close(0)
    if transport.membership is not None:
        transport.membership.close()


_open = Registry((lambda transport: transport._end(_EXIT_SECONDS),), Stage.TRANSPORTS, _forked)
