"""Estimates the time of all-reduce on 8 GPUs with NVLink, for docs/one-kernel.md: ``python bench/nvlink.py``.

Nothing here is measured with qccl. The constants are those of data sheets and of NCCL's source; those marked as assumed
are to be replaced when a machine is at hand. Each time is a fixed latency, and the longest of what can overlap.
"""

from __future__ import annotations

from qccl.bench.sizes import format_size
from qccl.codecs import MinMax
from qccl.dtypes import BFLOAT16, FLOAT32, DType

RANKS = 8
#: bytes/s of a GPU in each direction: what NCCL takes as attainable of the data sheet's 450 GB/s of an H100
#: (src/sym_kernels.cc, nvlinkBws)
LINK = 360e9
#: bytes/s of memory: 85% of the data sheet's 3.35 TB/s
MEMORY = 0.85 * 3.35e12
#: instructions/s of 32 SMs out of 132, each with 128 lanes at 1.7 GHz
ISSUE = 32 * 128 * 1.7e9
#: instructions for each element, assumed until they are counted from machine code
ENCODE, DECODE = 8, 5

#: seconds of a small all-reduce of NCCL in one node (measured by others: yifuwang/symm-mem-recipes, pull request 3)
NCCL = 22e-6
#: the same with symmetric windows (NCCL's src/sym_kernels.cc, baseLat)
NCCL_SYMMETRIC = 7.8e-6
#: two waits for peers cost the kernel what they cost NCCL's; with one wait: assumed
TWO_SHOT, ONE_SHOT = NCCL_SYMMETRIC, 6e-6
#: three launches, two groups of sends and receives, four waits for events; assumed
QCCL = 3 * 3e-6 + 2 * 5e-6 + 4 * 1.5e-6
#: codes of a shard, in bytes, from which on the call over NCCL has three chunks that overlap; assumed
CHUNKED = 2 << 20

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)


def ring(nbytes: int) -> float:
    """Seconds of NCCL's ring: each GPU sends and receives 2 (n-1)/n of the vector."""
    return NCCL + 2 * (RANKS - 1) / RANKS * nbytes / LINK


def nvls(nbytes: int) -> float:
    """Seconds of NCCL's NVLS in symmetric windows: switches add and multicast, so a GPU sends and receives 1 + 1/n."""
    return NCCL_SYMMETRIC + (1 + 1 / RANKS) * nbytes / LINK


def over_nccl(count: int, dtype: DType, bits: int) -> float:
    """Seconds of qccl's two_round over NCCL's sends and receives."""
    values, codes = count * dtype.itemsize, _encoded(count, dtype, bits)
    link = 2 * (RANKS - 1) / RANKS * codes / LINK
    kernels = (2 * values + 3 * codes) / MEMORY
    chunks = 3 if codes / RANKS >= CHUNKED else 1
    return QCCL + max(link, kernels) + min(link, kernels) / chunks


def in_one_kernel(count: int, dtype: DType, bits: int) -> float:
    """Seconds of the proposed kernel, with one_shot or two_shot, whichever takes less."""
    codes, memory = _encoded(count, dtype, bits), 2 * count * dtype.itemsize / MEMORY
    once = max((RANKS - 1) * codes / LINK, count * (ENCODE + RANKS * DECODE) / ISSUE, memory)
    decoded = (2 * RANKS - 1) / RANKS
    twice = max(2 * (RANKS - 1) / RANKS * codes / LINK, count * (ENCODE + decoded * DECODE) / ISSUE, memory)
    return min(ONE_SHOT + once, TWO_SHOT + twice)


def table(dtype: DType) -> str:
    """The estimates in microseconds, as a Markdown table."""
    rows = [("vector", "ring", "NVLS", "`minmax8` over NCCL", "`minmax8` in one kernel", "`minmax4` in one kernel")]
    rows.append(("---",) * len(rows[0]))
    for nbytes in SIZES:
        count = nbytes // dtype.itemsize
        seconds = (
            *(ring(nbytes), nvls(nbytes), over_nccl(count, dtype, 8)),
            *(in_one_kernel(count, dtype, 8), in_one_kernel(count, dtype, 4)),
        )
        rows.append((format_size(nbytes), *(f"{each * 1e6:.0f}" for each in seconds)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _encoded(count: int, dtype: DType, bits: int) -> int:
    return MinMax(bits=bits).encoded_nbytes(count, dtype)


if __name__ == "__main__":
    for each in (BFLOAT16, FLOAT32):
        print(f"{each}\n\n{table(each)}\n")
