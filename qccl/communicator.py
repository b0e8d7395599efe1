"""The communicator: checks the arguments once, finds or makes the plan, runs it, and turns faults into errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from qccl.arguments import CodecLike, check_group, check_trace, count_of, timeout_of
from qccl.arrays import Values
from qccl.calls import Collectives, Run
from qccl.codecs.base import Codec
from qccl.collectives import CollectiveSpec, HierarchicalSpec, spec_of_plan
from qccl.dtypes import DTypeLike
from qccl.engine.base import Backend, Program
from qccl.engine.control import Header, Kind
from qccl.errors import ArgumentError, PeerLost, QcclError, gave_up
from qccl.host import HostBackend
from qccl.plan import Plan, PlanCache
from qccl.state import StateStore, check_key
from qccl.work import Work

if TYPE_CHECKING:
    from qccl.cuda.nccl import NcclTransport
    from qccl.schedule import Schedule
    from qccl.trace import TraceEvent
    from qccl.transports.base import Group

__all__ = ["Communicator"]

#: more than will ever be made; the number of a call has 64 bits
_CALLS = 1 << 63

_T = TypeVar("_T")


class Communicator(Collectives):
    """A group of ranks and the collectives among them.

    Ranks must call the same collectives in the same order; one thread at a time may use a communicator. On the host
    every call is checked among the ranks, and no result is written before they agree; on CUDA the first call of each
    kind is. Calls under way on one communicator wait for each other where they use the same memory; nothing orders them
    with calls on another communicator (of split(), for example): there, wait for one before starting the other. After a
    failure in the middle of a call the communicator is unusable and every further call raises that failure again.

    Attributes:
        rank: number of this process in the group, from 0 on.
        size: number of ranks in the group.
        local_rank: number among the ranks of the same machine.
        local_size: number of ranks on the same machine.
        nodes: of each rank, the number of its machine.
        backend: "host" or "cuda".
        transport: carries the bytes; its ``name`` is "mpi", "torch", "loopback" or "nccl"; the rest is for engines.
        timeout: seconds until a call that does not finish raises CollectiveTimeout.
    """

    def __init__(
        self, unique_id: bytes, rank: int, size: int, *, timeout: float = 60.0, device: int | None = None
    ) -> None:
        """Collective, on CUDA: ``unique_id`` is what get_unique_id() gave on one rank, the same on all.

        ``device`` is the GPU of this rank; None means the current one. Programs that a launcher started use qccl.init()
        instead.
        """
        from qccl.cuda import CudaBackend
        from qccl.cuda.nccl import NcclTransport

        timeout = timeout_of(timeout)
        self._set_up(NcclTransport.from_unique_id(unique_id, rank, size, device, timeout), timeout, CudaBackend)

    def _set_up(self, transport: Group, timeout: float, backend: Callable[[Any], Backend]) -> None:
        made = backend(transport)
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = transport.local_rank, transport.local_size
        self.nodes = transport.nodes
        self.backend = made.name
        self.timeout = timeout
        self.transport = transport
        self._engine, self._memory = made.engine, made.memory
        self._make_backend = backend
        self._plans = PlanCache()
        self._state = StateStore(self.rank, self.size, self._engine.persistent)
        self._sequence = 0  # of calls
        self._calls = 0  # of those that may draw random numbers: a barrier more changes no result
        self._skipped = 0  # of their numbers, in load_state_dict()
        self._failure: QcclError | None = None
        self._closed = False

    @classmethod
    def _from_transport(
        cls, transport: Group, timeout: float = 60.0, backend: Callable[[Any], Backend] = HostBackend
    ) -> Communicator:
        """A communicator over any transport (of the kind that the backend takes)."""
        comm = cls.__new__(cls)
        comm._set_up(transport, timeout, backend)
        return comm

    @classmethod
    def from_mpi(
        cls, comm: Any, timeout: float = 60.0, *, backend: str = "host", device: int | None = None
    ) -> Communicator:
        """Collective: the ranks of an mpi4py communicator, which is duplicated and left as it was.

        With ``backend="cuda"`` MPI brings the ranks together, and carries what ``inter="host"`` sends through it;
        ``device`` is as in qccl.init(). Raises ArgumentError where MPI has one rank only and the launcher started
        more, unless ``comm`` is MPI.COMM_SELF.
        """
        from qccl.transports.mpi import MpiTransport

        if backend not in ("host", "cuda"):
            raise ArgumentError(f'backend {backend!r} does not exist; there are "host" and "cuda"')
        timeout = timeout_of(timeout)
        transport = MpiTransport.from_mpi(comm, timeout)
        if backend == "host":
            return cls._from_transport(transport, timeout)
        try:
            return cls._on_cuda(lambda nccl: nccl.from_group(transport, device, timeout), timeout)
        except BaseException:
            transport.close()
            raise

    @classmethod
    def from_nccl(cls, comm: Any, rank: int, size: int, timeout: float = 60.0) -> Communicator:
        """Collective: the ranks and GPUs of an NCCL communicator: a NcclCommunicator of CuPy, or an ncclComm_t as int.

        It is used to bring the ranks together, and left as it was.
        """
        timeout = timeout_of(timeout)
        return cls._on_cuda(lambda nccl: nccl.from_nccl(comm, rank, size, timeout), timeout)

    @classmethod
    def from_torch(cls, group: Any = None, timeout: float = 60.0) -> Communicator:
        """Collective: the ranks of a torch.distributed process group (None: the default one).

        If it has NCCL they work on their current devices, if it has only gloo on host memory. The group brings the
        ranks together, and is left as it was.
        """
        from qccl.transports.torch import TorchTransport, backend_of

        timeout = timeout_of(timeout)
        if "nccl" in backend_of(group):
            return cls._on_cuda(lambda nccl: nccl.from_torch(group, timeout), timeout)
        return cls._from_transport(TorchTransport.from_group(group, timeout), timeout)

    @classmethod
    def _on_cuda(cls, make: Callable[[type[NcclTransport]], NcclTransport], timeout: float) -> Communicator:
        from qccl.cuda import CudaBackend
        from qccl.cuda.nccl import NcclTransport

        return cls._from_transport(make(NcclTransport), timeout, CudaBackend)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._failure else self.transport.name
        return f"<Communicator rank {self.rank} of {self.size}, {state}>"

    # -- collectives -------------------------------------------------------------------------------------------------

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
        """Collective: a plan of one collective, such as "allreduce", for a vector of ``count`` elements.

        ``dtype`` is a name, NCCL's number, or a type of NumPy, torch or JAX (such as ``x.dtype``). ``parameters`` are
        those of the collective's method ("op", "algorithm", ...).
        """
        self._check_usable()
        if collective == HierarchicalSpec.name:
            parameters = {"node_ids": self.nodes, **parameters}
        spec = spec_of_plan(collective, count, dtype, codec, chunk, parameters)
        check_key(spec.codec, key)
        return Plan(self, spec, key)

    def barrier(self) -> None:
        """Return when every rank has called barrier()."""
        self._together("barrier()", lambda: None)

    def allgather(self, item: bytes) -> list[bytes]:
        """Every rank's ``item`` in rank order; for set-up, not for speed."""
        if not isinstance(item, bytes):
            raise ArgumentError(f"an item of allgather() must be bytes, not {type(item).__name__}")
        return self._together("allgather()", lambda: self.transport.allgather(item, self.timeout))

    def check(self, stream: int | None = None, timeout: float | None = None) -> None:
        """Raise what went wrong so far.

        On CUDA it first waits until all calls are done, and everything on ``stream`` if given (such as the replays of a
        graph that has calls in it): then their results are known to be good. ``timeout``: the communicator's.
        """
        self._check_usable()
        timeout = self.timeout if timeout is None else timeout_of(timeout)
        try:
            self._engine.check(timeout, stream)
        except QcclError as error:
            self._fail(error)
            raise

    # -- what lasts from call to call --------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """How many collectives were started; after a failure, how many ended well.

        That is the number of the next one, and keys its random numbers.
        """
        return self._calls

    def state_dict(self) -> dict[str, Any]:
        """All that the results of later calls depend on, of this rank and communicator; waits for calls under way.

        Under "keys" is what stateful codecs keep, by key, as copies in NumPy arrays; under "calls" the number of the
        next call. It can be taken after a failure too, and then is that of the last calls that ended well.
        """
        self._engine.settle(self.timeout)
        return {"calls": self._calls, "keys": self._state.save()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Put back what state_dict() returned on this rank of a group of this size, for all keys; all ranks must.

        Later calls then give what they would have given there, to the bit. Raises ArgumentError for anything else, and
        then changes nothing.
        """
        self._check_usable()
        if not isinstance(saved, Mapping) or set(saved) != {"calls", "keys"}:
            found = f"one with {list(saved)}" if isinstance(saved, Mapping) else type(saved).__name__
            raise ArgumentError(f'a state is the dict that state_dict() returned, with "calls" and "keys", not {found}')
        calls = count_of(saved["calls"], 'the state\'s "calls"')
        if calls >= _CALLS:
            raise ArgumentError(f'the state\'s "calls" must be a number of calls, less than 2**63, not {calls}')
        self._engine.settle(self.timeout)
        self._state.load(saved["keys"])
        self._skipped += calls - self._calls
        self._calls = calls
        self._plans.clear()  # those on CUDA agreed on the old numbers

    def reset(self, key: str | None = None) -> None:
        """Forget what stateful codecs keep under ``key`` (None: under all keys); all ranks should."""
        self._engine.settle(self.timeout)
        self._state.reset(key)

    # -- groups and the end ------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective: a communicator of the ranks with this ``color``, ordered by (key, rank); None: in no group."""
        self._check_usable()
        check_group(color, key)
        transport = self._together("split()", lambda: self.transport.split(color, key, self.timeout))
        if transport is None:
            return None
        return Communicator._from_transport(transport, self.timeout, self._make_backend)

    def abort(self, reason: str = "abort() was called") -> None:
        """Give up at once, without the other ranks: they raise PeerLost in the call they are in or make next."""
        if not self._closed and self._failure is None:
            self._fail(PeerLost(f"rank {self.rank} gave up: {reason}"))

    def close(self) -> None:
        """Release the group, after the last call on every rank. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._plans.clear()
        if self._failure is None:
            self._engine.close(self.timeout)
            self.transport.close()

    # -- how a call runs ---------------------------------------------------------------------------------------------

    def _run(self, spec: CollectiveSpec, arrays: Mapping[str, Values], result: Any, how: Run) -> Any:
        """One call of a collective: its result, or its Work."""
        self._check_usable()
        if how.nonfinite not in ("propagate", "error"):
            raise ArgumentError(f'nonfinite={how.nonfinite!r} is not "propagate" or "error"')
        timeout = None if how.timeout is None else timeout_of(how.timeout)
        check_trace(how.trace)
        spec.check_counts(arrays, self.rank, self.size)
        check_key(spec.codec, how.key)
        if how.async_op:
            self._memory.hold(arrays.values())
        own = self._own_input(spec, arrays) if how.nonfinite == "error" else ""
        plan = self._plans.take(self, spec)._bind_values(arrays, result, how.key)
        work = plan._start(stream=how.stream, timeout=timeout, trace=how.trace, lr=how.lr)
        work._when_reusable(lambda: self._plans.give_back(plan))
        if how.nonfinite == "error":
            outputs = [values for name, values in arrays.items() if name.startswith("output")]
            work._check_result(lambda: self._refuse_nonfinite(outputs, own))
        if not how.async_op:
            return work.wait()
        work._detach(at_once=True)
        return work

    def _together(self, what: str, act: Callable[[], _T]) -> _T:
        """A collective of the set-up kind, as one of the group's calls; once all ranks have come, ``act`` is done."""
        self._check_usable()
        header = Header(Kind.CALL, self._sequence, what)
        self._sequence += 1
        try:
            self._engine.meet(header, self.timeout)
            return act()
        except BaseException as error:  # Ctrl-C, too: the others would wait
            self._fail(gave_up(self.rank, error))
            raise

    def _launch(
        self,
        program: Program,
        text: str,
        pairs: tuple[str, ...],
        addresses: dict[str, int],
        result: Any,
        *,
        keep: Any,
        streams: tuple[int, ...],
        timeout: float | None,
        trace: list[TraceEvent] | None,
        schedule: Schedule | None,
        lr: float | None,
    ) -> Work:
        """Start a program on this communicator's next sequence number; ``text`` and ``pairs`` are those of Header."""
        self._check_usable()
        execution = program.start(
            addresses,
            call=self._calls,
            header=Header(Kind.CALL, self._sequence, text, pairs),
            deadline=time.monotonic() + (self.timeout if timeout is None else timeout),
            trace=trace,
            schedule=schedule,
            streams=streams,
            lr=1.0 if lr is None else lr,
        )
        work = Work(self, self._calls, execution, result, keep)
        self._sequence += 1
        self._calls += 1
        return work

    def _numbered(self, text: str, codec: Codec) -> str:
        """What the ranks agree on, with how calls are numbered where they may differ in that and it matters."""
        return f"{text}, {self._skipped:+} calls" if self._skipped and codec.kernel().draws else text

    def _agree(self, text: str, pairs: tuple[str, ...]) -> None:
        """Collective where the engine does not check every call: whether all ranks want this plan."""
        try:
            self._engine.agree(Header(Kind.CALL, self._sequence, text, pairs), self.timeout)
        except QcclError as error:
            self._fail(error)
            raise

    def _own_input(self, spec: CollectiveSpec, arrays: Mapping[str, Values]) -> str:
        """The part of _refuse_nonfinite()'s message about this rank's input, made before the call may overwrite it.

        It is "" while other calls are under way, which may be writing the input, and on CUDA, where the host would have
        to wait for it.
        """
        if not self._engine.is_idle:
            return ""
        names = [name for name in spec.counts(self.rank, self.size) if name.startswith("input")]
        for values in (arrays[name] for name in names):
            first = self._memory.first_nonfinite(values)
            if first is not None:
                return f"; before the call, element {first} of {values.what} of rank {self.rank} was not finite"
        return f"; before the call, the input of rank {self.rank} was finite" if names else ""

    def _refuse_nonfinite(self, outputs: Iterable[Values], own: str) -> None:
        """Raise ArgumentError where values are not all finite; on every rank, as their values are the same."""
        for values in outputs:
            first = self._memory.first_nonfinite(values)
            if first is not None:
                raise ArgumentError(
                    f"the result is not finite at element {first} of {values.what} (and perhaps later: one input that "
                    f"is not finite spoils its whole bucket, and a sum may overflow){own}. The call has written the "
                    f'output; nonfinite="error" requests this error'
                )

    def _fail(self, error: QcclError, call: int | None = None) -> None:
        """Remember the first failure, in this call or outside any, and let the other ranks know."""
        if call is not None:
            self._calls = min(self._calls, call)  # not all ranks have made it
        if self._failure is None:
            self._failure = error
            self._engine.abort(str(error))

    def _check_usable(self) -> None:
        if self._closed:
            raise ArgumentError("this communicator is closed; make another with qccl.init()")
        if self._failure is None and self._engine.failure is not None:
            self._failure = self._engine.failure
        if self._failure is not None:
            error = type(self._failure)(f"this communicator failed earlier and is unusable: {self._failure}")
            raise error from self._failure
