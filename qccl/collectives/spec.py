"""The base of all collectives' specs: the shared parameters, the text that the ranks compare, and checks of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Self

from qccl import codecs
from qccl.base import dtypes
from qccl.base.arrays import Memory, Values, same_or_disjoint
from qccl.base.dtypes import BYTES, DType, DTypeLike
from qccl.base.errors import ArgumentError
from qccl.codecs.base import Codec
from qccl.collectives.arguments import CodecLike, checked_chunk, count_of, integer, one_of, op_of
from qccl.collectives.chunks import NETWORK, ChunkPolicy
from qccl.collectives.operands import CallerBuffers, RankGroup
from qccl.collectives.schedule import Buffer, Role, Schedule

__all__ = ["Binding", "Call", "CollectiveSpec", "check_root", "common_order", "input_and_output"]

#: types whose values never change, and equal only values of their type that mean the same
_PLAIN = frozenset({str, int, bool, type(None)})
#: the names of arrays in messages about raw pointers, which have NCCL's names
_OF_POINTERS = {"x": "sendbuf", "out": "recvbuf", "z": "sendbuf"}


@dataclass(slots=True, kw_only=True)
class Call:
    """A call as the program makes it, before its checks (CollectiveSpec.from_call).

    Attributes:
        memory, rank, size: of the communicator.
        node_ids: the nodes of a hierarchical_allreduce that names none.
        arrays: arrays, or with a ``count`` raw pointers to as many elements each.
        own: the collective's own parameters, by name.
        codecs: the codec; with "auto" the codecs from which the ranks choose.
        dtype: the element type of all arrays; None means the first array's.
    """

    memory: Memory
    rank: int
    size: int
    node_ids: tuple[int, ...]
    arrays: tuple[Any, ...]
    own: dict[str, Any]
    codecs: tuple[CodecLike, ...]
    chunk: int | None
    dtype: DType | str | None
    count: int | None

    def find(self, array: Any, what: str, *, writable: bool = True) -> Values:
        """The memory of one of the arrays, which is named ``what`` in errors. Raises InvalidBufferError."""
        if isinstance(array, codecs.Encoded):
            raise ArgumentError(
                f"{what} is an Encoded, which this call does not take: quantized_all_gather and quantized_all_to_all "
                f"send it as x. Pass its values with codec={array.format!r}, which sums them in fp32"
            )
        if self.count is None:
            found = self.memory.from_array(array, dtype=self.dtype, writable=writable, what=what)
            self.dtype = found.dtype
            return found
        what = _OF_POINTERS.get(what, what)
        return self.memory.from_pointer(array, self.count, dtypes.get(self.dtype), writable=writable, what=what)


def input_and_output(
    find: Callable[..., Values], x: Any, out: Any, *, reads: bool = True, writes: bool = True
) -> dict[str, Values]:
    """The arrays of a call by the names of the schedule's buffers. Without ``out``, ``x`` is the output, too.

    ``find`` is Call.find(); ``reads`` and ``writes``: whether this rank has an input and an output.
    """
    arrays: dict[str, Values] = {}
    if reads:
        arrays["input"] = find(x, "x", writable=writes and out is None)
    if writes and out is not None:
        arrays["output"] = find(out, "out")
    elif writes:
        arrays["output"] = arrays["input"] if reads else find(x, "x")
    return arrays


class Binding(NamedTuple):
    """The facts about a call's arrays that a schedule depends on.

    Attributes:
        in_place: the output is where the input is.
        addresses: of the caller's buffers, by their names in the schedule.
    """

    in_place: bool
    addresses: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec(ABC):
    """The checked arguments of a call: the key of its programs, and the text that the ranks compare.

    A subclass adds its own parameters, and overrides ``from_arguments`` if some of them need checks that are not those
    of their name (``_CHECKS``). The caller's arrays have the names of the schedule's buffers: "input", "output". A
    subclass with other arrays overrides ``named``.

    Attributes:
        count: elements of the whole vector.
        order: the order of the elements in memory (Values.order).
    """

    #: the collective's name, as in Communicator.plan
    name: ClassVar[str]
    #: whether codecs with error feedback or momentum are allowed
    keeps_state: ClassVar[bool] = False
    #: the array whose elements are the whole vector; the first array if this rank lacks it
    whole: ClassVar[str] = "input"
    #: the names of its algorithms, if it has several; then it has a field ``algorithm``, and overrides ``choose``
    algorithms: ClassVar[tuple[str, ...]] = ()

    count: int
    dtype: DType
    codec: Codec
    chunk: int | None
    order: str = "C"

    def __post_init__(self) -> None:
        codec, op = self.codec, getattr(self, "op", "sum")
        if op in ("min", "max") and any(each.plain.sparse for each in codec.rounds):
            raise ArgumentError(
                f"op {op!r} is not possible with {codec.spec()}, which sends only some of the elements; use sum or avg"
            )
        if codec.state_names and not (self.keeps_state and op in ("sum", "avg")):
            call = f"{self.name} with op {op}" if self.keeps_state else self.name
            raise ArgumentError(
                f"{codec.spec()} keeps its {' and '.join(codec.state_names)} from call to call, which {call} does not; "
                f"use {codec.plain.spec()}, or a collective with state: allreduce, hierarchical_allreduce and "
                f"reduce_scatter, with op sum or avg, or peer_exchange"
            )

    @classmethod
    def from_arguments(cls, *shared: Any, **own: Any) -> Self:
        """Check the arguments: ``shared`` are those of checked(). Raises ArgumentError, CodecError."""
        return cls.checked(*shared, **own)

    @classmethod
    def checked(
        cls, count: int, dtype: DTypeLike, codec: CodecLike, chunk: int | None, order: str = "C", **own: Any
    ) -> Self:
        """The spec with these fields; checks the fields that several collectives share."""
        checked = {name: _CHECKS[name](value) if name in _CHECKS else value for name, value in own.items()}
        if cls.algorithms and "algorithm" in own:
            one_of(own["algorithm"], ("auto", *cls.algorithms), "algorithm")
        checked |= {"count": count_of(count), "dtype": dtypes.get(dtype), "codec": codecs.get(codec)}
        return cls(chunk=checked_chunk(chunk), order=order, **checked)

    def algorithm_for(self, size: int) -> str:
        """The algorithm with which ``size`` ranks make the call."""
        named: str = getattr(self, "algorithm", "auto")
        return self.choose(size) if named == "auto" else named

    def choose(self, size: int) -> str:
        """The algorithm that "auto" stands for; all ranks choose alike."""
        raise NotImplementedError

    @classmethod
    def from_call(cls, call: Call) -> tuple[list[Self], dict[str, Values]]:
        """Check a call: its specs, one for each codec, and its arrays by the names of the schedule's buffers.

        Raises ArgumentError, CodecError, InvalidBufferError.
        """
        arrays = cls.named(call)
        whole = arrays[cls.whole] if cls.whole in arrays else next(iter(arrays.values()))
        return cls._with_codecs(call, arrays, whole.count, whole.dtype.name, whole.order), arrays

    @classmethod
    def named(cls, call: Call) -> dict[str, Values]:
        """The arrays of a call by the names of the schedule's buffers; may change ``call.own``."""
        return input_and_output(call.find, *call.arrays)

    @classmethod
    def _with_codecs(cls, call: Call, arrays: dict[str, Values], count: int, dtype: str, order: str) -> list[Self]:
        specs = []
        for codec in call.codecs:
            given = codec, call.chunk, *call.own.values()
            make = _known if all(map(_is_plain, given)) else _known.__wrapped__
            spec = make(cls, count, dtype, codec, call.chunk, order, **call.own)
            spec.fit(arrays, call.rank, call.size)
            specs.append(spec)
        return specs

    def text(self) -> str:
        """The parameters on which all ranks must agree: the ranks compare this text, and messages show it."""
        return f"{self.name}({', '.join([f'{name}={value}' for name, value in self._shown().items()])})"

    def _shown(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["codec"] = codecs.identity(self.codec)
        if self.order == "C":
            del values["order"]
        return values

    def state_owner(self, algorithm: str) -> str:
        """The text that state under a key belongs to: without the chunk size, and with the algorithm "auto" chose."""
        changed = {"chunk": None, "algorithm": algorithm} if hasattr(self, "algorithm") else {"chunk": None}
        return replace(self, **changed).text()

    def pairs(self, rank: int, size: int) -> tuple[str, ...]:
        """For each rank, the text on which this rank and that one must agree beside text(); () for nothing."""
        return ()

    def buffers(self, rank: int, size: int, *, in_place: bool = False) -> CallerBuffers:
        """This rank's buffers; in place, without the buffers that are part of another buffer.

        Raises ArgumentError if ``size`` ranks cannot make the call.
        """
        return CallerBuffers.alike((self.count,), self.dtype, in_place=in_place)

    def arrays_of(self, role: Role, arrays: Mapping[str, Values], rank: int, size: int) -> list[Values]:
        """The arrays of a call that it reads (Role.INPUT), or those that it writes (Role.OUTPUT)."""
        return [arrays[name] for name, buffer in _declared(self, rank, size).items() if buffer.role is role]

    def fit(self, arrays: dict[str, Values], rank: int, size: int) -> None:
        """Raise ArgumentError if an array does not have the number of elements that the call needs.

        An output that is the whole input becomes the part of the input that receives the result.
        """
        for name, buffer in _declared(self, rank, size).items():
            values, unit = arrays[name], "bytes" if arrays[name].dtype is BYTES else "elements"
            count = buffer.nbytes // values.dtype.itemsize
            if values.count != count:
                has = f"{values.what} has {values.count} {unit}"
                other = arrays.get({"input": "output", "output": "input"}.get(name, ""), values)
                if other.count == count:
                    raise ArgumentError(f"{other.what} has {count} {unit}, and {has}; they must be equal")
                beside = "" if other is values else f"; {other.what} has {other.count}"
                raise ArgumentError(
                    f"{has}, and {self.name} of {self.count} elements on {size} ranks needs {count} on rank "
                    f"{rank}{beside}"
                )

    def order_of(self, arrays: Mapping[str, Values]) -> str:
        """The order of the arrays' elements in memory. Raises ArgumentError if the arrays differ in it."""
        return common_order(arrays)

    def bind(self, arrays: Mapping[str, Values], rank: int, size: int) -> Binding:
        """Check how the arrays lie in memory.

        Raises InvalidBufferError if arrays overlap in a way that is not allowed.
        """
        if len(arrays) == 1:  # a rank other than the root
            ((name, values),) = arrays.items()
            return Binding(name == "output", {name: values.address})
        source, target = arrays["input"], arrays["output"]
        if source is target or same_or_disjoint(source, target):
            return Binding(True, {"output": target.address})
        return Binding(False, {"input": source.address, "output": target.address})

    def schedule(self, rank: int, size: int, *, in_place: bool, chunking: ChunkPolicy = NETWORK) -> Schedule:
        """The schedule of one rank; a caller's chunk size takes the place of the one of ``chunking``."""
        own = chunking if self.chunk is None else chunking.with_chunk(self.chunk, size, self.codec)
        return self._schedule(RankGroup.of_all(rank, size), self.buffers(rank, size, in_place=in_place), own)

    @abstractmethod
    def _schedule(self, group: RankGroup, buffers: CallerBuffers, chunking: ChunkPolicy) -> Schedule:
        """The schedule of the group's rank, on its buffers."""


@lru_cache(512)
def _declared(spec: CollectiveSpec, rank: int, size: int) -> Mapping[str, Buffer]:
    """The buffers of a call that is not in place."""
    return spec.buffers(rank, size).declared


@lru_cache(4096, typed=True)
def _known(kind: Any, *shared: Any, **own: Any) -> Any:
    """The spec of these arguments, which must be plain; equal ones are checked once."""
    return kind.from_arguments(*shared, **own)


def _is_plain(value: Any) -> bool:
    """Whether a value never changes, and equals only values of its type that mean the same."""
    if type(value) is tuple:
        return all(type(each) is int for each in value)
    return type(value) in _PLAIN or isinstance(value, Codec)


#: checks of parameters that several collectives have
_CHECKS: dict[str, Callable[[Any], Any]] = {"op": op_of, "root": partial(integer, what="root"), "each": tuple}


def check_root(root: int, size: int) -> None:
    """Raise ArgumentError unless ``root`` is a rank."""
    if not 0 <= root < size:
        raise ArgumentError(f"root={root} is not a rank of this communicator; ranks are 0 to {size - 1}")


def common_order(arrays: Mapping[str, Values]) -> str:
    """The order of all arrays. Raises ArgumentError if they differ in it."""
    first, *others = arrays.values()
    order = first.order
    for other in others:
        if other is not first and other.order != order:
            raise ArgumentError(
                f"{first.what} and {other.what} lie differently in memory (shape, strides in elements): "
                f"{first.shape_and_strides} and {other.shape_and_strides}; pass arrays of one shape and one order of "
                f"axes"
            )
    return order
