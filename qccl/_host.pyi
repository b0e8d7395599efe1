"""Types of the compiled module: operations over raw memory, and the loop that runs them with transfers.

Buffers are ``(buffer number, byte offset)`` in a Memory. ``dtype_code`` is ``DType.code``. Calling a prepared operation
releases the GIL and allocates nothing. Constructors raise ValueError for what cannot be, calls raise RuntimeError where
a buffer has no address yet.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

#: instruction set of the loops in use, and all that this processor can run, best first (QCCL_ISA chooses another)
isa: str
usable_isas: tuple[str, ...]

_Ref = tuple[int, int]

def most_threads() -> int:
    """Threads that an operation may have, by OMP_NUM_THREADS and this process's processors; 1 without OpenMP."""

class Memory:
    """The base addresses of a program's buffers, shared by its operations; storing one rebinds the buffer."""

    call: int
    lr: float
    threads: int
    def __init__(self, buffers: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, buffer: int, /) -> int: ...
    def __setitem__(self, buffer: int, address: int, /) -> None: ...

class Codec:
    """A codec's loops with its parameters."""

class CompiledCodec(Codec):
    """A codec by its C++ name in ``kernels/codecs.h``; ValueError lists the names."""

    def __init__(self, name: str, bucket: int, seed: int, options: Sequence[int]) -> None: ...
    def wire_nbytes(self, count: int, dtype_code: int) -> int:
        """Bytes of the wire of ``count`` elements."""

class CallbackCodec(Codec):
    """A codec of Python functions of addresses; the operation raises what they raise."""

    def __init__(
        self, encode: Callable[..., None], decode: Callable[..., None], reduce: Callable[..., None]
    ) -> None: ...

class Operation:
    """A prepared computation."""

    def __call__(self) -> None: ...

class Encode(Operation):
    """``wire = encode(src)``; index, round and rank key the random numbers, with the memory's call and the seed."""

    def __init__(
        self, memory: Memory, codec: Codec, dtype_code: int, src: _Ref, wire: _Ref, count: int,
        index: int, round: int, rank: int,
    ) -> None: ...  # fmt: skip

class Decode(Operation):
    """``dst = decode(wire)``, or ``dst += decode(wire)``; index, round and rank are those of the wire's Encode."""

    def __init__(
        self, memory: Memory, codec: Codec, dtype_code: int, wire: _Ref, dst: _Ref, count: int, accumulate: bool,
        index: int = 0, round: int = 0, rank: int = 0,
    ) -> None: ...  # fmt: skip

class Reduce(Operation):
    """Combine ``srcs`` (wires) and ``own`` (values, before ``srcs[own_index]``); ``op`` 0 sum, 1 min, 2 max.

    With ``wire`` the total is encoded there and ``out`` gets its decoded value; otherwise ``out`` gets the total.
    ``own`` and ``out`` may be the same memory. ``source_ranks`` (empty: all 0) encoded the sources in round
    ``source_round``. A sparse codec allows op 0 only. ``residual`` and ``momentum`` are the buffers of the old and the
    new state (schedule.State). One object may not run in two threads at once.
    """

    def __init__(
        self, memory: Memory, codec: Codec, dtype_code: int, srcs: Sequence[_Ref], own: _Ref | None, own_index: int,
        wire: _Ref | None, out: _Ref | None, count: int, op: int, scale: float, index: int, round: int, rank: int,
        source_ranks: Sequence[int] = (), source_round: int = 0, residual: tuple[_Ref, _Ref] | None = None,
        momentum: tuple[_Ref, _Ref] | None = None, mu: float = 0.0,
    ) -> None: ...  # fmt: skip

class Commit(Operation):
    """Copy ``(from, to, bytes)`` if all of ``guard``, ``(dtype_code, buffer, count)``, is finite; otherwise nothing."""

    def __init__(
        self, memory: Memory, guard: Sequence[tuple[int, _Ref, int]], copies: Sequence[tuple[_Ref, _Ref, int]]
    ) -> None: ...

class View:
    """The memory of an array, which it keeps alive; ``strides`` in elements, ``device_type`` is DLPack's (1: host)."""

    @property
    def address(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def form(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """``dtype``, ``shape`` and ``strides``."""

    @property
    def device_type(self) -> int: ...
    @property
    def device_id(self) -> int: ...
    @property
    def readonly(self) -> bool: ...

def describe(array: object, stream: int | None = None) -> View:
    """The memory of an object with ``__dlpack__`` or the buffer protocol; TypeError if it gives no access.

    With a ``stream`` (as DLPack counts) the object must have ``__dlpack__``, whose errors are raised as they are; a
    GPU's library puts the array's work so far before that stream, unless it is -1.
    """

class CallTable:
    """What earlier calls with equal arguments have proved: a payload, by the forms of arrays and by options.

    Options are texts, numbers, booleans, None, or instances of the type ``constant``, which never change and equal only
    themselves. Calls with other options, or with arrays that ``describe`` refuses, are neither added nor found.
    Addresses are not compared.
    """

    def __init__(self, constant: type, describe: Callable[[Any], View | None] | None = None) -> None:
        """``describe`` makes the view of an array, or None to refuse it; without it, this module's describe() does."""

    def add(
        self,
        arrays: tuple[object, ...],
        options: tuple[object, ...],
        keywords: Mapping[str, object],
        make: Callable[[], object],
    ) -> None:
        """Add a call, with the payload that ``make()`` returns."""

    def find(
        self, arrays: tuple[object, ...], options: tuple[object, ...], keywords: Mapping[str, object]
    ) -> tuple[Any, list[View]] | None:
        """The payload, and a view of each array that is not None."""

def memcpy(dst: int, src: int, nbytes: int) -> None:
    """Copy between addresses, without the GIL; the two may not overlap."""

#: bytes of a control message, and its tag
HEADER_NBYTES: int
CONTROL_TAG: int
#: runs that may have messages under way at once, so that their tags differ
RUNS_IN_FLIGHT: int
TAGS_PER_RUN: int

class Wire:
    """Transfers between ranks, for the loop; ``poll`` returns the tokens. ``arrived`` is as in Transport."""

    def send(self, peer: int, tag: int, address: int, nbytes: int, token: int, /) -> None: ...
    def receive(self, peer: int, tag: int, address: int, nbytes: int, token: int, arrived: int, /) -> None: ...
    def poll(self, idle: int, /) -> list[int]: ...

class PythonWire(Wire):
    """Transfers of a transport (transports.base.Transport) that is written in Python."""

    def __init__(self, transport: object) -> None: ...

class MpiWire(Wire):
    """Transfers of an MPI library, by the addresses of its functions.

    ``fault(code, peer, got, expected)`` raises an error of the library (``code``), a message of the wrong size
    (``peer``), or, with neither, that MPI was finalized. ``spins``: number of empty polls during which the thread keeps
    the processor; 0: it yields at once. One thread at a time may use it.
    """

    spins: int
    def __init__(
        self,
        functions: Mapping[str, int],
        handles: Mapping[str, bytes],
        constants: Mapping[str, int],
        fault: Callable[[int, int, int, int], None],
    ) -> None: ...
    @property
    def under_way(self) -> int: ...
    def cancel(self) -> None: ...

class UcxWire(Wire):
    """Transfers by UCX, by the addresses of its functions (in the order of function_names()).

    ``config``: UCX's settings by name. ``fault(rank, status, peer, lost, got, expected)`` raises an error of
    UCX (``status``), of the connection to ``peer`` if it is ``lost``, a message of the wrong size, or, without status
    and peer, that the wire is closed. ``spins``: number of empty polls during which the thread keeps the processor; 0:
    it yields. Then it sleeps until a message arrives. Several threads may use it.
    """

    SET_UP: int
    spins: int
    def __init__(
        self,
        functions: Sequence[int],
        config: Sequence[tuple[str, str]],
        fault: Callable[[int, int, int, bool, int, int], None],
    ) -> None: ...
    @staticmethod
    def function_names() -> list[str]: ...
    @property
    def set_up_completed(self) -> int: ...
    def address(self) -> bytes: ...
    def connect(self, rank: int, addresses: Sequence[bytes], ended: Callable[[list[int]], list[int]], /) -> None:
        """Connect a rank to the others. ``ended`` returns those of some ranks whose processes have ended; it is called
        when nothing has completed for two seconds, and then each second.
        """

    def progress(self, idle: int) -> None: ...
    def close(self, seconds: float) -> None: ...

class Steps:
    """A compiled schedule: operations and transfers in program order, each with the earlier steps that it needs.

    Call ``link()`` after the last one. ``most_eager``: bytes of data that may be sent with a header. ``nbytes``: of
    memory, after link().
    """

    @property
    def nbytes(self) -> int: ...
    def __init__(self, rank: int, size: int, most_eager: int) -> None: ...
    def __len__(self) -> int: ...
    def add_operation(self, operation: Operation, needs: Sequence[int], writes_output: bool) -> None:
        """Add a copy of ``operation``."""

    def add_transfer(
        self, is_send: bool, peer: int, tag: int, address: int, nbytes: int, needs: Sequence[int]
    ) -> None: ...
    def set_source(self, step: int, address: int) -> None:
        """Make a send take its bytes from ``address``, from the next run on; not for data that is sent with headers."""

    def link(self) -> None: ...
    def transfer(self, step: int, /) -> tuple[bool, int] | None:
        """Of a transfer: whether it is a send, and the other rank."""

class Run:
    """One run of Steps at a time."""

    def __init__(self, steps: Steps) -> None: ...
    def data_nbytes(self, peer: int) -> int:
        """Bytes of data that ``peer``'s header may bring."""

    def missing_ranks(self) -> list[int]:
        """The ranks whose header has not arrived."""

    def waits_for(self, is_send: bool) -> list[int]:
        """The ranks of sends, or receives, under way."""

    def trace(self) -> list[tuple[int, float, float]]:
        """Step, start and end, in time.perf_counter() seconds."""

class Outcome(Enum):
    """Why a turn of the loop ended: no event, a run past its deadline, or a run that has ended."""

    PAUSE = 0
    OVERDUE = 1
    ENDED = 2

class Loop:
    """Advances all runs of a transport together, one thread at a time.

    ``call`` is the first bytes of every call's header. The loop calls ``on_control(peer, message)`` for a control
    message that is not the header that this rank expects; it raises if the message means a failure. Raises
    MismatchError, which names the rank, for a message that no rank of this version sends.
    """

    def __init__(self, wire: Wire, rank: int, size: int, most_eager: int, call: bytes) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def early(self) -> int:
        """Number of headers of calls that this rank has not made yet."""

    def begin(
        self,
        run: Run,
        headers: bytes | Sequence[bytes],
        sequence: int,
        deadline: float,
        traced: bool,
        on_control: Callable[[int, bytes], None],
        /,
    ) -> bool:
        """Begin a run; ``headers`` are one for all ranks, or one for each. Whether take_ended() has any."""

    def rerun(self, run: Run, sequence: int, deadline: float, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Begin a run again with its last headers and a new number in them, then advance as run() does."""

    def run(self, limit: float, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Advance until a run has ended, or ``limit``; signal handlers run meanwhile."""

    def drive(self, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Advance until a run has ended, or another thread wants to drive."""

    def step(self, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Run at most one operation, and poll once."""

    def take_ended(self) -> list[int]:
        """The sequence numbers of the runs that have ended since the last call."""

    @property
    def overdue(self) -> int:
        """The sequence number of the run that made a turn end with Outcome.OVERDUE."""

    def want(self, callers: int, /) -> None:
        """Change the number of threads that want to drive; any thread may call this."""

    @property
    def wanted(self) -> int: ...
    def halt(self) -> None:
        """End all present and later turns; any thread may call this."""

    @property
    def halted(self) -> bool: ...
    def broadcast_control(self, message: bytes, /) -> None:
        """Start sending a control message to all other ranks, at most once."""

    @property
    def control_sends(self) -> int:
        """Sends of broadcast_control() under way."""

    @property
    def refused(self) -> int:
        """Number of ranks of which nothing more is received, because they sent what no rank of this version sends."""

    def drain(self, idle: int, on_control: Callable[[int, bytes], None], /) -> None:
        """Poll for control messages after the last run."""
