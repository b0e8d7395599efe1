"""Stand-ins for PyTorch and JAX on a fake GPU: what tests/gpu/frameworks.py asks of them, on the fake's streams."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
from dlpack import Producer

_BFLOAT16_CODE, _FLOAT_CODE = 4, 2


class Tensor:
    """A tensor of PyTorch on the device, or on the host if ``array`` is of NumPy."""

    def __init__(self, torch: Torch, array: Any, producer: Any = None) -> None:
        self._torch, self._array, self._producer = torch, array, producer

    def cuda(self) -> Tensor:
        return Tensor(self._torch, fake_cuda.array(self._array))

    def cpu(self) -> Tensor:
        self._torch.world.finish(lambda: self._torch.world.is_idle(0))
        return Tensor(self._torch, self._array.values.copy())

    def numpy(self) -> np.ndarray:
        return self._array

    def view(self, code: int) -> Tensor:
        if isinstance(self._array, np.ndarray) or code != _BFLOAT16_CODE:
            return Tensor(self._torch, self._array)
        return Tensor(self._torch, self._array, Producer(self._array.values.view(np.uint16), code, device=(2, 0)))

    def t(self) -> Tensor:
        return Tensor(self._torch, self._array, Producer(self._array.values.T, _FLOAT_CODE, device=(2, 0)))

    def copy_(self, other: Tensor) -> None:
        world, target = self._torch.world, self.data_ptr()
        if isinstance(other._array, np.ndarray):
            content, nbytes = other._array.tobytes(), other._array.nbytes
            world.put(self._torch.current.cuda_stream, "copy_", lambda: ctypes.memmove(target, content, nbytes))
        else:
            source, nbytes = other.data_ptr(), other._array.values.nbytes
            world.put(self._torch.current.cuda_stream, "copy_", lambda: ctypes.memmove(target, source, nbytes))

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def data_ptr(self) -> int:
        return self._array.data.ptr

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self._array.values.nbytes)

    def __dlpack__(self, **arguments: Any) -> Any:
        return (self._producer or self._array).__dlpack__(max_version=arguments.get("max_version"))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._producer or self._array).__dlpack_device__()


class Stream:
    def __init__(self, stream: Any) -> None:
        self.cuda_stream, self.synchronize = stream.ptr, stream.synchronize


class Graph:
    def __init__(self, torch: Torch) -> None:
        self._torch = torch
        self.captured: Any = None

    def replay(self) -> None:
        self.captured.launch(SimpleNamespace(ptr=self._torch.current.cuda_stream))


class Torch:
    """The module."""

    int16, bfloat16 = _FLOAT_CODE, _BFLOAT16_CODE
    Tensor = Tensor

    def __init__(self, world: fake_cuda.World, cupy: Any) -> None:
        self.world, self._cupy = world, cupy
        self.current = Stream(cupy.cuda.Stream.null)
        self.cuda = SimpleNamespace(
            Stream=lambda: Stream(cupy.cuda.Stream()), stream=self._on, graph=self._capture,
            CUDAGraph=lambda: Graph(self), current_stream=lambda device=0: self.current, set_device=lambda device: None,
            is_initialized=lambda: True,
        )  # fmt: skip
        self.distributed = SimpleNamespace(
            HashStore=object, init_process_group=lambda *how, **more: None, destroy_process_group=lambda: None,
            all_reduce=lambda tensor: None,
        )  # fmt: skip

    def from_numpy(self, array: np.ndarray) -> Tensor:
        return Tensor(self, array)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: Graph, stream: Stream) -> Any:
        mine = self._cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, stream.cuda_stream)))
        with self._on(stream):
            mine.begin_capture()
            try:
                yield
            finally:
                graph.captured = mine.end_capture()


class JaxArray:
    """An array of JAX: it shows its memory by DLPack alone, after its work, which goes before the given stream."""

    def __init__(self, values: np.ndarray) -> None:
        self._array: Any = fake_cuda.array(values)
        self._before: Any = None

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        if self._before is not None and stream is not None:
            self._before(stream)
        return self._array.__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __array__(self, *arguments: Any, **more: Any) -> np.ndarray:
        return self._array.values

    def block_until_ready(self) -> None:
        pass


def jax() -> Any:
    """The module; a function under jit gives its argument's values."""
    return SimpleNamespace(
        devices=lambda kind: ["device"],
        device_put=lambda values, device: JaxArray(values),
        jit=lambda function: _result,
    )


def _result(x: JaxArray) -> JaxArray:
    """A new array whose values are there only after the work that is put before the consumer's stream."""
    world, values = fake_cuda.Array.world, x._array.values.copy()
    made = JaxArray(np.zeros_like(values))
    target = made._array.data.ptr
    made._before = lambda stream: world.put(
        stream, "jax", lambda: ctypes.memmove(target, values.ctypes.data, values.nbytes)
    )
    return made
