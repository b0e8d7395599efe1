"""The real cuda.bindings.driver, cupy.cuda.driver and cupy.cuda.nccl on libraries whose functions are Python's.

A compiler makes one small library with the functions of libcuda.so.1 and libnccl.so.2 that are in PROTOTYPES. Each
calls a callback of ctypes, and that the function of its name in installed(), one of the fake GPUs'. So the bindings
convert every argument and every answer as they do on a GPU, and give up the interpreter where they do there.

The bindings are given this library where they load libcuda.so.1. CuPy's modules are loaded once more, from copies that
are linked with this library instead of libnccl.so.2: the process may have the real ones, too. CuPy's runtime is linked
with CUDA's statically, and stays a fake.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["NCCL_MODULE", "PROTOTYPES", "Refused", "installed", "real_modules", "source", "write"]

#: as in cuda.h and nccl.h
PROTOTYPES = """
CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, cuuint64_t flags, \
CUdriverProcAddressQueryResult *result)
CUresult cuGetErrorName(CUresult error, const char **text)
CUresult cuGetErrorString(CUresult error, const char **text)
CUresult cuCtxGetCurrent(CUcontext *context)
CUresult cuCtxSetCurrent(CUcontext context)
CUresult cuEventQuery(CUevent event)
CUresult cuStreamQuery(CUstream stream)
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags)
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags)
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute wanted, CUdeviceptr address)
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *wanted, void **data, CUdeviceptr address)
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
CUresult cuLaunchKernel(CUfunction kernel, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, \
unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, \
void **arguments, void **extra)
const char* ncclGetErrorString(ncclResult_t result)
const char* ncclGetLastError(ncclComm_t comm)
ncclResult_t ncclGetVersion(int *version)
ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int count, const int *devices)
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config)
ncclResult_t ncclCommDestroy(ncclComm_t comm)
ncclResult_t ncclCommAbort(ncclComm_t comm)
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
ncclResult_t ncclGroupStart(void)
ncclResult_t ncclGroupEnd(void)
ncclResult_t ncclSend(const void *source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, \
cudaStream_t stream)
ncclResult_t ncclRecv(void *target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream)
ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, ncclDataType_t type, int root, \
ncclComm_t comm, cudaStream_t stream)
ncclResult_t ncclAllGather(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t comm, \
cudaStream_t stream)
ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, \
ncclComm_t comm, cudaStream_t stream)
ncclResult_t ncclReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, \
int root, ncclComm_t comm, cudaStream_t stream)
ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, \
ncclComm_t comm, cudaStream_t stream)
"""


class _UniqueId(ctypes.Structure):
    _fields_ = (("content", ctypes.c_char * 128),)


#: where the headers are not installed
_TYPES = """
#include <stddef.h>
#include <stdint.h>
typedef int CUresult, CUdriverProcAddressQueryResult, CUpointer_attribute, CUstreamCaptureMode;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef unsigned long long CUdeviceptr;
typedef struct Handle *CUcontext, *CUevent, *CUstream, *CUfunction, *ncclComm_t, *cudaStream_t;
typedef struct { char content[128]; } ncclUniqueId;
typedef struct Config ncclConfig_t;
"""
_HANDLES = ("CUcontext", "CUevent", "CUstream", "CUfunction", "CUdeviceptr", "ncclComm_t", "cudaStream_t", "size_t")
_OTHERS: dict[str, Any] = {
    "unsigned int": ctypes.c_uint32,
    "cuuint32_t": ctypes.c_uint32,
    "cuuint64_t": ctypes.c_uint64,
    "ncclUniqueId": _UniqueId,
}
#: what a function returns that raises something else than Refused, or that the fake GPUs lack: CUDA_ERROR_UNKNOWN
#: and ncclInternalError
_CUDA_UNKNOWN, _NCCL_INTERNAL = 999, 3
_CUDA_NOT_FOUND = 500
_NAME = "libqccl.so.2"  # as long as libnccl.so.2
NCCL_MODULE = "cupy_backends.cuda.libs.nccl"
_CALLBACKS: list[Any] = []


class Refused(Exception):
    """Raised by a function that returns this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Functions:
    """What the libraries call: functions by their names, and what they have raised."""

    now: _Functions | None = None

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.functions, self.faults = functions, list[BaseException]()


def write(address: int, kind: Any, value: Any) -> None:
    """Write an answer to where a pointer points."""
    kind.from_address(address).value = value


@contextmanager
def installed(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let the libraries call ``functions``, and raise afterwards what one has raised; a function lacking is a fault."""
    before, _Functions.now = _Functions.now, _Functions(functions)
    found = _Functions.now
    try:
        yield
    finally:
        _Functions.now = before
        if found.faults:
            raise found.faults[0]


def _answer(name: str, *arguments: Any) -> int:
    unknown = _CUDA_UNKNOWN if name.startswith("cu") else _NCCL_INTERNAL
    found = _Functions.now
    if name in _TEXTS:
        return _TEXTS[name](*arguments)
    if found is None:
        return unknown  # a thread outlives its test
    try:
        assert name in found.functions, f"the fake GPUs have no {name}"
        return found.functions[name](*arguments) or 0
    except Refused as error:
        return error.status
    except BaseException as error:
        found.faults.append(error)
        return unknown


@functools.cache
def _text(status: int) -> Any:
    return ctypes.create_string_buffer(b"fake error %d" % status)


def _cuda_text(status: int, text: int) -> int:
    write(text, ctypes.c_size_t, ctypes.addressof(_text(status)))
    return 0


_NOTHING = ctypes.create_string_buffer(1)
#: the functions that tell texts, and are also called when no world is there any more
_TEXTS: dict[str, Callable[..., int]] = {
    "cuGetErrorName": _cuda_text,
    "cuGetErrorString": _cuda_text,
    "ncclGetErrorString": lambda status: ctypes.addressof(_text(status)),
    "ncclGetLastError": lambda comm: ctypes.addressof(_NOTHING),
}


def _prototypes() -> Iterator[tuple[str, str, list[str]]]:
    """The type of the answer, the name, and the types of the parameters of each function."""
    for line in PROTOTYPES.strip().splitlines():
        answer, name, inside = re.fullmatch(r"(.*?)(\w+)\((.*)\)", line).groups()  # type: ignore[union-attr]
        parameters = [] if inside == "void" else [re.sub(r"\w+$", "", each).strip() for each in inside.split(", ")]
        yield answer.strip(), name, parameters


def _ctype(declared: str) -> Any:
    if "*" in declared or declared.removeprefix("const ") in _HANDLES:
        return ctypes.c_size_t
    return _OTHERS.get(declared, ctypes.c_int)  # the others are enumerations


def source(types: str = _TYPES) -> str:
    """The library in C; ``types`` may be the lines that include the headers instead."""
    lines = [types]
    for number, (answer, name, parameters) in enumerate(_prototypes()):
        declared = ", ".join(f"{each} a{i}" for i, each in enumerate(parameters)) or "void"
        given, kinds = ", ".join(f"a{i}" for i in range(len(parameters))), ", ".join(parameters) or "void"
        call = f"(({answer} (*)({kinds}))targets[{number}])({given})"
        lines.append(f"{answer} {name}({declared}) {{ return {call}; }}")
    lines.insert(1, f"void *targets[{len(lines) - 1}];")
    return "\n".join(lines)


@functools.cache
def _library(folder: Path) -> ctypes.CDLL:
    path = folder / _NAME
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{_NAME}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source(), text=True, check=True, timeout=60)
    library = ctypes.CDLL(str(path))
    targets = (ctypes.c_void_p * len(list(_prototypes()))).in_dll(library, "targets")
    for number, (answer, name, parameters) in enumerate(_prototypes()):
        callback = ctypes.CFUNCTYPE(_ctype(answer), *map(_ctype, parameters))(functools.partial(_answer, name))
        _CALLBACKS.append(callback)
        targets[number] = ctypes.cast(callback, ctypes.c_void_p).value
    return library


def _copy(name: str, folder: Path) -> ModuleType:
    """An extension module of CuPy's, loaded once more, with this library where it is linked with NCCL."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    path = folder / Path(spec.origin).name
    path.write_bytes(Path(spec.origin).read_bytes().replace(b"libnccl.so.2\0", _NAME.encode() + b"\0"))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    usual, loaded = sys.getdlopenflags(), sys.modules.pop(name, None)
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_DEEPBIND)  # also where the program has loaded NCCL for all
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.setdlopenflags(usual)
        sys.modules.pop(name, None)  # Cython has put it there
        sys.modules |= {} if loaded is None else {name: loaded}
    return module


@functools.cache
def real_modules() -> dict[str, ModuleType]:
    """cuda.bindings.driver, and copies of CuPy's modules driver and nccl, which call the library."""
    internal = importlib.import_module("cuda.bindings._internal.driver")
    bindings = importlib.import_module("cuda.bindings.driver")
    usual = internal.load_nvidia_dynamic_lib, ctypes.CDLL
    with tempfile.TemporaryDirectory(prefix="qccl-stub-") as name:
        library = _library(Path(name))

        def load(name: str, *given: Any, **named: Any) -> ctypes.CDLL:
            return library if name == "libcuda.so.1" else usual[1](name, *given, **named)

        def find_function(symbol: int, found: int, version: int, flags: int, result: int) -> int:
            """The bindings ask for every function that CUDA has, and refuse to call those not found."""
            function = getattr(library, ctypes.string_at(symbol).decode(), None)
            write(found, ctypes.c_void_p, ctypes.cast(function, ctypes.c_void_p).value)
            if result:
                write(result, ctypes.c_int, 0 if function else 1)
            return 0 if function else _CUDA_NOT_FOUND

        driver, nccl = _copy("cupy_backends.cuda.api.driver", Path(name)), _copy(NCCL_MODULE, Path(name))
        internal.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(_handle_uint=library._handle)
        ctypes.CDLL = load  # type: ignore[misc, assignment]
        functions = {"cuGetProcAddress_v2": find_function, "cuEventQuery": lambda event: 0}
        try:  # both look for all functions at their first call
            with installed(functions):
                assert bindings.cuEventQuery(0) == (bindings.CUresult.CUDA_SUCCESS,)
                driver.CUDADriverError(0)
        finally:
            internal.load_nvidia_dynamic_lib, ctypes.CDLL = usual  # type: ignore[misc]
    gc.collect()
    gc.freeze()  # the bindings' thousands of objects stay, and tests collect often
    return {"cuda.bindings.driver": bindings, "cupy.cuda.driver": driver, "cupy.cuda.nccl": nccl}
