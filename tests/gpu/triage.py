"""The first minutes with a GPU: whether qccl works on it at all, the most decisive questions first.

Each function is a section of ``scripts/gpu-check --run triage``. ``python triage.py`` runs the kernels that the section
"profile" shows to ncu.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from device import DeviceArray
from reports import Missing

from qccl import codecs as qccl_codecs
from qccl import dtypes
from qccl.cuda import libraries
from qccl.cuda import source as cuda_source
from qccl.cuda.libraries import cuda_libraries
from qccl.schedule import Encode, Span

#: what ncu measures of each kernel, by the names of Nsight Compute's metrics
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors_percent",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "launch__registers_per_thread": "registers",
}


def driver() -> dict[str, Any]:
    """The driver copies bytes, and NVRTC compiles a kernel that the GPU loads."""
    from qccl.cuda.kernels import kernels

    runtime = cuda_libraries().runtime
    device = runtime.getDevice()
    properties = runtime.getDeviceProperties(device)
    figures: dict[str, Any] = libraries.part_versions()
    figures |= {
        "gpu": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
    }
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

    every = list(codec_kernels.cases())
    first = {case.codec.name: number for number, case in reversed(list(enumerate(every)))}
    bfloat16 = (n for n, case in enumerate(every) if case.codec.name == "minmax" and case.dtype is dtypes.BFLOAT16)
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


def rates() -> dict[str, Any]:
    """The rate of a copy, and of two kernels, beside what bench/sass.py predicts."""
    from bandwidth import first_figures

    return first_figures()


def profile() -> dict[str, Any]:
    """What Nsight Compute measures of the kernels of rates(), if it is installed and may read the counters."""
    program = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if program is None:
        raise Missing("there is no ncu in PATH or /usr/local/cuda/bin")
    command = [program, "--csv", "--metrics", ",".join(METRICS), "--kernel-name", "regex:^(encode|reduce)$"]
    command += ["--launch-count", "4", sys.executable, str(Path(__file__))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # run_apart() limits it
    figures = _measured(done.stdout)
    if not figures:
        raise Missing(f"ncu measures nothing (exit status {done.returncode}): {done.stdout[-600:]}")
    return figures


def _measured(output: str) -> dict[str, Any]:
    """The metrics of each kernel in ncu's CSV table, which follows other lines."""
    _, begin, table = output.partition('"ID",')
    figures: dict[str, Any] = {}
    for row in csv.DictReader((begin + table).splitlines()):
        name, value = METRICS.get(row.get("Metric Name") or ""), row.get("Metric Value") or ""
        number = value.replace(",", "")
        if name and re.fullmatch(r"[\d.]+", number):
            unit = f" {row['Metric Unit']}" if name == "time" else ""
            figures.setdefault(f"{row['ID']} {row['Kernel Name'].split('<')[0]}", {})[name + unit] = float(number)
    return figures


if __name__ == "__main__":
    from bandwidth import run_once

    run_once()
