"""CUDA's libraries, by CuPy and cuda-python: loaded here and nowhere else, or refused with all that is missing.

``import qccl`` does not load this module. Every other module that needs a GPU starts with cuda_libraries(), so that a
machine without one gets the same clear error from each.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

from qccl.base import threads
from qccl.base.deadline import Deadline
from qccl.base.errors import ArgumentError, CollectiveTimeout, EngineError, PeerLost, QcclError

__all__ = [
    *("COMPUTE_PRIORITY", "DEVICE_TO_HOST", "HOST_TO_DEVICE", "LAUNCH_ORDER", "NOT_READY", "ON_DEVICE"),
    *("TRANSFER_PRIORITY", "Gpu", "as_qccl_error", "bounded", "check_status", "cuda_libraries", "device_count"),
    *("device_names", "event_status", "hardware_of", "missing", "nccl_version", "no_room", "on_device"),
    *("part_versions", "pick_device", "raise_translated", "relaxed", "stream_status", "translated"),
    "wait_for",
]

#: oldest versions that work
CUPY_VERSION = 14, 1  # before, CuPy kept the interpreter while it recorded an event in a full queue
NCCL_VERSION = 21800

#: cudaMemcpyKind
HOST_TO_DEVICE, DEVICE_TO_HOST, ON_DEVICE = 1, 2, 3
#: priorities of streams, which CUDA clamps to the GPU's range: above the caller's default of 0, or encoding would queue
#: behind the kernels of a backward pass; and a transfer that can start goes first
COMPUTE_PRIORITY, TRANSFER_PRIORITY = -1, -2

#: CUDA_ERROR_NOT_READY, the status of an event or a stream that has work left
NOT_READY = 600
_NCCL_REMOTE_ERROR = 6
#: with 1, NCCL orders the work of different communicators on a GPU as the program issues it (from NCCL 2.26 on)
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
#: arguments of the KeyErrors that CuPy raises for ncclInProgress and ncclTimeout, which it does not know
_NAMELESS = ((7,), (8,))

#: CUDA's errors Unsupported, Invalidated and Implicit of a stream capture, and what to do about them
_CAPTURE_ERRORS = 900, 901, 906
_CAPTURE_ADVICE = (
    "; work on the legacy default stream (stream=0) ends a capture of another thread: give calls streams of their own "
    "while a thread captures, and capture again"
)

_T = TypeVar("_T")


class Gpu(NamedTuple):
    """The libraries: CuPy, its CUDA runtime, driver and NCCL modules, and cuda-python's driver module."""

    cupy: ModuleType
    runtime: Any
    driver: Any
    nccl: Any
    bindings: Any


@cache
def cuda_libraries() -> Gpu:
    """Load the libraries. Raises EngineError that names everything that is missing."""
    lacking = missing()
    if lacking:
        raise EngineError(f"the CUDA backend cannot be used here: {'; '.join(lacking)}")
    import cupy
    from cuda.bindings import driver as bindings
    from cupy.cuda import driver, nccl, runtime

    return Gpu(cupy, runtime, driver, nccl, bindings)


def missing() -> list[str]:
    """List the reasons why this machine cannot use CUDA, a sentence each."""
    lacking = []
    try:
        import cupy
    except Exception as error:  # a half-installed CuPy raises other exceptions than ImportError
        return [f"CuPy cannot be imported ({_reason(error)}); install qccl[cuda12] or qccl[cuda13]"]
    if tuple(map(int, cupy.__version__.split(".")[:2])) < CUPY_VERSION:
        lacking.append(f"CuPy is {cupy.__version__}, and {'.'.join(map(str, CUPY_VERSION))} or newer is needed")
    lacking += _missing_nvrtc() + _missing_nccl()
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        lacking.append(f"cuda-python cannot be imported ({_reason(error)}); install qccl[cuda12] or qccl[cuda13]")
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            lacking.append("there is no CUDA device")
        elif not lacking:
            lacking += _too_new(cupy)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        lacking.append(f"there is no CUDA driver, or none new enough, or no device ({error})")
    return lacking


def _reason(error: Exception) -> str:
    """The line of an error that names the library's own error, or the first line: CuPy raises pages of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip("= ")]
    named = [line for line in lines if "Error" in line]
    return (named[-1:] or lines[:1] or [type(error).__name__])[0]


def _missing_nvrtc() -> list[str]:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        return [
            f"CuPy cannot load NVRTC ({_reason(error)}); install nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for "
            "CUDA 13"
        ]
    return []


def _too_new(cupy: ModuleType) -> list[str]:
    """The GPUs for which NVRTC compiles no code, such as a B200 with NVRTC before 12.8."""
    nvrtc, ask = cupy.cuda.nvrtc, cupy.cuda.runtime.getDeviceProperties
    newest = max(nvrtc.getSupportedArchs())
    found = []
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        properties = ask(device)
        capability = 10 * properties["major"] + properties["minor"]
        if capability > newest:
            found.append(
                f"GPU {device} ({properties['name'].decode()}) has the compute capability {capability / 10}, and NVRTC "
                f"{'.'.join(map(str, nvrtc.getVersion()))} compiles for {newest / 10} at most; install "
                f"nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc, 12.8 or newer for 10.0 and 12.0, 12.9 for others"
            )
    return found


def _missing_nccl() -> list[str]:
    try:
        from cupy.cuda import nccl

        version = nccl.get_version() if nccl.available else 0
    except Exception as error:
        return [f"CuPy cannot load NCCL ({_reason(error)}); install nvidia-nccl-cu12 or nvidia-nccl-cu13"]
    if version == 0:
        return ["CuPy finds no NCCL; install nvidia-nccl-cu12 or nvidia-nccl-cu13"]
    if version < NCCL_VERSION:
        return [f"NCCL is {version // 10000}.{version // 100 % 100}, and 2.18 or newer is needed"]
    return []


def nccl_version() -> str:
    """The version of the NCCL that is loaded, e.g. "2.28.3"."""
    return _dotted(cuda_libraries().nccl.get_version())


def part_versions() -> dict[str, str]:
    """The version of each library that the backend uses, or why it cannot be loaded. Needs no GPU."""
    try:
        import cupy
        from cupy.cuda import nccl, nvrtc, runtime
    except Exception as error:
        return {"CuPy": f"none ({_reason(error)})"}

    return {
        "CuPy": cupy.__version__,
        "cuda-python": _version(lambda: importlib.metadata.version("cuda-bindings")),
        "NCCL": _version(lambda: _dotted(nccl.get_version())),
        "NVRTC": _version(lambda: ".".join(map(str, nvrtc.getVersion()))),
        "driver for CUDA": _version(lambda: _driver_version(runtime.driverGetVersion())),
    }


def _version(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:
        return f"none ({_reason(error)})"


def _driver_version(version: int) -> str:
    """The driver's number of the newest CUDA that it runs, e.g. 12090, as "12.9"."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def _dotted(version: int) -> str:
    """NCCL's number of a version, e.g. 22803, as "2.28.3"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def device_names() -> list[str]:
    """The names of the GPUs that can be used, in their order."""
    runtime = cuda_libraries().runtime
    return [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]


def hardware_of(device: int) -> str:
    """The hardware and software that calls' times depend on: the name of a GPU, and the version of NCCL."""
    return f"{cuda_libraries().runtime.getDeviceProperties(device)['name'].decode()}, NCCL {nccl_version()}"


def device_count() -> int:
    """The number of GPUs that can be used; 0 if CUDA cannot be used."""
    return 0 if missing() else int(cuda_libraries().runtime.getDeviceCount())


def pick_device(device: int | None, local_rank: int | None) -> int:
    """The GPU of this rank: ``device``, or the GPU with the number of the rank on its machine, or the current GPU.

    If a launcher shows each rank only its own GPU, this one is taken. Raises ArgumentError, EngineError.
    """
    runtime = cuda_libraries().runtime
    count = runtime.getDeviceCount()
    if device is not None:
        if not 0 <= device < count:
            raise ArgumentError(f"device={device} does not exist; this process sees GPUs 0 to {count - 1}")
        return device
    if local_rank is None:
        return int(runtime.getDevice())
    if count == 1:
        return 0
    if local_rank >= count:
        raise EngineError(
            f"rank {local_rank} of this machine has no GPU of its own: there are {count}; start fewer ranks, or choose "
            f"with device="
        )
    return local_rank


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make ``device`` the thread's current GPU, as its calls need, and afterwards restore the thread's context.

    It restores the context, not the device: in a thread without a context setDevice(0) would make one, which takes
    534 MiB on an H100 for each rank of the machine.
    """
    gpu = cuda_libraries()
    runtime, driver = gpu.runtime, gpu.bindings
    if runtime.getDevice() == device:
        runtime.setDevice(device)  # a thread that has made no call yet has no context
        yield
        return
    _, before = driver.cuCtxGetCurrent()
    runtime.setDevice(device)
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(before)


def as_qccl_error(error: BaseException) -> QcclError | None:
    """Turn an exception of CuPy into one of qccl's, with the library's text and code; None for other exceptions."""
    gpu = cuda_libraries()
    if isinstance(error, KeyError) and error.args in _NAMELESS:
        return EngineError(f"NCCL failed with code {error.args[0]}, which CuPy has no name for", error.args[0])
    if isinstance(error, gpu.cupy.cuda.compiler.CompileException):
        return EngineError(f"the kernels cannot be compiled for this GPU by the NVRTC that is installed: {error}")
    if isinstance(error, gpu.cupy.cuda.memory.OutOfMemoryError):
        return EngineError(f"there is not enough free memory on the GPU ({error})")
    if isinstance(error, gpu.nccl.NcclError):
        if error.status == _NCCL_REMOTE_ERROR:
            return PeerLost(f"NCCL lost a rank ({error})")
        return EngineError(f"NCCL: {error}", error.status)
    if isinstance(error, gpu.runtime.CUDARuntimeError | gpu.driver.CUDADriverError):
        return EngineError(f"CUDA: {error}{_CAPTURE_ADVICE * (error.status in _CAPTURE_ERRORS)}", error.status)
    if isinstance(error, RuntimeError) and "invalidated the capture" in str(error):  # of CuPy's streamIsCapturing()
        return EngineError(f"CuPy: {error}{_CAPTURE_ADVICE}")
    return None


def no_room(
    device: int, nbytes: int, what: str, reason: str, advice: str = "smaller chunks (chunk=) need less workspace"
) -> EngineError:
    """The error of an allocation of ``nbytes`` for ``what``, with what holds the memory, and what to do."""
    gpu = cuda_libraries()
    with on_device(device):
        free, total = gpu.runtime.memGetInfo()
        pool = gpu.cupy.get_default_memory_pool()
        held, used = pool.total_bytes(), pool.used_bytes()
    does = "torch.cuda.empty_cache() gives back what PyTorch holds and does not use" if "torch" in sys.modules else ""
    return EngineError(
        f"GPU {device} has no room for {what}: {nbytes} bytes were asked for, {free} of its {total} are free, and "
        f"CuPy's pool holds {held}, of which {used} are used "
        f"{'; '.join(filter(None, [f'({reason})', does, advice]))}"
    )


def raise_translated(error: BaseException) -> NoReturn:
    """Raise an exception of CuPy as one of qccl's, and any other as it is."""
    ours = as_qccl_error(error)
    if ours is None:
        raise error
    raise ours from error


class _Translated:
    """Raises exceptions of CuPy as qccl's. A class, because entering a generator would take three times as long."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        ours = as_qccl_error(error) if isinstance(error, Exception) else None
        if ours is not None:
            raise ours from error


#: inside, exceptions of CuPy are raised as qccl's
translated = _Translated()


def check_status(answer: tuple[Any]) -> None:
    """Raise an error of cuda-python's driver module as CuPy does."""
    (status,) = answer
    if status:
        raise cuda_libraries().driver.CUDADriverError(int(status))


def event_status(event: int) -> int:
    """0, NOT_READY or the error of the work before an event. Other threads can run, and captures stay intact."""
    with relaxed() as driver:
        return int(driver.cuEventQuery(event)[0])


def stream_status(stream: int) -> int:
    """0, NOT_READY or the error of a stream's work. Other threads can run, and captures stay intact."""
    with relaxed() as driver:
        return int(driver.cuStreamQuery(stream)[0])


@contextmanager
def relaxed() -> Iterator[Any]:
    """Yield the driver module; meanwhile this thread's calls cannot invalidate another thread's stream capture."""
    driver = cuda_libraries().bindings
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    try:
        yield driver
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def bounded(device: int | None, timeout: float, what: str, fn: Callable[[], _T]) -> _T:
    """Call ``fn``, which may block for ever, on a thread of its own, with ``device`` as the current GPU unless None.

    Raises CollectiveTimeout when it takes too long. The thread is then left behind: nothing else can be done about a
    library that has no timeout. When the interpreter is ending and starts no threads, the caller itself calls ``fn``.
    """
    outcome: list[tuple[_T | None, BaseException | None]] = []

    def run() -> None:
        try:
            if device is not None:
                cuda_libraries().runtime.setDevice(device)
            outcome.append((fn(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=f"qccl {what}", daemon=True)
    try:
        threads.start(thread)
    except EngineError:
        run()
    else:
        thread.join(timeout)
    if not outcome:
        raise CollectiveTimeout(f"not every rank came to {what} within {timeout} s")
    result, error = outcome[0]
    if error is not None:
        raise_translated(error)
    return result  # type: ignore[return-value]


def wait_for(event: int, deadline: Deadline, what: str, check: Callable[[], None]) -> None:
    """Wait for an event until ``deadline``, and let ``check`` raise what went wrong meanwhile."""
    nap = 20e-6
    while (status := event_status(event)) == NOT_READY:
        check()
        if deadline.is_over:
            raise CollectiveTimeout(f"{what} did not end in time")
        time.sleep(nap)
        nap = min(2 * nap, 1e-3)
    if status:
        raise_translated(cuda_libraries().runtime.CUDARuntimeError(status))
