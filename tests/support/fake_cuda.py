"""The part of CuPy and cuda-python that qccl uses, on fake GPUs: modules whose device memory is on the host.

fake_device.py has the GPUs, fake_nccl.py the communicators. Kernels do their jobs with the host's compiled codecs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_nccl
import patience
import stub_libraries
from fake_device import (
    DEVICES,
    Array,
    Block,
    CUDARuntimeError,
    DriverMemory,
    Event,
    Node,
    Pointer,
    Stream,
    World,
    array,
)
from stub_libraries import NCCL_MODULE, Refused, real_modules, write

__all__ = [
    "DEVICES", "Array", "CUDARuntimeError", "CompileException", "Event", "Node", "OutOfMemoryError", "World", "array",
    "installed", "modules",
]  # fmt: skip

NOT_READY = 600


class CompileException(Exception):
    pass


class OutOfMemoryError(MemoryError):
    pass


class _StreamMaker:
    """cupy.cuda.Stream, which is called, and has the default stream as an attribute."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.null = Stream(world, ptr=0)

    def __call__(self, **arguments: Any) -> Stream:
        return Stream(self._world, **arguments)

    def from_external(self, stream: Any) -> Stream:
        return Stream(self._world, ptr=stream.__cuda_stream__()[1])


#: what the kernels of the checks themselves do
_SIMPLE = {
    "spin": lambda nanoseconds: None,
    "copy": lambda source, target, words: ctypes.memmove(target, source, 4 * words),
    "race": lambda target: None,
}


#: CUpointer_attribute
_MEMORY_TYPE, _BUFFER_ID, _IS_MANAGED, _ORDINAL, _RANGE_START, _RANGE_NBYTES = 2, 7, 8, 9, 11, 12
_INVALID_VALUE = 1


def _pointer_attributes(world: World, count: int, wanted: int, data: int, address: int) -> None:
    world.asked.append(count)
    answers = {_MEMORY_TYPE: 0, _BUFFER_ID: 0, _IS_MANAGED: 0, _ORDINAL: -2, _RANGE_START: 0, _RANGE_NBYTES: 0}
    for start, block in world.memory.items():
        if start <= address < start + block.nbytes:
            found = {_MEMORY_TYPE: 2, _ORDINAL: world.devices.get(start, 0), _RANGE_START: start}
            answers |= found | {_RANGE_NBYTES: block.nbytes, _BUFFER_ID: block.number}
    for attribute, place in zip(_array(wanted, ctypes.c_int, count), _array(data, ctypes.c_size_t, count), strict=True):
        kind = ctypes.c_size_t if attribute in (_RANGE_START, _RANGE_NBYTES, _BUFFER_ID) else ctypes.c_int
        write(place, ctypes.c_uint8 if attribute == _IS_MANAGED else kind, answers[attribute])


def _buffer_id(world: World, data: int, wanted: int, address: int) -> None:
    assert wanted == _BUFFER_ID
    world.asked.append(1)
    found = [block.number for start, block in world.memory.items() if start <= address < start + block.nbytes]
    if not found:
        raise Refused(_INVALID_VALUE)
    write(data, ctypes.c_size_t, found[0])


def _array(address: int, kind: Any, count: int) -> list[int]:
    return list((kind * count).from_address(address))


#: CUstreamCaptureMode
_RELAXED = 2
#: the handle of device 0's primary context; those of the others follow
_CONTEXTS = 0xC0
_NOT_SUPPORTED = 801


def _copy(world: World, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    if kind == 1 and not _is_pinned(world, source):  # pageable memory has been read when the call returns
        content = ctypes.string_at(source, nbytes)
        world.put(stream, "copy to device", lambda: ctypes.memmove(target, content, nbytes))
    else:
        world.put(stream, f"copy {kind}", lambda: ctypes.memmove(target, source, nbytes))


def _pinned(world: World, nbytes: int) -> Block:
    world.forbid_in_capture()
    block = Block(nbytes)
    ctypes.memset(block.ptr, 0xA5, nbytes)
    with world.lock:
        world.pinned.add(block)
    return block


def _is_pinned(world: World, address: int) -> bool:
    with world.lock:
        return any(block.ptr <= address < block.ptr + block.nbytes for block in world.pinned)


def _word(world: World, address: int) -> Any:
    assert _is_pinned(world, address) and address % 4 == 0
    return ctypes.c_uint32.from_address(address)


def _wait_value(world: World, stream: int, address: int, value: int, flags: int) -> None:
    word = _word(world, address)
    assert flags == 0
    world.calls.append(("wait value", stream, address, value))
    world.put(stream, f"wait for {value}", lambda: ctypes.c_int32(word.value - value).value >= 0)


def _write_value(world: World, stream: int, address: int, value: int, flags: int) -> None:
    word = _word(world, address)
    assert flags == 0
    if world.no_stream_memory:
        raise Refused(_NOT_SUPPORTED)

    def run() -> None:
        word.value = value

    world.put(stream, f"tell {value}", run)


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def modules(world: World) -> dict[str, ModuleType]:
    """The modules to put into sys.modules. Those of the driver and of NCCL are copies of the real ones."""
    real = {name: _module(name, **vars(module)) for name, module in real_modules().items()}
    parts = {name.rpartition(".")[2]: module for name, module in real.items() if name.startswith("cupy")}
    cuda = _cuda(world, runtime=_runtime(world), **parts)
    package = _module("cuda", bindings=_module("cuda.bindings", driver=real["cuda.bindings.driver"]))
    return real | {
        "cupy": _cupy(world, cuda),
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": cuda.runtime,
        NCCL_MODULE: real_modules()["cupy.cuda.nccl"],
        "cuda": package,
        "cuda.bindings": package.bindings,
    }


def _runtime(world: World) -> ModuleType:
    def copy_now(target: int, source: int, nbytes: int, kind: int) -> None:
        world.forbid_in_capture()
        ctypes.memmove(target, source, nbytes)

    return _module(
        "cupy.cuda.runtime",
        CUDARuntimeError=CUDARuntimeError,
        getDevice=world.current_device,
        setDevice=world.set_device,
        getDeviceCount=lambda: DEVICES,
        memGetInfo=lambda: (world.free_memory, world.free_memory),
        eventElapsedTime=world.elapsed,
        eventRecord=lambda event, stream: world.record(event, stream),
        streamWaitEvent=world.wait,
        streamIsCapturing=lambda stream: world.device() >= 0 and Stream(world, ptr=stream).is_capturing(),
        memcpy=copy_now,
        memset=ctypes.memset,
        streamSynchronize=lambda stream: Stream(world, ptr=stream).synchronize(),
        deviceSynchronize=lambda: world.finish(lambda: world.is_idle(world.device())),
        getDeviceProperties=lambda device: {"name": b"Fake 100", "major": 9, "minor": 0},
        deviceGetPCIBusId=lambda device: f"0000:{device:02d}:00.0",
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        memcpyAsync=lambda to, source, nbytes, kind, stream: _copy(world, to, source, nbytes, kind, stream),
        memsetAsync=lambda address, value, nbytes, stream: world.put(
            stream, "memset", lambda: ctypes.memset(address, value, nbytes)
        ),
    )


def _functions(world: World, kernels: Any) -> dict[str, Callable[..., Any]]:
    """The driver's; ``kernels(name, geometry, arguments)`` returns what a launch does."""

    def launch(kernel: int, *given: int) -> None:
        *geometry, stream, arguments, extra = given
        name = world.kernels[kernel]
        world.calls.append(("launch", name, stream))
        assert extra == 0 and world.has_context()
        world.put(stream, name, kernels(name, tuple(geometry), arguments))

    def query(is_done: Callable[[], bool]) -> int:
        with world.driver:
            if world.captures and not world.local.__dict__.get("is_relaxed"):
                return 900  # cudaErrorStreamCaptureUnsupported
            return 0 if is_done() else world.error or NOT_READY

    def exchange_mode(mode: int) -> None:
        before = world.local.__dict__.get("is_relaxed", False)
        world.local.is_relaxed = ctypes.c_int.from_address(mode).value == _RELAXED
        write(mode, ctypes.c_int, _RELAXED if before else 0)

    def set_context(context: int) -> None:
        if context:
            world.set_device(context - _CONTEXTS)
        else:  # none
            del world.local.device

    return {
        "cuCtxGetCurrent": lambda context: write(
            context, ctypes.c_size_t, _CONTEXTS + world.current_device() if world.has_context() else 0
        ),
        "cuCtxSetCurrent": set_context,
        "cuEventQuery": lambda event: query(lambda: world.is_done(event)),
        "cuStreamQuery": lambda stream: query(lambda: world.is_empty(stream)),
        "cuStreamWaitValue32": functools.partial(_wait_value, world),
        "cuStreamWriteValue32": functools.partial(_write_value, world),
        "cuPointerGetAttribute": functools.partial(_buffer_id, world),
        "cuPointerGetAttributes": functools.partial(_pointer_attributes, world),
        "cuThreadExchangeStreamCaptureMode": exchange_mode,
        "cuLaunchKernel": launch,
    }


def _cuda(world: World, **parts: ModuleType) -> ModuleType:
    def compile_using_nvrtc(code: str, options: tuple[str, ...], *, name_expressions: tuple[str, ...] = ()) -> Any:
        world.forbid_in_capture()
        assert not name_expressions or ("#include" in code and "--fmad=false" in options)
        return b"cubin", {name: f"mangled {name}" for name in name_expressions}

    class Module:
        def load(self, binary: bytes) -> None:
            assert binary == b"cubin"

        def get_function(self, mangled: str) -> Any:
            if (simple := _SIMPLE.get(mangled)) is not None:
                return lambda grid, block, arguments: world.put(
                    world.local.streams[-1].ptr, mangled, lambda: simple(*map(int, arguments))
                )
            pointer = next(world.numbers)
            world.kernels[pointer] = mangled.removeprefix("mangled ")
            return SimpleNamespace(ptr=pointer)

    streams = _StreamMaker(world)
    return _module(
        "cupy.cuda",
        compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc, CompileException=CompileException),
        nvrtc=SimpleNamespace(getVersion=lambda: (12, 9), getSupportedArchs=lambda: (75, 80, 90, 100, 120)),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError, Memory=lambda nbytes: DriverMemory(world, nbytes)),
        Device=lambda: SimpleNamespace(compute_capability="90"),
        function=SimpleNamespace(Module=Module),
        Stream=streams,
        get_elapsed_time=lambda begin, end: 1.0,
        set_allocator=lambda allocator: None,
        Event=lambda **arguments: Event(world, **arguments),
        alloc=lambda nbytes: Pointer(world, nbytes),
        alloc_pinned_memory=lambda nbytes: _pinned(world, nbytes),
        get_current_stream=lambda device=None: (world.local.__dict__.get("streams") or [streams.null])[-1],
        UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr),
        MemoryPointer=lambda memory, offset: memory,
        **parts,
    )


def _cupy(world: World, cuda: ModuleType) -> ModuleType:
    Array.world = world
    return _module(
        "cupy",
        __version__="14.1.0",
        cuda=cuda,
        ndarray=Array,
        empty=Array,
        get_default_memory_pool=lambda: SimpleNamespace(
            total_bytes=lambda: 3 << 20, used_bytes=lambda: 1 << 20, free_all_blocks=lambda: None
        ),
    )


def _load_nvml(world: World) -> None:
    def load() -> Any:
        if world.nvml is None:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return world.nvml

    importlib.import_module("qccl.engine.cuda.links")._nvml = load


def _run_while_flags_are_read(world: World) -> None:
    """Do some of what can be done whenever the host looks at the flags of runs."""
    flags = importlib.import_module("qccl.engine.cuda.flags").RunFlags
    read = flags._read

    def run_and_read(self: Any, word: int) -> int:
        world.run()
        return read(self, word)

    flags._read = run_and_read


def remaining_threads(world: World, seconds: float = 60) -> list[threading.Thread]:
    """Threads of qccl that began after this world and do not end in time."""
    limit, found = patience.Limit(seconds), list[threading.Thread]()
    while limit.left():
        # they cannot be joined: enumerate() has some that have not begun to run
        began = set(threading.enumerate()) - world.threads_before
        found = [each for each in began if each.name.startswith("qccl")]
        if not found:
            break
        time.sleep(0.002)
    return found


@contextlib.contextmanager
def installed(world: World, kernels: Any) -> Any:
    """Put the modules in place, and forget what was made of them afterwards; ``kernels`` is as in _functions()."""
    with stub_libraries.installed(_functions(world, kernels) | fake_nccl.functions(world)), _in_place(world) as cupy:
        yield cupy


@contextlib.contextmanager
def _in_place(world: World) -> Any:
    from qccl.base import lifetime
    from qccl.engine.cuda import libraries

    made = modules(world)
    registries = len(lifetime._registries)
    parts = ("device", "engine", "flags", "kernels", "links", "memory", "nccl", "nccl_library", "program")
    parts += ("rig", "run", "staging", "watchdog", "workspace")
    ours = tuple(f"qccl.engine.cuda.{part}" for part in parts)
    saved = {name: sys.modules.pop(name, None) for name in (*made, *ours)}
    sys.modules.update(made)
    libraries.cuda_libraries.cache_clear()
    folder = os.environ.get("QCCL_CACHE_DIR")
    _run_while_flags_are_read(world)
    _load_nvml(world)
    os.environ["QCCL_CACHE_DIR"] = ""  # what the fake compiles is of no use to others
    try:
        yield made["cupy"]
    finally:
        del os.environ["QCCL_CACHE_DIR"]
        if folder is not None:
            os.environ["QCCL_CACHE_DIR"] = folder
        for engine in list(getattr(sys.modules.get("qccl.engine.cuda.engine"), "_live", ())):
            engine.close(0.1)
        world.ended.set()
        for meeting in world.meetings.values():
            meeting.barrier.abort()
        remaining_threads(world, 5)
        for registry in lifetime._registries[registries:]:  # each holds its module, and so the world
            lifetime._stages.pop(registry.end, None)
            atexit.unregister(registry.end)
        del lifetime._registries[registries:]
        libraries.cuda_libraries.cache_clear()
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        gc.collect()  # workspaces of 64 MiB
