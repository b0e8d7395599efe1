"""Ranks connected by UCX: shared memory on one machine, TCP between machines, and no MPI.

UCX is the library below the networks of MPICH and Open MPI. libucp is taken from the first of these places that has
it: the process (the wheels of MPICH and Open MPI bring one, and a second one cannot be loaded beside it), the wheel
``libucx-cu12``, the system.

When a rank fails:

- A rank whose process ended is found by UCX: at once over TCP, after a keepalive (about a second) over shared memory.
  Every rank that waits for it raises PeerLost with its number. UCX's keepalive takes a process that nobody has reaped
  to be alive, so a rank that has waited for two seconds also looks at the others' listening sockets (watch.py).
- A rank that only stops answering is found by the others' deadlines.
- An orderly close ends connections, too. The engine's control message says that before (engine/control.py), so the
  end of a connection counts as a loss only for ranks that still wait for a message.
- The ranks that are left agree on a new group (membership.py), and each connects a new worker: regroup().

Ranks that share a machine and its network open no port to other machines (``is_local``): they listen on the loopback
interface, and UCX uses no other one beside shared memory. Otherwise each listens at the address that the others use.

Settings in the environment (UCX_TLS, UCX_NET_DEVICES and all others) take precedence over those set here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ctypes.util
import importlib.util
import json
import os
import re
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from qccl import _host
from qccl.errors import ArgumentError, CollectiveTimeout, EngineError, MismatchError, PeerLost, QcclError, forked
from qccl.transports import descriptors
from qccl.transports.base import split_groups
from qccl.transports.membership import Decision, Member, Membership
from qccl.transports.messages import parse_member
from qccl.transports.native import NativeTransport
from qccl.transports.network import LOOPBACK, Network
from qccl.transports.strangers import NotARank
from qccl.transports.watch import Watch

__all__ = ["UcxTransport", "load_library", "version"]

#: For each setting the reason: peer errors turn shared memory off unless these two allow it; TCP's segments of 8 KiB
#: cost a quarter of a fast link; a keepalive of 20 s, the default, finds a killed rank too late.
_SETTINGS = {
    "SYSV_ERROR_HANDLING": "y",
    "POSIX_ERROR_HANDLING": "y",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
    "KEEPALIVE_INTERVAL": "1s",
}
#: read when the library is loaded: no handlers of signals (of crashes, and SIGHUP), and no messages about lost ranks
_LOAD_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "fatal"}
#: tag of the messages that set the group up; the engine's are smaller
_SET_UP_TAG = 1 << 30
#: how long close() and abort() take at most to deliver what was sent
_CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 0.1
#: of one rank's item in an all-gather
_MOST_NBYTES = (1 << 31) - 1
#: the first release that connects two processes by TCP over the loopback interface alone
_LOOPBACK_TCP = (1, 22)

_open: weakref.WeakSet[UcxTransport] = weakref.WeakSet()


@cache
def load_library() -> ctypes.CDLL:
    """libucp. Raises EngineError with the reason where there is none."""
    for name, value in _LOAD_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return ctypes.CDLL("libucp.so.0", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass
    reasons = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    found = "; ".join(reasons) or "libucp was not found"
    raise EngineError(f"UCX cannot be used ({found}); install it with pip install qccl[ucx]")


def _candidates() -> list[str]:
    wheel = importlib.util.find_spec("libucx")
    paths = [Path(place) / "lib" / "libucp.so.0" for place in (wheel and wheel.submodule_search_locations) or ()]
    system = ctypes.util.find_library("ucp")
    return [*(str(path) for path in paths if path.exists()), *([system] if system else [])]


def version() -> str:
    """The library's version, e.g. "1.22.0". Raises EngineError where there is none."""
    get = load_library().ucp_get_version_string
    get.restype = ctypes.c_char_p
    return str(get().decode())


def _config(network: Network) -> list[tuple[str, str]]:
    """The library's settings, without those that the environment has."""
    settings = dict(_SETTINGS)
    interfaces = network.interfaces
    release = tuple(int(number) for number in re.findall(r"\d+", version())[:2])
    if (
        interfaces == LOOPBACK
        and "UCX_TLS" in os.environ
        and release < _LOOPBACK_TCP
        and not os.environ.get("QCCL_NET")
    ):
        interfaces = None  # beside shared memory no TCP is needed
    if interfaces:
        settings["NET_DEVICES"] = interfaces
    return [(name, value) for name, value in settings.items() if f"UCX_{name}" not in os.environ]


class UcxTransport(NativeTransport):
    """One rank of a group over UCX (interface: ElasticTransport)."""

    name = "ucx"
    wire: _host.UcxWire
    eager_nbytes = 8 << 10
    is_threaded = True
    _is_fork = False

    def __init__(
        self,
        gather: Callable[[bytes], Sequence[bytes]],
        timeout: float,
        *,
        master: str | None = None,
        is_local: bool = False,
        progress_hook: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective: connect the ranks.

        ``gather`` returns every rank's bytes in rank order: some hundred of each, the addresses of the ranks' workers
        and sockets. ``master`` is a host that all ranks reach: TCP connections use the network interface that leads
        there. ``is_local`` says that all ranks, and those that join later, are on this machine.
        """
        with contextlib.ExitStack() as on_failure:
            try:
                network = Network.towards(master, is_local=is_local)
                membership = Membership(network.own_host())
                on_failure.callback(membership.close)
                wire = _start(network, membership)
            except (EngineError, ArgumentError):
                gather(b"")  # otherwise the other ranks would wait for this one
                raise
            on_failure.callback(wire.close, 0)
            member = json.dumps(membership.member(wire.address()))
            notes = gather(f"{descriptors.left()} {member}".encode())
            if b"" in notes:
                raise EngineError(f"UCX did not start on rank {notes.index(b'')}, whose own error says why")
            members, lefts = zip(*map(_member, range(len(notes)), notes), strict=True)
            if not network.is_local or "UCX_TLS" in os.environ:
                _check_descriptors(lefts)
            membership.begin(members)
            self._connect(wire, membership, network, timeout, progress_hook)
            on_failure.pop_all()

    def _connect(
        self,
        wire: _host.UcxWire,
        membership: Membership,
        network: Network,
        timeout: float,
        progress_hook: Callable[[], object] = lambda: None,
    ) -> None:
        """Collective: connect the members of a group, and own the wire, or close it."""
        self._own(wire)
        self._network = network
        self.membership: Membership | None = membership
        self.rank, self.size = membership.rank, len(membership.members)
        self.progress_hook = progress_hook
        places = [(member.host, member.port) for member in membership.members]
        self._watch = Watch(places, places[self.rank][0])
        self._set_up = 0  # transfers of allgather() so far
        self._exchanged: object = None  # the memory of the last ones
        _open.add(self)
        descriptors.allow(self.size)
        try:
            workers = [bytes.fromhex(member.worker) for member in membership.members]
            self.wire.connect(self.rank, workers, self._watch.ended)
            self._find_topology(timeout)
        except RuntimeError as error:
            reason = descriptors.exhausted() or "see QCCL_NET and the settings UCX_* of the environment"
            self.abort(str(error))
            raise EngineError(
                f"UCX has no network from rank {self.rank} to {error}; {reason}; UCX_LOG_LEVEL=warn shows what UCX says"
            ) from error
        except BaseException as error:
            self.abort(str(error))
            raise

    def split(self, color: int | None, key: int, timeout: float) -> UcxTransport | None:
        groups = split_groups(self, color, key, timeout)
        if color is None:
            self.allgather(b"", timeout)
            return None

        def gather(address: bytes) -> list[bytes]:
            addresses = self.allgather(address, timeout)
            return [addresses[rank] for rank in groups[color]]

        return UcxTransport(gather, timeout, **self._network._asdict(), progress_hook=self.progress_hook)

    @property
    def address(self) -> str:
        """As in ElasticTransport, for join()."""
        return self._member().address

    def waiting(self) -> int:
        """As in ElasticTransport."""
        return self._member().waiting()

    def regroup(self, calls: int, timeout: float, *, grows: bool) -> tuple[UcxTransport, int]:
        """As in ElasticTransport; after an error it may be called again."""
        membership = self._member()
        self.abort("the ranks make another group")

        def agree(worker: bytes) -> Decision:
            return membership.agree(worker, calls, timeout, grows=grows)

        formed = _form(membership, self._network, agree, timeout)
        self.membership = None  # it belongs to the new transport
        return formed

    def _member(self) -> Membership:
        if self._is_fork:
            raise EngineError(forked(self.rank))
        if self.membership is None:
            raise EngineError("this communicator was closed, or replaced by another one; use that one")
        return self.membership

    @classmethod
    def join(cls, address: tuple[str, int], timeout: float) -> tuple[UcxTransport, int]:
        """The transport of the group that has a rank at ``address``, when it grows; with regroup()'s result."""
        network = Network.towards(address[0])
        membership = Membership(network.own_host())

        def agree(worker: bytes) -> Decision:
            if membership.epoch < 0:
                return membership.knock(address, worker, timeout)
            return membership.agree(worker, 0, timeout)

        try:
            return _form(membership, network, agree, timeout)
        except BaseException:
            membership.close()
            raise

    def allgather(self, item: bytes, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        lengths = self._exchange(struct.pack("<q", len(item)), [8] * self.size, deadline, timeout)
        sizes = [struct.unpack("<q", length)[0] for length in lengths]
        for rank, nbytes in enumerate(sizes):
            if not 0 <= nbytes <= _MOST_NBYTES:
                self.abort("an all-gather failed")
                raise MismatchError(
                    f"rank {rank} gives {nbytes} bytes to an all-gather; 0 to {_MOST_NBYTES} are allowed"
                )
        return self._exchange(item, sizes, deadline, timeout)

    def _exchange(self, item: bytes, sizes: Sequence[int], deadline: float, timeout: float) -> list[bytes]:
        """Every rank's ``item``, whose sizes are known."""
        self._check_alive()
        mine = ctypes.create_string_buffer(item, max(len(item), 1))
        theirs = [ctypes.create_string_buffer(max(nbytes, 1)) for nbytes in sizes]
        token = _host.UcxWire.SET_UP
        self._exchanged = mine, theirs  # kept until the wire is closed if an exception ends this
        try:
            for peer in range(self.size):
                if peer != self.rank:
                    self.wire.receive(peer, _SET_UP_TAG, ctypes.addressof(theirs[peer]), sizes[peer], token, 0)
                    self.wire.send(peer, _SET_UP_TAG, ctypes.addressof(mine), len(item), token)
                    self._set_up += 2
            idle = 0
            while self.wire.set_up_completed < self._set_up:
                self.wire.progress(idle)
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(f"not every rank came to an all-gather within {timeout} s")
                self.progress_hook()
                idle += 1
        except QcclError as error:
            self.abort(str(error))
            raise  # after any other exception the engine first tells the other ranks, over this wire
        theirs[self.rank] = mine
        return [each.raw[:nbytes] for each, nbytes in zip(theirs, sizes, strict=True)]

    def abort(self, reason: str) -> None:
        if not self._gone:
            self._gone = True
            self.wire.close(_ABORT_SECONDS)
            self._watch.close()

    def close(self) -> None:
        """As in Transport. After abort(), regroup() is not possible any more."""
        if not self._gone:
            self._gone = True
            self.wire.close(_CLOSE_SECONDS)
            self._watch.close()
        if self.membership is not None:
            self.membership.close()
            self.membership = None

    def _check_alive(self) -> None:
        if self._gone:
            raise EngineError("this transport was closed or given up; make another communicator")


def _member(rank: int, note: bytes) -> tuple[Member, int]:
    """A rank, and how many descriptors it may open, from what it brought to the meeting. Raises MismatchError."""
    try:
        left, _, member = note.partition(b" ")
        return parse_member(member), int(left)
    except (NotARank, ValueError) as error:
        raise MismatchError(f"rank {rank} brought a note that is not one of this version of qccl") from error


def _check_descriptors(lefts: Sequence[int]) -> None:
    """Raise EngineError on all ranks where one of them may not open enough: UCX may end its process then."""
    for rank, left in enumerate(lefts):
        reason = descriptors.shortage(len(lefts), left)
        if reason:
            raise EngineError(f"rank {rank}: {reason}")


def _start(network: Network, membership: Membership) -> _host.UcxWire:
    """A worker that is not connected yet."""
    library = load_library()
    functions = [_address(library, name) for name in _host.UcxWire.function_names()]
    try:
        return _host.UcxWire(functions, _config(network), _Faults(membership))
    except RuntimeError as error:
        reason = descriptors.exhausted() or "see the settings UCX_* of the environment"
        raise EngineError(
            f"UCX {version()} did not start: {error}; {reason}; UCX_LOG_LEVEL=warn shows what UCX says"
        ) from error


def _form(
    membership: Membership, network: Network, agree: Callable[[bytes], Decision], timeout: float
) -> tuple[UcxTransport, int]:
    """Agree on a group and connect it; again without the ranks that are lost meanwhile."""
    deadline = time.monotonic() + 2 * timeout
    while True:
        wire = _start(network, membership)
        worker = wire.address()
        try:
            decision = agree(worker)
        except BaseException:
            wire.close(0)
            raise
        if membership.member(worker) not in decision.members:  # agreed on earlier, with a worker that was given up
            wire.close(0)
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"the ranks agreed on groups with workers that were given up for {timeout} s")
            continue
        transport = UcxTransport.__new__(UcxTransport)
        try:
            transport._connect(wire, membership, network, timeout)
        except (PeerLost, CollectiveTimeout, EngineError):
            if time.monotonic() > deadline:
                raise
        else:
            return transport, decision.calls


def _address(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise EngineError(f"UCX {version()} has no function {name}; qccl needs version 1.10 or later") from None


class _Faults:
    """Raises the faults of native code on one rank."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._lost: str | None = None

    def __call__(self, rank: int, status: int, peer: int, lost: bool, got: int, expected: int) -> None:
        if not status and peer >= 0 and not lost:
            raise MismatchError(f"rank {peer} sent {got} bytes to rank {rank}, which expected {expected}")
        if lost:
            self._lost = self._lost or self._who_was_lost(rank, status, peer)  # every later use raises it, too
            raise PeerLost(self._lost)
        raise (
            EngineError(f"UCX: {_text(status)}", code=status)
            if status
            else EngineError("this transport was closed or given up; make another communicator")
        )

    def _who_was_lost(self, rank: int, status: int, peer: int) -> str:
        ended = self._membership.find_ended(peer)
        who = f"rank {peer} gave up or cannot be reached" if ended is None else f"rank {ended} was lost"
        return f"{who}: rank {rank} has no connection to rank {peer} any more ({_text(status)})"


def _text(status: int) -> str:
    function = load_library().ucs_status_string
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_byte]
    return str(function(status).decode())


def _forked() -> None:
    """In the child of os.fork(): the connections belong to the parent, whose socket must close when it ends."""
    for transport in _open:
        transport._gone = transport._is_fork = True
        if transport.membership is not None:
            transport.membership.close()


@atexit.register
def _end() -> None:
    for transport in list(_open):
        transport.abort("the process ended")


os.register_at_fork(after_in_child=_forked)
