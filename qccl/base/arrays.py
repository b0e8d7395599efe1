"""The caller's arrays as addresses, counts and element types, and the checks that host and GPU have in common."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qccl.base import dtypes
from qccl.base.dtypes import BFLOAT16, BYTES, DType
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.base.scalars import as_integer
from qccl.base.tensors import check_values, is_tensor, storage_of

if TYPE_CHECKING:
    from qccl._host import CallTable

__all__ = ["EXPONENT_BITS", "Form", "Memory", "Pointer", "Values", "check_disjoint", "check_pointer", "check_unmoved"]
__all__ += ["from_view", "is_part_of", "refuse_nonfinite", "same_or_disjoint", "text_about_inputs"]
__all__ += ["unreadable"]

#: the exponent's bits of each element type; all of them are set in NaN and infinite values
EXPONENT_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}

#: types of a raw pointer
Pointer = int | ctypes.c_void_p | ctypes.Array[Any]

_ADDRESSES = 1 << 64

_ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]


class Form(NamedTuple):
    """The facts that follow from an array's element type, shape and strides, the same in every call."""

    dtype: DType
    elements: int
    shape_and_strides: _ShapeAndStrides
    order: str


@dataclass(slots=True, eq=False)  # not frozen: calls make some, and making a frozen one takes four times as long
class Values:
    """``count`` elements of ``dtype`` at ``address``.

    Attributes:
        shape_and_strides: the shape, and strides in elements.
        what: the name of the array in messages, such as "x" or "xs[2]".
        array: the caller's object; None for a raw pointer.
        view: the description of ``array``'s memory.
        owner: keeps the memory alive if the array itself may release it: a tensor's storage, an array of ctypes.
        order: the order of the elements in memory: "C" (row-major), or the axes, slowest first, and the shape.
        writable: whether the call may write the elements.
    """

    address: int
    count: int
    dtype: DType
    shape_and_strides: _ShapeAndStrides
    what: str
    array: Any = None
    view: Any = None
    owner: Any = None
    order: str = "C"
    writable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.dtype.itemsize

    def part(self, first: int, count: int) -> Values:
        """``count`` of the elements (of a row-major array), from ``first`` on."""
        address = self.address + first * self.dtype.itemsize
        return replace(self, address=address, count=count, shape_and_strides=((count,), (1,)))


class Memory(Protocol):
    """The memory that a communicator works on; finds and checks the caller's arrays in it."""

    def call_table(self) -> CallTable:
        """Make a table that describes arrays as from_array() does, and checks the memory of pointers in each call."""

    def from_array(self, array: Any, *, dtype: DType | str | None = None, writable: bool, what: str) -> Values:
        """The memory of ``array``, which is named ``what`` in errors; ``dtype`` reinterprets uint16 as bfloat16.

        Raises InvalidBufferError for another device, strides with gaps, an element type other than float32, float16
        and bfloat16, and for read-only memory if ``writable``.
        """

    def from_pointer(self, pointer: Pointer, count: int, dtype: DType, *, writable: bool, what: str) -> Values:
        """``count`` elements at a raw address. Raises InvalidBufferError for an invalid address.

        On the host, also for read-only memory if ``writable``.
        """

    @property
    def has_streams(self) -> bool:
        """Whether streams() must be asked in each call."""

    def hold(self, values: Iterable[Values]) -> None:
        """Keep the arrays' memory in place for a run during which the caller may use the arrays.

        Raises InvalidBufferError if an array's memory was replaced. On the host PyTorch refuses to resize the tensors
        from then on.
        """

    def recheck(self, tensors: Iterable[tuple[int, Values]], arrays: Sequence[Any], *, hold: bool) -> list[Any]:
        """Check the tensors of a repeated call again; ``tensors`` has each with its position in ``arrays``.

        Equal arguments do not prove that their memory is the same. With ``hold``: as hold(). Returns objects that keep
        the memory alive.
        """

    def streams(self, stream: Any, arrays: Iterable[Any]) -> tuple[int, ...]:
        """The stream of a call on these arrays, and other streams with unfinished work on them; () on the host.

        ``stream`` is the caller's argument, or None. Raises ArgumentError for anything but a stream.
        """

    def is_capturing(self, stream: Any) -> bool:
        """Whether a call would become part of a CUDA graph: on ``stream``, or on a library's current one if None."""

    def first_nonfinite(self, values: Values) -> int | None:
        """Index of the first element that is NaN or infinite, or None. Waits for the values."""


#: element type, shape and strides, as a view gives them
_Described = tuple[str, tuple[int, ...], tuple[int, ...]]


def from_view(view: Any, array: Any, wanted: DType | None, *, writable: bool, what: str) -> Values:
    """Check an array that _host.describe() found in the right memory, as Memory.from_array() says."""
    if is_tensor(array):
        check_values(array, what)
    dtype, count, shape_and_strides, order = _form_of(view.form, wanted, what)
    if writable and view.readonly:
        number = (
            ""
            if shape_and_strides[0]
            else "; it is a single number: where a list of arrays is needed, pass [x] rather than x"
        )
        raise InvalidBufferError(
            f"{what} is read-only, and the result would be written into it; pass a writable array as out= "
            f"(for an immutable framework such as JAX: out=numpy.empty_like(x), then convert){number}"
        )
    address, owner = view.address, None
    if count and not address:
        raise InvalidBufferError(f"{what} has {count} elements but no memory (its address is null); allocate it first")
    if is_tensor(array):
        owner = storage_of(array, address, count * dtype.itemsize, what)
    return Values(address, count, dtype, shape_and_strides, what, array, view, owner, order, writable)


def unreadable(array: Any, what: str, allowed: str, reason: str) -> InvalidBufferError:
    """The error for an array without accessible memory; ``allowed`` names what to pass, ``reason`` is the library's."""
    devices = getattr(getattr(array, "sharding", None), "device_set", ())
    if len(devices) > 1:
        return InvalidBufferError(
            f"{what} is a JAX array on {len(devices)} devices, but a call accepts memory of one device only; pass the "
            f"part on one device, such as {what}.addressable_shards[0].data"
        )
    if isinstance(array, str):
        return InvalidBufferError(
            f"{what} is the text {array!r}; pass {allowed}, and a codec by its name: codec={array!r}"
        )
    return InvalidBufferError(
        f"{what} is of type {type(array).__name__}, which does not give access to its memory ({reason}); pass {allowed}"
    )


def check_unmoved(values: Values) -> None:
    """Raise InvalidBufferError if a tensor's memory was replaced or resized after ``values`` were made."""
    if not values.count or not is_tensor(values.array):
        return
    if values.array.data_ptr() != values.view.address:
        raise InvalidBufferError(
            f"{values.what} has other memory than it had when it was bound: its storage was replaced or resized; call "
            f"plan.bind() again"
        )
    storage_of(values.array, values.view.address, values.nbytes, values.what)


def check_pointer(pointer: Pointer, count: int, dtype: DType, what: str) -> int:
    """The address of ``pointer``. Raises InvalidBufferError if ``count`` elements cannot be there."""
    nbytes = count * dtype.itemsize
    address = _address(pointer, nbytes, what)
    if not (0 <= address < _ADDRESSES and address + nbytes <= _ADDRESSES):
        raise InvalidBufferError(
            f"{what}: {count} elements of {dtype} from {address:#x} do not fit in 64-bit addresses (a wrong pointer, "
            f"or a count too large?)"
        )
    if count > 0:
        if address == 0:
            raise InvalidBufferError(f"{what} is a null pointer, but count is {count}")
        if address % dtype.itemsize:
            raise InvalidBufferError(f"{what} {address:#x} is not aligned to {dtype} ({dtype.itemsize} bytes)")
    return address


def same_or_disjoint(x: Values, out: Values) -> bool:
    """Whether two arrays are the same memory. Raises InvalidBufferError if they overlap in part."""
    if x.address == out.address or x.nbytes == 0:
        return x.address == out.address
    if x.address < out.address + out.nbytes and out.address < x.address + x.nbytes:
        raise InvalidBufferError(
            f"{x.what} [{x.address:#x}, +{x.nbytes}) and {out.what} [{out.address:#x}, +{out.nbytes}) overlap in part; "
            f"they must be the same memory (in place) or have none in common"
        )
    return False


def is_part_of(part: Values, whole: Values, first: int) -> bool:
    """Whether ``part`` is the elements of ``whole`` from ``first`` on. Raises InvalidBufferError on other overlaps."""
    if not part.nbytes or part.address == whole.address + first * whole.dtype.itemsize:
        return part.address == whole.address + first * whole.dtype.itemsize
    check_disjoint([whole, part])
    return False


def check_listed(given: Any, what: str, other: str = "") -> None:
    """Raise ArgumentError unless ``given`` is several objects in an order that all ranks share, such as a list.

    Otherwise the keys of a dict, the rows of an array or the letters of a text would be taken for arrays. ``other``:
    the error's words for another form that is allowed.
    """
    if isinstance(given, list | tuple):
        return
    kind = type(given).__name__
    if isinstance(given, Mapping):
        advice = f"[{what}[name] for name in sorted({what})]"
    elif hasattr(given, "shape"):
        kind, advice = f"a single array ({kind})", f"[{what}]"
    elif isinstance(given, Iterator | Set):
        advice = "a list, such as list(model.parameters())"
    elif isinstance(given, Collection) and not isinstance(given, str | bytes | bytearray | memoryview):
        return
    else:
        advice = "a list, such as [x, y]"
    allowed = f"{other}a list of arrays, in the same order on all ranks"
    raise ArgumentError(f"{what} must be {allowed}, not {kind}; pass {advice}")


def check_disjoint(written: Iterable[Values], read: Iterable[Values] = ()) -> None:
    """Raise InvalidBufferError if an array that is written shares memory with another one."""
    found = [(v.address, v.address + v.nbytes, True, v.what) for v in written if v.nbytes]
    found += [(v.address, v.address + v.nbytes, False, v.what) for v in read if v.nbytes]
    end, last, end_written, last_written = 0, "", 0, ""
    for start, stop, writes, what in sorted(found):
        other = last if writes and start < end else last_written if start < end_written else ""
        if other:
            raise InvalidBufferError(
                f"{other} and {what} overlap in memory, and one of them is written; pass arrays that have no memory in "
                f"common (tied weights once: torch's named_parameters() has them once, and state_dict() twice)"
            )
        if stop > end:
            end, last = stop, what
        if writes and stop > end_written:
            end_written, last_written = stop, what


def _address(pointer: Pointer, nbytes: int, what: str) -> int:
    address = as_integer(pointer)
    if address is not None:
        return address
    if isinstance(pointer, ctypes.c_void_p):
        return pointer.value or 0
    if not isinstance(pointer, ctypes.Array):
        raise InvalidBufferError(
            f"{what} must be an address: an int, a ctypes.c_void_p or an array of ctypes, not {type(pointer).__name__}"
        )
    if ctypes.sizeof(pointer) < nbytes:
        raise InvalidBufferError(f"{what} is an array of {ctypes.sizeof(pointer)} bytes, but the call needs {nbytes}")
    return ctypes.addressof(pointer)


def _element_type(found: str, wanted: DType | None, what: str) -> DType:
    names = [d.name for d in dtypes.DTYPES]
    if wanted is BFLOAT16 and found == "uint16":
        return BFLOAT16
    if wanted is BYTES:
        if found != "uint8":
            raise InvalidBufferError(f"{what} has element type {found}, and bytes are needed; pass a view as uint8")
        return BYTES
    if found not in names:
        hint = (
            'for bfloat16 held in uint16 pass dtype="bfloat16"' if found == "uint16" else "convert it to one of these"
        )
        raise InvalidBufferError(f"{what} has element type {found}; allowed are {', '.join(names)}; {hint}")
    if wanted is not None and wanted.name != found:
        raise InvalidBufferError(
            f"{what} has element type {found}, and {wanted} is needed: the type of dtype=, or of the call's first array"
        )
    return dtypes.get(found)


@lru_cache(4096)
def _form_of(form: _Described, wanted: DType | None, what: str) -> Form:
    """Check the form of an array. Raises InvalidBufferError."""
    dtype, shape, strides = form
    element = _element_type(dtype, wanted, what)
    if not _is_dense(shape, strides):
        raise InvalidBufferError(
            f"{what} is not contiguous: shape {shape}, strides {strides} elements; pass a contiguous copy"
        )
    return Form(element, math.prod(shape), (shape, strides), _order(shape, strides))


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    axes = [(stride, extent) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    slowest_first = sorted(range(len(axes)), key=lambda axis: -axes[axis][0])
    if slowest_first == list(range(len(axes))) or 0 in shape:
        return "C"
    return f"axes {slowest_first} of {[extent for _, extent in axes]}"


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps, in any order of the axes (row- or column-major)."""
    if 0 in shape:
        return True
    expected = 1
    for stride, extent in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def text_about_inputs(memory: Memory, inputs: Iterable[Values], rank: int) -> str:
    """Say for refuse_nonfinite() which element of a rank's inputs is the first non-finite one; "" without inputs."""
    text = ""
    for values in inputs:
        first = memory.first_nonfinite(values)
        if first is not None:
            return f"; before the call, element {first} of {values.what} of rank {rank} was not finite"
        text = f"; before the call, the input of rank {rank} was finite"
    return text


def refuse_nonfinite(memory: Memory, outputs: Iterable[Values], about_inputs: str) -> None:
    """Raise ArgumentError if values are not all finite: on every rank, because all ranks have the same values."""
    for values in outputs:
        first = memory.first_nonfinite(values)
        if first is not None:
            raise ArgumentError(
                f"the result is not finite at element {first} of {values.what} (and perhaps later: one input that "
                f"is not finite spoils its bucket or block, and a sum may overflow){about_inputs}. The call has "
                f'written the output; nonfinite="error" requests this error'
            )
