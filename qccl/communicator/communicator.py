"""The communicator: a group of ranks, with its plans, its state between calls, its sub-groups and its end."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from qccl.base.deadline import Deadline
from qccl.base.dtypes import DTypeLike
from qccl.base.errors import ArgumentError, CollectiveTimeout, QcclError, gave_up
from qccl.base.guard import guarded
from qccl.base.removed import check_variables
from qccl.collectives import CollectiveSpec, HierarchicalSpec, spec_of_plan
from qccl.collectives.arguments import CodecLike, check_group, codecs_of, count_of, setup_timeout, timeout_of
from qccl.communicator.calls import Collectives
from qccl.communicator.choosing import Chooser
from qccl.communicator.dynamo import not_traced, skip_tracing
from qccl.communicator.plan import Plan
from qccl.communicator.profile import GroupProfile
from qccl.communicator.session import Session
from qccl.engine.base import Backend
from qccl.engine.host import HostBackend
from qccl.engine.host.shutdown import leave
from qccl.meeting.meetings import of_jax, of_torch
from qccl.observe.metrics import check_setting
from qccl.observe.ranges import ranges
from qccl.observe.records import GroupRecord
from qccl.observe.statistics import Stats
from qccl.transports.connect import connect

if TYPE_CHECKING:
    from qccl.engine.cuda.nccl import NcclTransport
    from qccl.transports.base import Group, Transport

__all__ = ["Communicator"]

#: call numbers are less than this
_CALLS = 1 << 63
#: pause between two looks of grow() for waiting processes
_NAP_SECONDS = 0.02
#: numbers the groups of this process; ranks usually make the same groups in the same order
_numbers = itertools.count()


@not_traced
class Communicator(Collectives):
    """A group of ranks and the collectives among them.

    Make one with qccl.init(), qccl.run_ranks() or a ``from_...`` method; the constructor is for CUDA only.

    Ranks must call the same collectives in the same order; one thread at a time may use a communicator. On the host
    the ranks compare every call, and write no result before they agree; on CUDA they compare the first call of each
    kind. Calls under way on one communicator wait for each other if they use the same memory. Nothing orders calls on
    two communicators (from split(), for example): wait for one before starting the other. After a failure in the
    middle of a call the communicator is unusable, and every further call raises that failure again.

    Attributes:
        rank: number of this process in the group, from 0 on.
        size: number of ranks in the group.
        local_rank: number among the ranks of the same machine.
        local_size: number of ranks on the same machine.
        nodes: for each rank, the number of its machine.
        backend: "host" or "cuda".
        transport: moves bytes between ranks; its ``name`` is "mpi", "ucx", "wan", "gloo", "loopback" or "nccl"; only
            engines use the rest.
        state, memory: the state of stateful codecs, and the checks of arrays, for qccl's layers above; programs use
            state_dict() and pass arrays to the calls.
    """

    def __init__(
        self, unique_id: bytes, rank: int, size: int, *, timeout: float | None = None, device: int | None = None
    ) -> None:
        """Collective, on CUDA: one rank calls get_unique_id(), and all pass the ``unique_id`` that it returned.

        ``timeout`` is as in qccl.init(). ``device`` is the GPU of this rank; None means the current one. Programs that
        a launcher started use qccl.init() instead.
        """
        from qccl.engine.cuda import CudaBackend
        from qccl.engine.cuda.nccl import NcclTransport

        setup = setup_timeout(timeout)
        self._set_up(NcclTransport.from_unique_id(unique_id, rank, size, device, setup), timeout, CudaBackend)

    def _set_up(
        self, transport: Group, timeout: float | None, backend: Callable[[Any], Backend], name: str | None = None
    ) -> None:  # fmt: skip
        check_variables()
        check_setting()
        skip_tracing()
        call_ranges = ranges()
        made = backend(transport)
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = transport.local_rank, transport.local_size
        self.nodes = transport.nodes
        self._halves = transport.halves
        self.backend = made.name
        self.transport = transport
        self._make_backend = backend
        name = name or f"group {next(_numbers)}"
        self._session = Session(made, timeout_of(timeout, made.timeout), name, call_ranges)
        self._session.serve_metrics(self.local_rank, is_thread=transport.name == "loopback")
        self.state = self._session.state
        self.memory = made.memory
        self._chooser = Chooser(self._session, GroupProfile(self.nodes, transport.name, hardware=transport.hardware))

    @classmethod
    def _from_transport(
        cls,
        transport: Group,
        timeout: float | None = None,
        backend: Callable[[Any], Backend] = HostBackend,
        name: str | None = None,
    ) -> Communicator:
        """Make a communicator over a transport that suits the backend; ``name`` is the group's name in records."""
        comm = cls.__new__(cls)
        comm._set_up(transport, timeout, backend, name)
        return comm

    @classmethod
    def from_transport(cls, transport: Transport, timeout: float = 60.0) -> Communicator:
        """Collective: the ranks of your own transport, which the communicator then owns."""
        return cls._from_transport(transport, timeout_of(timeout))

    @classmethod
    def from_mpi(
        cls, comm: Any, timeout: float | None = None, *, backend: str = "host", device: int | None = None
    ) -> Communicator:
        """Collective: the ranks of an mpi4py communicator, which qccl duplicates and does not change.

        With ``backend="cuda"`` the ranks use MPI to find each other and for ``inter="host"``; ``device`` is as in
        qccl.init(). Raises ArgumentError if MPI has only one rank and the launcher started more, unless ``comm`` is
        MPI.COMM_SELF.
        """
        from qccl.transports.mpi import MpiTransport

        if backend not in ("host", "cuda"):
            raise ArgumentError(f'backend {backend!r} does not exist; there are "host" and "cuda"')
        transport = MpiTransport.from_mpi(comm, setup_timeout(timeout))
        if backend == "host":
            return cls._from_transport(transport, timeout)
        return cls._over(transport, device, timeout)

    @classmethod
    def from_nccl(cls, comm: Any, rank: int, size: int, timeout: float | None = None) -> Communicator:
        """Collective: the ranks and GPUs of an NCCL communicator: a NcclCommunicator of CuPy, or an ncclComm_t as int.

        qccl uses it only to bring the ranks together, and leaves it as it was.
        """
        setup = setup_timeout(timeout)
        return cls._on_cuda(lambda nccl: nccl.from_nccl(comm, rank, size, setup), timeout)

    @classmethod
    def from_torch(cls, group: Any = None, timeout: float | None = None) -> Communicator:
        """Collective: the ranks of a torch.distributed process group (None: the default one).

        If it has NCCL, the ranks use their current devices. Otherwise they use host memory, over UCX if all ranks have
        it, or else over gloo; on several machines with a token over wan. QCCL_TRANSPORT names another. qccl uses the
        group only to bring the ranks together, and leaves it as it was.
        """
        from qccl.transports.gloo import backend_of

        setup = setup_timeout(timeout)
        if "nccl" in backend_of(group):
            return cls._on_cuda(lambda nccl: nccl.from_torch(group, setup), timeout)
        return cls._from_transport(connect(of_torch(group), setup), timeout)

    @classmethod
    def from_jax(cls, timeout: float = 60.0) -> Communicator:
        """Collective: the processes of jax.distributed, on host memory; the transport is chosen as in from_torch().

        Raises ArgumentError unless the program has called jax.distributed.initialize().
        """
        return cls._from_transport(connect(of_jax(), timeout_of(timeout)), timeout)

    @classmethod
    def _on_cuda(cls, make: Callable[[type[NcclTransport]], NcclTransport], timeout: float | None) -> Communicator:
        from qccl.engine.cuda import CudaBackend
        from qccl.engine.cuda.nccl import NcclTransport

        return cls._from_transport(make(NcclTransport), timeout, CudaBackend)

    @classmethod
    def _over(cls, group: Transport, device: int | None, timeout: float | None) -> Communicator:
        """Connect the ranks of a host group on their GPUs. The communicator owns the group; a failure closes it."""
        try:
            return cls._on_cuda(lambda nccl: nccl.from_group(group, device, setup_timeout(timeout)), timeout)
        except BaseException:
            group.close()
            raise

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        end = self._session.end
        state = "closed" if end.closed else "failed" if end.failure else self.transport.carrier
        return f"<Communicator rank {self.rank} of {self.size}, {state}>"

    # -- collectives -------------------------------------------------------------------------------------------------

    @guarded
    def plan(
        self,
        collective: str,
        count: int,
        dtype: DTypeLike = "float32",
        *,
        codec: CodecLike = "minmax8",
        chunk: int | None = None,
        key: str | None = None,
        **parameters: Any,
    ) -> Plan:
        """Collective: make a plan of one collective, such as "allreduce", for a vector of ``count`` elements.

        ``dtype`` is a name, NCCL's number, or a type of NumPy, torch or JAX (such as ``x.dtype``). ``parameters`` are
        the parameters of the collective's method ("op", "algorithm", ...).
        """
        self._session.check_usable()
        if collective == HierarchicalSpec.name:
            parameters = {"node_ids": self._halves or self.nodes, **parameters}
        return self._plan(
            [spec_of_plan(collective, count, dtype, each, chunk, parameters) for each in codecs_of(codec)], key
        )

    @guarded
    def plan_of(self, spec: CollectiveSpec, key: str | None = None) -> Plan:
        """Collective: make a plan of any call, from its spec (qccl.collectives), to time or inspect it.

        Calls of several arrays, for which plan() has no name, are bound with Plan.bind_buffers().
        """
        self._session.check_usable()
        return self._plan([spec], key)

    def _plan(self, specs: Sequence[CollectiveSpec], key: str | None) -> Plan:
        for spec in specs:
            spec.buffers(self.rank, self.size)  # raises if these ranks cannot make the call
        return Plan(self._session, specs[0], key, self.nodes, self._choose(specs, key))

    @guarded
    def profile(self) -> GroupProfile:
        """Collective: the profile of the group: measured times of calls, by which ``codec="auto"`` decides.

        It has the times that qccl.init() loaded, and those of the kinds of calls made with ``codec="auto"`` so far. If
        it has no all-reduces of float32 with minmax8 yet, they are measured, in less than a second unless the network's
        delay is long. Raises ArgumentError for a single rank, in the capture of a CUDA graph, and if calls cannot be
        measured, because the timeout is too short or a GPU has no memory for them; and the errors of calls.
        """
        self._session.check_usable()
        if self.size == 1:
            raise ArgumentError("a group of one rank has no profile, because it sends nothing")
        specs = [spec_of_plan("allreduce", 1, "float32", codec, None, {}) for codec in codecs_of("auto")]
        choice = self._chooser.choose(specs, self.nodes)
        if choice.refusal:
            raise ArgumentError(f"there is no profile, because calls were not measured: {choice.refusal}")
        return self._chooser.profile

    @guarded
    def _adopt(self, profile: GroupProfile) -> None:
        """Collective: decide by a loaded profile; see Chooser.adopt()."""
        self._chooser.adopt(profile)

    @property
    def timeout(self) -> float:
        """Seconds until a call that does not finish raises CollectiveTimeout; may be set between calls."""
        return self._session.engine.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._session.engine.timeout = timeout_of(seconds)

    @guarded
    def barrier(self) -> None:
        """Collective: return when every rank has called barrier()."""
        self._session.run_collective("barrier()", lambda: None)

    @guarded
    def allgather(self, item: bytes) -> list[bytes]:
        """Collective: gather every rank's ``item``, bytes, in rank order; for set-up, not for speed."""
        if not isinstance(item, bytes):
            raise ArgumentError(f"an item of allgather() must be bytes, not {type(item).__name__}")
        return self._session.run_collective("allgather()", lambda: self.transport.allgather(item, self.timeout))

    @guarded
    def check(self, stream: int | None = None, timeout: float | None = None) -> None:
        """Raise the first failure so far, if any.

        On CUDA this first waits until all calls are done, and everything on ``stream`` if given (such as the replays of
        a graph that contains calls). If it then raises nothing, their results are valid. ``timeout`` is in seconds;
        None means the communicator's.
        """
        session = self._session
        session.check_usable()
        timeout = self.timeout if timeout is None else timeout_of(timeout)
        try:
            session.engine.check(timeout, stream)
        except QcclError as error:
            session.fail(error)
            raise

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._session.end.closed

    @property
    def is_usable(self) -> bool:
        """Whether this communicator takes calls: it was not closed, and has not failed, shrunk or grown."""
        return not self._session.end.is_over

    # -- state between calls -----------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """The number of collectives started so far, or after a failure of those that succeeded.

        It numbers the next collective, and keys its random numbers.
        """
        return self._session.numbers.calls

    @guarded
    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's state, on which the results of later calls depend; waits for calls under way.

        "keys" has the state of stateful codecs by key, as NumPy arrays; "calls" is the number of the next call. After
        a failure it is the state after the last successful calls; on CUDA it may include calls whose results were
        complete before the failure. qccl.save_state() writes it to a file.
        """
        session = self._session
        session.engine.wait_until_idle(self.timeout)
        return {"calls": session.numbers.calls, "keys": session.state.save()}

    @guarded
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that state_dict() returned on the same rank of a group of the same size.

        Every rank must call it. Later calls then give the same bits as they would have given after state_dict(). Raises
        ArgumentError for any other state, and then changes nothing.
        """
        session = self._session
        session.check_usable()
        if not isinstance(saved, Mapping) or set(saved) != {"calls", "keys"}:
            found = f"one with {list(saved)}" if isinstance(saved, Mapping) else type(saved).__name__
            raise ArgumentError(f'a state is the dict that state_dict() returned, with "calls" and "keys", not {found}')
        calls = count_of(saved["calls"], 'the state\'s "calls"')
        if calls >= _CALLS:
            raise ArgumentError(f'the state\'s "calls" must be a number of calls, less than 2**63, not {calls}')
        session.engine.wait_until_idle(self.timeout)
        session.state.load(saved["keys"])
        session.numbers.go_on(calls)
        session.programs.clear()  # the programs' headers have the old offset

    @guarded
    def reset(self, key: str | None = None) -> None:
        """Delete the state under ``key`` (None: under all keys). Every rank must call it alike."""
        self._session.engine.wait_until_idle(self.timeout)
        self._session.state.reset(key)

    # -- groups and the end ------------------------------------------------------------------------------------------

    @guarded
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective: make a communicator of the ranks with this ``color``, ordered by (key, rank).

        A rank with the color None is in no group, and gets None.
        """
        self._session.check_usable()
        check_group(color, key)
        transport = self._session.run_collective("split()", lambda: self._split_transport(color, key))
        if transport is None:
            return None
        name = f"{self._session.group}, {color} of split {self._session.numbers.sequence}"
        return Communicator._from_transport(transport, self.timeout, self._make_backend, name)

    def _split_transport(self, color: int | None, key: int) -> Group | None:
        self._begin_making()
        self.transport.made = self.transport.split(color, key, self.timeout)
        return self.transport.made

    def _begin_making(self) -> None:
        """From now on, an exception that ends the present call also ends the group that the call makes."""
        self.transport.made = None
        self._session.making = self._session.mark(), self._end_made

    def _end_made(self, error: BaseException) -> None:
        made = self.transport.made
        if made is not None and self.transport.engine is not None:
            self.transport.engine.give_up(made, error)
        elif made is not None:
            made.abort(str(error))  # on CUDA

    @property
    def address(self) -> str:
        """The address for qccl.join(): "host:port#secret", or "wan://host:port#secret". Over UCX and wan only.

        Every process that knows it can join the group, so keep it secret.
        """
        return self.transport.address

    @guarded
    def shrink(self, timeout: float | None = None) -> Communicator:
        """Collective on the remaining ranks, usually after PeerLost or CollectiveTimeout: make a group of them.

        They keep their order. Any ranks may be lost. The ranks first agree on the members. They wait ``timeout``
        seconds (None: the communicator's) for ranks that have not ended and do not call shrink(). After that such a
        rank counts as lost, and can only return with qccl.join(). Each rank keeps the residuals and momenta of its own
        values; residuals of sums begin at zero. ``calls`` is the largest of all ranks'. This communicator is unusable
        afterwards; communicators that split() made of it are not changed.

        Raises PeerLost on a rank that the others leave out; EngineError for transports other than UCX and wan; and
        CollectiveTimeout if too few ranks answer, because the others might form a group, too. Enough are all ranks that
        have not ended, or more than half of this communicator's, or half with rank 0. After an error shrink() may be
        called again.
        """
        timeout = self.timeout if timeout is None else timeout_of(timeout)
        self._session.check_process()
        if not self.transport.can_regroup:
            raise self.transport.impossible("shrink()")
        self._session.retire()
        self._session.unsettle(self.calls)
        self._begin_making()
        return self._continue_on(*self.transport.regroup(self.calls, timeout, grows=False))

    @guarded
    def grow(self, size: int | None = None, timeout: float | None = None) -> Communicator:
        """Collective, over UCX or wan: make a larger group with the processes that wait in qccl.join().

        The new ranks follow the present ones. Without ``size`` grow() takes the processes that wait now; if there are
        none, it returns this communicator. Otherwise it first waits until there are at least ``size`` ranks, and raises
        CollectiveTimeout after ``timeout`` seconds (None: the communicator's). Calls under way end first. State and
        call numbers continue as with shrink(). A rank that is lost meanwhile is not in the new group. After an error of
        grow() call shrink().
        """
        timeout = self.timeout if timeout is None else timeout_of(timeout)
        size = None if size is None else count_of(size, "size")
        newcomers = self._await_newcomers(size, timeout)
        if not newcomers:
            return self
        self._session.engine.wait_until_idle(timeout)
        self._session.programs.clear()
        self._session.close()
        self._begin_making()
        return self._continue_on(*self.transport.regroup(self.calls, timeout, grows=True))

    def _await_newcomers(self, size: int | None, timeout: float) -> int:
        """Wait until enough processes wait to join. Returns their number."""
        deadline, before = Deadline(timeout), self._session.mark()
        while True:
            note = struct.pack("<q?", self.transport.waiting(), deadline.is_over)
            notes = self._session.run_collective(f"grow(size={size})", partial(self.transport.allgather, note, timeout))
            found = [struct.unpack("<q?", each) for each in notes]
            newcomers: int = sum(count for count, _ in found)
            if size is None or self.size + newcomers >= size:
                return newcomers
            if any(late for _, late in found):
                self._session.settle(before)  # all ranks raise this, and the group remains usable
                raise CollectiveTimeout(
                    f"{newcomers} processes called qccl.join() within {timeout} s, and {self.size} ranks wait for "
                    f"{size - self.size}"
                )
            time.sleep(_NAP_SECONDS)

    def _continue_on(self, transport: Transport, calls: int) -> Communicator:
        """Make the communicator that follows this one, with the state of this rank."""
        comm = Communicator._joined(transport, calls, self.timeout, self._make_backend)
        comm._session.state.carry_over(self._session.state)
        return comm

    @classmethod
    def _joined(
        cls, transport: Transport, calls: int, timeout: float, backend: Callable[[Any], Backend] = HostBackend
    ) -> Communicator:
        """Make a communicator whose next call has the number ``calls``."""
        name = f"{transport.size} ranks from call {calls} on"  # newcomers know these numbers, too
        try:
            comm = cls._from_transport(transport, timeout, backend, name)
            comm._session.numbers.go_on(calls)
        except BaseException as error:
            leave(transport, error)
            raise
        return comm

    def stats(self, *, reset: bool = False) -> Stats:
        """Count the bytes and seconds of this rank's calls, by collective and codec, since the group was made.

        With ``reset`` the next stats() counts from now on. May be called at any time, from any thread, and after a
        failure. ``print(comm.stats())`` prints a table.
        """
        return self._session.statistics.stats(reset=reset)

    def record(self, reason: str = "record() was called") -> GroupRecord:
        """Record the last 1,024 calls of this rank: their arguments, begins and ends, and the ranks they wait for.

        The record's ``as_dict()`` is for a JSON file, which ``qccl-bench explain`` reads with the other ranks' files.
        May be called after a failure.
        """
        return self._session.record(reason)

    @guarded
    def abort(self, reason: str = "abort() was called") -> None:
        """Give up, without waiting for the others.

        On the host they raise PeerLost in their current or next call; on CUDA they reach their deadlines.
        """
        if not self.closed:
            self._session.fail(gave_up(self.rank, reason))

    @guarded
    def close(self) -> None:
        """Release the group, after the last call on every rank. A second call does nothing."""
        self._session.check_thread()
        self._session.programs.clear()
        self._session.close()
        self.transport.close()
