"""The first minutes with a GPU: whether qccl works on it at all, the most decisive questions first.

Each function is a section of gpu-check's first call.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from device import DeviceArray

from qccl import codecs as qccl_codecs
from qccl.base import dtypes
from qccl.collectives.schedule import Encode, Span
from qccl.engine.cuda import source as cuda_source
from qccl.engine.cuda.libraries import cuda_libraries


def driver() -> dict[str, Any]:
    """The driver copies bytes, and NVRTC compiles a kernel that the GPU loads."""
    from qccl.engine.cuda.kernels import kernels

    runtime = cuda_libraries().runtime
    device = runtime.getDevice()
    properties = runtime.getDeviceProperties(device)
    figures: dict[str, Any] = {"compute_capability": f"{properties['major']}.{properties['minor']}"}
    figures["free_gb"], figures["memory_gb"] = (nbytes / 1e9 for nbytes in runtime.memGetInfo())
    values = np.arange(1 << 20, dtype=np.float32)
    assert np.array_equal(DeviceArray(values).get(), values), "copies to the GPU and back change the bytes"
    span = Span("values", 0, 1024)
    encode = Encode(qccl_codecs.get("minmax8"), span, Span("wire", 0, 1032), 0)
    names = cuda_source.launch([encode], 0, dtypes.FLOAT32, lambda _: (0, 0)).kernels
    begin = time.monotonic()
    kernels(device, names)
    return figures | {"compiled_and_loaded_seconds": time.monotonic() - begin}


def codecs() -> dict[str, Any]:
    """The kernels of one instance of each codec against the host's bytes, and of minmax with bfloat16."""
    import codec_kernels
    from kernel_cases import CASES

    first = {case.codec.name: number for number, case in reversed(list(enumerate(CASES)))}
    bfloat16 = (n for n, case in enumerate(CASES) if case.codec.name == "minmax" and case.dtype is dtypes.BFLOAT16)
    return codec_kernels.check_apart([*first.values(), next(bfloat16)])


def nccl() -> dict[str, Any]:
    """NCCL's all-reduce on one rank, then qccl's calls on two ranks that share this GPU."""
    import ranks

    gpu = cuda_libraries()
    values = np.arange(1000, dtype=np.float32)
    source, target = DeviceArray(values), DeviceArray(np.zeros_like(values))
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    comm = gpu.nccl.NcclCommunicator(1, gpu.nccl.get_unique_id(), 0)
    float32, add = 7, 0  # ncclDataType_t, ncclRedOp_t
    comm.allReduce(source.ptr, target.ptr, values.size, float32, add, stream.ptr)
    stream.synchronize()
    assert np.array_equal(target.get(), values), "NCCL's all-reduce of one rank is no copy"
    comm.destroy()
    return {"one rank": "its values", "two ranks": ranks.check(2)}
