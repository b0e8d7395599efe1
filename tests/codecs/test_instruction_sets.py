"""All instruction sets make the same bytes, whatever the caller's floating-point settings."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kernel_calls
import numpy as np
import pytest
from codec_table import ALL
from kernel_calls import DTYPES, KINDS, OPS, hard_values
from oracle import MinMax, RngCounter

from qccl import _host


def results() -> Iterator[bytes]:
    """The bytes of many operations: every codec of the oracles, all element types and kinds of values."""
    rng = np.random.default_rng(0)
    parameters = itertools.product(range(1, 9), (64, 1024, "shard"), (False, True), (9,))
    codecs = [*itertools.chain.from_iterable([MinMax(*each)] * 3 for each in parameters), *ALL]
    values = itertools.product(KINDS, DTYPES)
    cases = [(codec, *each) for codec, each in zip(codecs, itertools.cycle(values))]
    cases += [(codec, "blocks apart", dtype) for codec in dict.fromkeys(codecs) for dtype in DTYPES for _ in range(4)]
    for (codec, kind, dtype), op in zip(cases, itertools.cycle(OPS)):
        counter = RngCounter(call=3, round=1, rank=2, index=(1 << 33) - 8 * (not isinstance(codec, MinMax)))
        count = 2500 if isinstance(codec, MinMax) else min(2 * codec.bucket + 13, 20_000)
        x, y = (hard_values(kind, count, dtype, rng) for _ in range(2))
        wire = kernel_calls.encode(codec, x, dtype, counter)
        yield wire.tobytes()
        for add_to in (None, y):
            yield kernel_calls.decode(codec, wire, count, dtype, add_to, counter).tobytes()
        how = {"op": op if isinstance(codec, MinMax) else "sum", "scale": 1 / 3, "encoded": True, "counter": counter}
        found = kernel_calls.reduce(codec, [wire, wire], y, 1, count, dtype, **how)
        yield from (part.tobytes() for part in found if part is not None)


def digest() -> str:
    return hashlib.sha256(b"".join(results())).hexdigest()


@pytest.fixture(scope="module")
def own_digest() -> str:
    return digest()


@pytest.mark.processes
@pytest.mark.parametrize("isa", _host.usable_isas)
def test_same_bytes_from_every_instruction_set(isa: str, own_digest: str) -> None:
    environment = os.environ | {"QCCL_ISA": isa, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [isa, own_digest]


@pytest.mark.processes
def test_unknown_instruction_set_names_the_usable_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import qccl._host"],
        env=os.environ | {"QCCL_ISA": "z80"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "QCCL_ISA=z80" in done.stderr and _host.usable_isas[0] in done.stderr


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="/proc/cpuinfo says what the processor can do")
def test_the_best_instruction_set_is_chosen() -> None:
    """Against the kernel's own list of features, not the compiler's test for them."""
    if os.environ.get("QCCL_ISA"):
        pytest.skip("QCCL_ISA is set")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    v3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    if platform.machine() == "x86_64":
        expected = "x86-64-v4" if v4 <= flags else "x86-64-v3" if v3 <= flags else "x86-64"
        assert _host.isa == expected == _host.usable_isas[0]


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="sets MXCSR through glibc's fenv_t"
)
def test_flush_to_zero_of_the_caller_changes_nothing(own_digest: str) -> None:
    """Other libraries set FTZ, DAZ or a rounding mode; the kernels set their own mode and restore the caller's."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 8)()  # fenv_t: 28 bytes of x87, then MXCSR
    libm.fegetenv(environment)
    saved = environment[7]
    codec = MinMax(4, 64)
    x = hard_values("subnormal", 500, "float32", np.random.default_rng(0))
    expected = kernel_calls.encode(codec, x, "float32", RngCounter()).tobytes()
    environment[7] = saved | 0x8040 | 0x6000  # flush to zero, denormals are zero, round toward zero
    try:
        libm.fesetenv(environment)
        wire = kernel_calls.encode(codec, x, "float32", RngCounter())
        libm.fegetenv(environment)
        kept = environment[7] & 0xE040
    finally:
        environment[7] = saved
        libm.fesetenv(environment)
    assert wire.tobytes() == expected
    assert kept == 0xE040


if __name__ == "__main__":
    print(_host.isa, digest())
