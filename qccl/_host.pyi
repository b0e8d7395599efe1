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

def orthonormal_rows(given: int, out: int, rows: int, columns: int, seed: int) -> None:
    """Orthonormal rows that span the given ones (qccl.torch.factors), at addresses of float32."""

def outer_sum(p: int, q: int, out: int, rank: int, rows: int, columns: int, threads: int) -> None:
    """``out`` (rows x columns) = ``p`` (rows x rank) times ``q`` (rank x columns), at addresses of float32."""

class Memory:
    """The base addresses of a program's buffers, shared by its operations; storing one rebinds the buffer."""

    call: int
    lr: float
    threads: int
    def __init__(self, buffers: int) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, buffer: int, /) -> int: ...
    def __setitem__(self, buffer: int, address: int, /) -> None: ...
    def add_caller(self, buffer: int, nbytes: int, is_written: bool) -> None:
        """Say that the caller gives the buffer's address for each run."""

    def conflicts(self, other: Memory) -> bool:
        """Whether one of two runs with these memories writes memory of the caller that both use."""

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
        momentum: tuple[_Ref, _Ref] | None = None, mu: float = 0.0, beta: float = 1.0, residual_dtype: int = 0,
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
    """What earlier calls with equal arguments have proved: a payload, by name, options, addresses and forms of arrays.

    An array may also be a raw address, if it is an int and no other integer. Options are texts, numbers, booleans,
    None, lists and tuples of these, or instances of the type ``constant``, which never change and equal only
    themselves. Calls with other options, or with arrays that ``describe`` refuses, are neither added nor found.
    """

    def __init__(self, constant: type, describe: Callable[[Any], View | None] | None = None) -> None:
        """``describe`` makes the view of an array, or None to refuse it; without it, this module's describe() does."""

    def add(
        self,
        name: str,
        arrays: tuple[object, ...],
        options: tuple[object, ...],
        keywords: Mapping[str, object],
        make: Callable[[], object],
    ) -> None:
        """Add a call, with the payload that ``make()`` returns."""

    def find(
        self, name: str, arrays: tuple[object, ...], options: tuple[object, ...], keywords: Mapping[str, object]
    ) -> tuple[Any, list[Any]] | None:
        """The payload, and a view of each array that is not None (or itself: raw addresses, NumPy's arrays)."""

    def clear(self) -> None:
        """Forget all calls."""

def may_access(address: int, nbytes: int, writes: bool) -> bool:
    """Whether so many bytes (at least one) may be read, or written; asks the kernel. No value changes. Linux only."""

def forget_mappings() -> None:
    """Forget which pages may_access() has looked up."""

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
    (``peer``), or, with neither, that MPI was finalized. One thread at a time may use
    it.
    """

    def __init__(
        self,
        functions: Mapping[str, int],
        handles: Mapping[str, bytes],
        constants: Mapping[str, int],
        fault: Callable[[int, int, int, int], None],
    ) -> None: ...
    def set_spins(self, spins: int) -> None:
        """The number of empty polls during which the thread keeps the processor; 0, at first: it yields at once."""

    @property
    def under_way(self) -> int: ...
    def cancel(self) -> None: ...

class GroupWire(Wire):
    """Transfers of a group that connects itself. Several threads may use it."""

    SET_UP: int
    def set_spins(self, spins: int) -> None:
        """The number of empty polls during which a thread keeps the processor; 0, at first: it yields. Then it sleeps
        until a message arrives. A wire between sites sleeps at once.
        """

    @property
    def set_up_completed(self) -> int: ...
    def address(self) -> bytes: ...
    def connect(self, rank: int, addresses: Sequence[bytes], ended: Callable[[list[int]], list[int]], /) -> None:
        """Connect a rank to the others. ``ended`` returns those of some ranks whose processes have ended; it is called
        when nothing has completed for a while, and then each second.
        """

    def progress(self, idle: int) -> None: ...
    def relayed(self) -> list[int]:
        """The ranks whose connections go by a relay."""

    def close(self, seconds: float) -> None: ...

class PartWire(GroupWire):
    """Transfers that may be a part of another wire's."""

class WanWire(PartWire):
    """Transfers between sites."""

    def leave(self, ranks: Sequence[int]) -> None:
        """End the connections to ranks that are reached in another way from now on, when all that was sent has come."""

class MixedWire(GroupWire):
    """Transfers by ``memory`` inside a machine, and by ``sites`` otherwise. All go by ``sites`` until share()."""

    def __init__(self, memory: PartWire, sites: WanWire, descriptor: int) -> None:
        """``descriptor``: of a file that it owns, until share() or close()."""

    def reach(self, addresses: Sequence[bytes]) -> None:
        """Connect ``memory`` to the ranks whose address, by rank, is not empty. Raises RuntimeError."""

    def share(self, ranks: Sequence[int]) -> None:
        """From now on the messages to and from ``ranks`` go by ``memory``. Once, when no transfer is under way."""

#: (rank, status, reason, peer, lost, got, expected): raises an error of the library (``status``), of the connection to
#: ``peer`` if it is ``lost`` (``reason``: in words, if the wire knows it), a message of the wrong size, or, without
#: status and peer, that the wire is closed
_Fault = Callable[[int, int, str, int, bool, int, int], None]

def ucx_function_names() -> list[str]: ...
def ucx_wire(functions: Sequence[int], config: Sequence[tuple[str, str]], fault: _Fault) -> PartWire:
    """By UCX. ``functions``: addresses, in the order of ucx_function_names(); ``config``: settings by name."""

def wan_wire(
    listener: int,
    address: bytes,
    functions: Sequence[int],
    secret: bytes | None,
    congestion_control: str,
    connections: int,
    away_seconds: float,
    fault: _Fault,
    relay: tuple[str, str, bytes, bytes] | None = None,
) -> WanWire:
    """Between sites (kernels/engine/wan.h). ``listener``: a socket's descriptor, which the wire owns. Encrypted with a
    ``secret``, by OpenSSL's ``functions``. ``relay``: its host and port in numbers, the relay key, and a key that the
    relay does not have, from which the names of connections follow; it needs a ``secret``.
    """

class StreamError(ConnectionError):
    """A broken connection, a failed handshake, or bytes that were changed on the way; the text says which."""

class TlsStream:
    """Bytes over one connection by TLS 1.3, with a secret of 32 bytes that both sides have in place of certificates.

    ``functions``: the addresses of OpenSSL's (transports.tls.functions()). The stream owns the socket ``descriptor``
    from the call on, even if it raises. Nothing blocks: wait with select() until the stream, which has a fileno(), can
    be read, or also written if ``wants_write``. One thread at a time may use it. It changes its key after
    ``records_per_key`` records of up to 16 KiB. All methods raise ValueError once it is closed; those that transfer
    raise StreamError, each time again.
    """

    def __init__(
        self,
        functions: Sequence[int],
        secret: bytes,
        descriptor: int,
        is_server: bool,
        records_per_key: int = 1 << 22,
    ) -> None: ...
    @staticmethod
    def function_names() -> list[str]: ...
    def handshake(self) -> bool:
        """Whether both sides have proved that they have the secret; read() and write() wait for that, too."""

    def read(self, nbytes: int) -> bytes | None:
        """The bytes that have come, at most ``nbytes``; b"": the peer has closed in order; None: wait."""

    def write(self, data: bytes) -> int | None:
        """How many bytes were taken; None: wait.

        The next call must begin with the bytes that were not taken, and have no fewer: they may be encrypted already.
        """

    def shut(self) -> None:
        """Tell the peer that nothing more comes; receiving goes on.

        If ``wants_write`` afterwards, the system has not taken the notice yet: call again when the socket is writable.
        """

    def close(self) -> None:
        """Close the socket. Without shut() before, the peer takes the connection to be cut."""

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""

    @property
    def wants_write(self) -> bool:
        """Bytes of the handshake, of the last write(), or of shut() wait for the socket to be writable."""

    @property
    def has_pending(self) -> bool:
        """More has been received than the last read() had room for, which select() may not tell."""

class Steps:
    """A compiled schedule: operations and transfers in program order, each with the earlier steps that it needs.

    Call ``link()`` after the last one. ``most_eager``: bytes of data that may be sent with a header. ``sends_ahead``:
    the ranks for which the transport limits what it keeps until they make the call. ``nbytes``: of memory, after
    link().
    """

    @property
    def nbytes(self) -> int: ...
    def __init__(self, rank: int, size: int, most_eager: int, sends_ahead: Sequence[int] = ()) -> None: ...
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

class Tally:
    """Totals of the calls of one collective with one codec. One thread at a time adds; any thread may read."""

    def add(self, elements: int, raw_nbytes: int, sent_nbytes: int) -> None:
        """Count a call, without times."""

    def totals(self) -> tuple[int, int, int, int, float, float, float, float]:
        """Calls, elements, raw bytes and sent bytes; seconds in all, computing, waiting and hidden."""

class Run:
    """One run of Steps at a time. ``memory`` is that of all their operations."""

    def __init__(self, steps: Steps, memory: Memory) -> None: ...
    def count_in(self, tally: Tally, elements: int, raw_nbytes: int, sent_nbytes: int) -> None:
        """Add each run that ends to a Tally: so many elements and bytes, and its times."""

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

    def start(
        self,
        run: Run,
        headers: bytes | Sequence[bytes] | None,
        sequence: int,
        call: int,
        lr: float | None,
        timeout: float,
        traced: bool,
        waits: bool,
        on_control: Callable[[int, bytes], None],
        /,
    ) -> Outcome:
        """Begin a run; then advance until any run has ended if the caller ``waits``, or else as step() does.

        A run that is alone, and for which nobody waits, is only begun. ``call`` and ``lr`` are for its operations.
        ``timeout``: seconds from now to its deadline.
        ``headers``: one for all ranks, or one for each; None for those of the last run, with a new number in them.
        ENDED: take_ended() has some.
        """

    def records(self) -> list[tuple[int, int, bytes, int, int, float, float, float]]:
        """Of the last 1,024 runs: number, call, header, bytes to send and to receive, begin, end or 0, and the longest
        time in which the loop stood still.
        """

    def under_way(self) -> list[tuple[int, int, int, bool, list[int], list[tuple[bool, int, int, float]]]]:
        """Of each run under way: its number, bytes sent and received, whether an operation is ready, missing ranks.

        And of its transfers under way: whether it is a send, the other rank, bytes, and begin.
        """

    def run(self, limit: float, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Advance until a run has ended, or ``limit``; signal handlers run meanwhile."""

    def drive(self, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Advance until a run has ended, or another thread wants to drive."""

    def step(self, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Run one operation if one is ready, and poll once."""

    def advance_briefly(self, on_control: Callable[[int, bytes], None], /) -> Outcome:
        """Do what can be done now; begin nothing more after 0.1 ms."""

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

class LabNetwork:
    """A model of a network between sites (kernels/lab/network.h): packets go in with times, and come out with times.

    ``sites`` are tuples of bytes per second and the longest wait in seconds, up and down; ``counters`` is the address
    of one structure for each path, and outlives the network.
    """

    def __init__(self, sites: Sequence[tuple[float, float, float, float]], seed: int, counters: int) -> None: ...
    def set_path(self, source: int, to: int, delay: float, jitter: float, loss: float) -> None:
        """Delay and jitter in seconds, and the probability of a loss, of packets from one site to another."""

    def send(self, source: int, to: int, nbytes: int, now: float, tag: int) -> bool:
        """Take a packet of a site; False if it was dropped, and will not come out."""

    def take(self, now: float) -> tuple[int, int, int, float, bool] | None:
        """The next packet that comes out until ``now``: its tag, both sites, when, and whether it has arrived."""

    def next(self) -> float:
        """When take() has something to do; infinite if nothing is under way."""

class LabForwarder:
    """Forwards packets between network interfaces: to the network's sites, and after them to machines outside of it.

    ``lapses`` is an address, and ``grain`` the seconds between two rounds. RuntimeError: an interface cannot be used.
    """

    def __init__(self, interfaces: Sequence[str], network: LabNetwork, lapses: int, grain: float) -> None: ...
    def run(self, stop: int) -> None:
        """Forward until the descriptor ``stop`` can be read or its other end is closed."""

def lab_port_address(port: int) -> bytes:
    """The Ethernet address of what is behind the interface number ``port``."""
