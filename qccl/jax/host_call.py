"""Calls of Python functions from compiled JAX programs, in the order of the program.

XLA's foreign function interface (FFI) passes the addresses of a program's buffers to a handler, without copies.
jax.experimental.io_callback is not used for the arrays: it copies them on a thread of XLA's pool, and waits for that
thread in another one, so a process that may use only one processor hangs.

XLA runs FFI calls in any order, as soon as their operands are ready. So two ordered io_callbacks, with one number each,
surround each call: *enter* returns a ticket that the FFI call needs, and *leave* needs a result of the FFI call. So no
call begins before the previous one has ended.

The structures are copied from XLA's ``xla/ffi/api/c_api.h``, up to the last field that is used.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from qccl.base.errors import ArgumentError, described
from qccl.base.lifetime import Stage, at_exit

__all__ = ["call_on_host"]

#: a function(inputs, outputs) on NumPy arrays, which are valid until it returns
HostFunction = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]

_TARGET = "qccl_call_on_host"
_METADATA = 1  # XLA_FFI_Extension_Metadata
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL


class _Sized(ctypes.Structure):
    """The first fields of most structures."""

    _fields_: ClassVar[Any] = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class _Version(_Sized):
    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _ErrorArguments(_Sized):
    _fields_ = (("message", ctypes.c_char_p), ("code", ctypes.c_int))


class _Api(_Sized):
    _fields_ = (
        *(("version", _Version), ("internal", ctypes.c_void_p)),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)),
    )


class _Buffer(_Sized):
    _fields_ = (("dtype", ctypes.c_int), ("data", ctypes.c_void_p))


class _Buffers(_Sized):
    _fields_ = (
        *(("size", ctypes.c_int64), ("types", ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api))),
        *(("context", ctypes.c_void_p), ("stage", ctypes.c_int), ("arguments", _Buffers), ("results", _Buffers)),
    )


class _Pending:
    """A call between *enter* and its FFI call: its function, and the element types and shapes of its arrays."""

    def __init__(self, function: HostFunction, avals: Sequence[Any]) -> None:
        self._function = function
        self._forms = [(np.dtype(aval.dtype), tuple(aval.shape)) for aval in avals]

    def run(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Call the function on the arrays at these addresses."""
        self._function(
            *([_array(at, *form) for at, form in zip(each, self._forms, strict=True)] for each in (inputs, outputs))
        )


#: the calls that have entered, by ticket
_pending: dict[int, _Pending] = {}
_tickets = itertools.count()
_TICKET = jax.ShapeDtypeStruct((), np.uint32)


def call_on_host(function: HostFunction, xs: Sequence[Any]) -> list[Any]:
    """Call ``function(inputs, outputs)`` when the traced program runs. Returns the outputs, which are like ``xs``.

    No array of ``xs`` may be empty. An error of the function becomes an error of the program, with its text.
    """
    _check_place()
    for x in xs:
        _check_devices(_devices_of(x))
    at_exit(Stage.CALLS, _finish_calls)
    # one barrier for all arrays: a transformation of JAX that moves part of a program moves enter, FFI call and leave
    xs = jax.lax.optimization_barrier(list(xs))
    call = _Pending(function, xs)

    def enter(_: Any) -> np.ndarray:
        ticket = next(_tickets) % 2**32
        _pending[ticket] = call
        return np.array(ticket, np.uint32)

    ticket = _on_one_device.bind(io_callback(enter, _TICKET, xs[0].ravel()[0], ordered=True))
    results = [_TICKET, *map(jax.typeof, xs)]
    done, *outs = jax.ffi.ffi_call(_TARGET, results)(ticket, *xs)
    io_callback(lambda _: None, None, done, ordered=True)
    return list(outs)


#: a primitive that returns its argument, and refuses programs for several devices
_on_one_device = Primitive("qccl_on_one_device")
_on_one_device.def_abstract_eval(lambda ticket: ticket)
_on_one_device.def_impl(lambda ticket: ticket)


def _lower_on_one_device(context: Any, ticket: Any) -> list[Any]:
    attributes = context.module_context.module.operation.attributes
    _check_devices(math.prod(int(attributes[f"mhlo.num_{kind}"]) for kind in ("partitions", "replicas")))
    return [ticket]


mlir.register_lowering(_on_one_device, _lower_on_one_device)


def _devices_of(x: Any) -> int:
    """The number of devices of a traced array whose type says that it is split; otherwise, as for Auto axes, 1."""
    sharding = jax.typeof(x).sharding
    return sharding.mesh.size if any(axis is not None for axis in sharding.spec) else 1


def _check_devices(devices: int) -> None:
    """Raise ArgumentError for several devices: XLA would make a call on each of them."""
    if devices > 1:
        raise ArgumentError(
            f"this program is compiled for {devices} devices, each of which would call qccl; give it arrays on one "
            f"device, or call allreduce() outside of compiled functions, which also takes arrays that are whole on "
            f"each of several devices"
        )


def _finish_calls() -> None:
    """Wait for the programs that this thread has started."""
    jax.effects_barrier()


def _check_place() -> None:
    """Raise ArgumentError if a compiled program cannot call the host once, in order, from here."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    if devices > 1:
        raise ArgumentError(
            f"this is inside shard_map() or pmap() over {devices} devices, each of which would make its own call, in "
            f"no order; combine the devices' values with jax.lax.psum(), and call qccl outside"
        )
    if jax.default_backend() != "cpu":
        raise ArgumentError(
            f"compiled programs for {jax.default_backend()} cannot call qccl; call it between compiled functions, or "
            f"set JAX_PLATFORMS=cpu"
        )


def _array(address: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array in XLA's memory at ``address``."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype).reshape(shape)


def _addresses(buffers: _Buffers) -> list[int]:
    return [buffers.buffers[i].contents.data for i in range(buffers.size)]


def _run(frame: _CallFrame) -> None:
    (at, *inputs), (done, *outputs) = _addresses(frame.arguments), _addresses(frame.results)
    ticket = ctypes.c_uint32.from_address(at).value
    _pending.pop(ticket).run(inputs, outputs)
    ctypes.c_uint32.from_address(done).value = ticket


def _handle(at: Any) -> int | None:
    """Handle a call of XLA (XLA_FFI_Handler). Returns null, or an error that XLA owns."""
    frame = at.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        # by XLA's rules minor versions only add fields, and the fields used here are in all versions 0.x
        version = frame.extension.contents.metadata.contents.version
        version.major, version.minor = 0, frame.api.contents.version.minor
        return None
    try:
        _run(frame)
    except BaseException as error:  # Ctrl-C, too: nothing can be raised through XLA
        text = described(error).encode(errors="backslashreplace")  # must not raise: XLA would take that for success
        arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _INTERNAL)
        created: int = frame.api.contents.create_error(ctypes.addressof(arguments))
        return created
    return None


_handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))(_handle)  # XLA keeps its address
jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform="cpu")
