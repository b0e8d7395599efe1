"""Types of the compiled module: operations over raw memory, and the loop that runs them with transfers.

A place is ``(buffer number, byte offset)`` in a Memory. ``dtype_code`` is ``DType.code``. Calling a prepared operation
releases the GIL and allocates nothing. Constructors raise ValueError for what cannot be, calls raise RuntimeError where
a buffer has no address yet.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

#: instruction set of the loops in use, and all that this processor can run, best first (QCCL_ISA chooses another)
isa: str
usable_isas: tuple[str, ...]

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
    """A codec by its C++ name in ``kernels/codecs.h``; ValueError names those that there are."""

    def __init__(self, name: str, bucket: int, seed: int, options: Sequence[int]) -> None: ...
    def wire_nbytes(self, count: int, dtype_code: int) -> int:
        """Bytes of the wire of ``count`` elements."""

class CallbackCodec(Codec):
    """Python functions that are given addresses; what they raise is what the operation raises."""

    def __init__(
        self, encode: Callable[..., None], decode: Callable[..., None], reduce: Callable[..., None]
    ) -> None: ...

class Operation:
    """Something to compute."""

    def __call__(self) -> None: ...

class Encode(Operation):
    """``wire = encode(src)``; index, round and rank key the random numbers, with the memory's call and the seed."""

    def __init__(
        self,
        memory: Memory,
        codec: Codec,
        dtype_code: int,
        src: tuple[int, int],
        wire: tuple[int, int],
        count: int,
        index: int,
        round: int,
        rank: int,
    ) -> None: ...

class Decode(Operation):
    """``dst = decode(wire)``, or ``dst += decode(wire)``; index, round and rank are those of the wire's Encode."""

    def __init__(
        self,
        memory: Memory,
        codec: Codec,
        dtype_code: int,
        wire: tuple[int, int],
        dst: tuple[int, int],
        count: int,
        accumulate: bool,
        index: int = 0,
        round: int = 0,
        rank: int = 0,
    ) -> None: ...

class Reduce(Operation):
    """Combine ``srcs`` (wires) and ``own`` (values, before ``srcs[own_index]``); ``op`` 0 sum, 1 min, 2 max.

    With ``wire`` the total is encoded there and ``out`` gets its decoded value; otherwise ``out`` gets the total.
    ``own`` and ``out`` may be the same memory. The sources were made by ``source_ranks`` (none given: by rank 0) in
    round ``source_round``. A sparse codec has no op but 0. ``residual`` and ``momentum`` are where floats that last are
    read and written (schedule.State). One object may not run in two threads at once.
    """

    def __init__(
        self,
        memory: Memory,
        codec: Codec,
        dtype_code: int,
        srcs: Sequence[tuple[int, int]],
        own: tuple[int, int] | None,
        own_index: int,
        wire: tuple[int, int] | None,
        out: tuple[int, int] | None,
        count: int,
        op: int,
        scale: float,
        index: int,
        round: int,
        rank: int,
        source_ranks: Sequence[int] = (),
        source_round: int = 0,
        residual: tuple[tuple[int, int], tuple[int, int]] | None = None,
        momentum: tuple[tuple[int, int], tuple[int, int]] | None = None,
        mu: float = 0.0,
    ) -> None: ...

class Commit(Operation):
    """Copy ``(from, to, bytes)`` if all of ``guard``, ``(dtype_code, place, count)``, is finite; otherwise nothing."""

    def __init__(
        self,
        memory: Memory,
        guard: Sequence[tuple[int, tuple[int, int], int]],
        copies: Sequence[tuple[tuple[int, int], tuple[int, int], int]],
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
    def device_type(self) -> int: ...
    @property
    def device_id(self) -> int: ...
    @property
    def readonly(self) -> bool: ...

def describe(array: object) -> View:
    """The memory of anything with ``__dlpack__`` or the buffer protocol; TypeError where it gives no access."""

def memcpy(dst: int, src: int, nbytes: int) -> None:
    """Copy between addresses, without the GIL; the two may not overlap."""

#: bytes of a control message, and its tag
HEADER_NBYTES: int
CONTROL_TAG: int
#: runs that may have messages under way at once, so that their tags differ
RUNS_IN_FLIGHT: int
TAGS_PER_RUN: int

class Wire:
    """Transfers between ranks, as the loop asks for them."""

class PythonWire(Wire):
    """Those of a transport (transports.base.Transport) that is written in Python."""

    def __init__(self, transport: object) -> None: ...

class MpiWire(Wire):
    """Those of an MPI library, by the addresses of its functions; tokens come back from ``poll``.

    ``fault(code, peer, got, expected)`` raises: an error of the library's (``code``), a message of the wrong size
    (``peer``), or with neither that MPI has ended. ``spins``: polls without news in which the processor is kept; 0
    yields it at once. One thread at a time may use it.
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
    def send(self, peer: int, tag: int, address: int, nbytes: int, token: int, /) -> None: ...
    def receive(self, peer: int, tag: int, address: int, nbytes: int, token: int, at_most: bool, /) -> None: ...
    def poll(self, idle: int, /) -> list[int]: ...
    def cancel(self) -> None: ...

class Steps:
    """A schedule made ready: operations and transfers in program order, and what waits for what (``needs``).

    ``link()`` ends it. ``most_eager``: bytes of data that may go with a header. ``nbytes``: of memory, when linked.
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
    def place(self, step: int, address: int) -> None:
        """Take what a send sends from ``address``, from the next run on; not for what goes with headers."""

    def link(self) -> None: ...
    def transfer(self, step: int, /) -> tuple[bool, int] | None:
        """Of a transfer: whether it is a send, and the other rank."""

class Run:
    """One run of Steps at a time."""

    def __init__(self, steps: Steps) -> None: ...
    def data_nbytes(self, peer: int) -> int:
        """Of the data that may come with ``peer``'s header."""

    def unheard(self) -> list[int]:
        """The ranks whose header has not come."""

    def waits_for(self, is_send: bool) -> list[int]:
        """The ranks of sends, or receives, under way."""

    def trace(self) -> list[tuple[int, float, float]]:
        """Step, start and end, in time.perf_counter() seconds."""

class Outcome(Enum):
    """How a turn of the loop ended: for nothing, with a run past its deadline, or with a run that has ended."""

    PAUSE = 0
    OVERDUE = 1
    ENDED = 2

class Loop:
    """Advances all runs of a transport together, one thread at a time.

    ``call`` is how the headers of calls begin. ``unusual(peer, message)`` is called for any control message that is not
    the header of a call as this rank makes it, or will make it; it raises, unless that is no failure.
    """

    def __init__(self, wire: Wire, rank: int, size: int, most_eager: int, call: bytes) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def early(self) -> int:
        """Headers of calls that this rank has not made yet."""

    def begin(
        self,
        run: Run,
        headers: Sequence[bytes],
        sequence: int,
        deadline: float,
        traced: bool,
        unusual: Callable[[int, bytes], None],
        /,
    ) -> None:
        """Begin a run; ``headers`` are one for all ranks, or one for each."""

    def run(self, limit: float, unusual: Callable[[int, bytes], None], /) -> Outcome:
        """Advance until a run has ended, or ``limit``; signal handlers run meanwhile."""

    def drive(self, unusual: Callable[[int, bytes], None], /) -> Outcome:
        """Advance until a run has ended, or somebody wants to take over."""

    def step(self, unusual: Callable[[int, bytes], None], /) -> Outcome:
        """Run one operation at most, and poll once."""

    def take_ended(self) -> list[int]:
        """The sequence numbers of the runs that have ended since the last time."""

    @property
    def overdue(self) -> int:
        """The sequence number of the run for which a turn ended with Outcome.OVERDUE."""

    def want(self, callers: int, /) -> None:
        """So many more, or fewer, threads want to take over; any thread may say so."""

    @property
    def wanted(self) -> int: ...
    def halt(self) -> None:
        """End all turns, now and later; any thread may say so."""

    @property
    def halted(self) -> bool: ...
    def tell(self, message: bytes, /) -> None:
        """Start sending a control message to all other ranks, at most once."""

    @property
    def telling(self) -> int:
        """Sends of that under way."""

    def drain(self, idle: int, unusual: Callable[[int, bytes], None], /) -> None:
        """Poll, when no run counts any more."""
