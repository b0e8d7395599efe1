"""The first and the last kernel of a run, compiled with g++: what they tell the host, and results after a failure."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qccl.arrays import EXPONENT_BITS
from qccl.cuda import source as cuda_source

#: of each type, the largest finite number, and a number that is not finite
_BITS = {"float32": (0x7F7FFFFF, 0xFF800000), "float16": (0x7BFF, 0x7E00), "bfloat16": (0x7F7F, 0x7F80)}
HEADERS = Path(cuda_source.__file__).parent.parent / "kernels"
SHIM = Path(__file__).parents[1] / "support" / "shim.h"

PROGRAM = """
#include "cuda/run.h"

extern "C" void begin(unsigned long long* words, unsigned long long value, unsigned replay, qccl::Flags* flags,
                      unsigned run) {
  qccl_begin(words, value, replay, flags, run);
}

extern "C" bool nonfinite(const void* values, qccl::u64 count, unsigned itemsize, unsigned exponent, qccl::u64* first,
                          unsigned blocks, unsigned seed) {
  return emulator::run_grid(blocks, seed, [&] { qccl_nonfinite(values, count, itemsize, exponent, first, blocks); });
}

extern "C" bool end(const qccl::Memory* memory, const qccl::u64* sizes, unsigned replay, qccl::Flags* flags,
                    unsigned run, unsigned seed, unsigned buffers) {
  return emulator::run_grid(1, seed, [&] { qccl_end(*memory, sizes, replay, flags, run, buffers); });
}
"""


def compiled(folder: Path, headers: Path = HEADERS, options: Sequence[str] = ()) -> ctypes.CDLL:
    program, library = folder / "run.cpp", folder / "run.so"
    program.write_text(PROGRAM)
    options = (*options, "-std=c++17", "-O0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror")
    command = ["g++", *options, f"-I{headers}", "-include", SHIM, program, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("run"))


def end(
    kernels: ctypes.CDLL, flags: np.ndarray, *, replay: int = 0, run: int = 7, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Two buffers of ones, of which the second is a result, after the last kernel of a run."""
    buffers = np.ones(1000, np.float32), np.ones(1001, np.float32)
    memory = np.zeros(cuda_source.MEMORY_WORDS, np.uint64)
    memory[:2] = [buffer.ctypes.data for buffer in buffers]
    sizes = np.zeros(2, np.uint64)
    sizes[1] = 4 * 1000
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (memory, sizes, flags)]
    assert kernels.end(*addresses[:2], replay, addresses[2], run, seed, 2)
    return buffers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("count", "bad"), [(1, []), (1, [0]), (1000, [999]), (5000, [4000, 300, 2500]), (5000, [])])
def test_the_first_nonfinite_element(kernels, dtype, count, bad):
    """Also where several threads find one; the largest finite number is none."""
    exponent, largest, wrong = EXPONENT_BITS[dtype], *_BITS[dtype]
    bits = np.full(count, largest, "u4" if dtype == "float32" else "u2")
    bits[bad] = wrong
    first = np.array([2**64 - 1], np.uint64)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (bits, first)]
    for blocks in (1, 3):
        first[0] = 2**64 - 1
        given = addresses[0], ctypes.c_uint64(count), bits.itemsize, exponent, addresses[1], blocks, 5
        assert kernels.nonfinite(*given)
        assert first[0] == (min(bad) if bad else 2**64 - 1)


@pytest.mark.parametrize(("replay", "flags"), [(0, [0, 7, 7]), (1, [0, 3, 3])])
def test_a_run_tells_the_host_its_number_and_a_replay_nothing(kernels, replay, flags):
    found, words = np.array([0, 3, 3], np.uint32), np.array([0, 5], np.uint64)
    kernels.begin(*map(ctypes.c_void_p, (words.ctypes.data, 100)), replay, ctypes.c_void_p(found.ctypes.data), 7)
    assert list(words) == ([105, 6] if replay else [100, 5])
    assert all((each == 1).all() for each in end(kernels, found, replay=replay))
    assert list(found) == flags


def test_a_run_without_random_numbers_has_no_number_to_store(kernels):
    found = np.zeros(3, np.uint32)
    kernels.begin(None, ctypes.c_void_p(100), 0, ctypes.c_void_p(found.ctypes.data), 7)
    assert list(found) == [0, 7, 0]


def test_results_whose_addresses_are_in_the_table_are_poisoned(tmp_path):
    kernels = compiled(tmp_path, options=[cuda_source.MANY_BUFFERS])
    count = cuda_source.DIRECT_BUFFERS + 2
    buffers = np.ones((count, 100), np.float32)
    addresses = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
    memory, flags = np.zeros(cuda_source.MEMORY_WORDS, np.uint64), np.array([1, 7, 3], np.uint32)
    memory[: cuda_source.DIRECT_BUFFERS] = addresses[: cuda_source.DIRECT_BUFFERS]
    table = addresses[cuda_source.DIRECT_BUFFERS :].copy()
    memory[cuda_source.TABLE_WORD] = table.ctypes.data
    sizes = np.zeros(count, np.uint64)
    sizes[[0, count - 1]] = 400
    given = [ctypes.c_void_p(array.ctypes.data) for array in (memory, sizes, flags)]
    assert kernels.end(*given[:2], 0, given[2], 7, 0, count)
    assert np.isnan(buffers[[0, -1]]).all() and (buffers[1:-1] == 1).all()


@pytest.mark.parametrize("replay", [0, 1])
def test_results_are_poisoned_after_a_failure(kernels, replay):
    source, result = end(kernels, np.array([1, 7, 3], np.uint32), replay=replay)
    assert (source == 1).all() and np.isnan(result[:-1]).all() and result[-1] == 1


def test_the_host_hears_of_the_end_after_the_last_write(kernels):
    """The word that tells it lies in the results here, so a later write to the results would hide it."""
    result = np.ones(1000, np.uint32)
    flags = result[500:503]
    memory, sizes = np.zeros(cuda_source.MEMORY_WORDS, np.uint64), np.zeros(2, np.uint64)
    memory[0], sizes[0] = result.ctypes.data, result.nbytes
    for seed in range(20):
        flags[:] = [1, 7, 3]
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in (memory, sizes, flags)]
        assert kernels.end(*addresses[:2], 0, addresses[2], 7, seed, 2)
        assert flags[2] == 7


def test_the_poison_is_nan_in_every_floating_type():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    ones = np.full(8, 0xFF, np.uint8)
    for dtype in (
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    ):
        assert np.isnan(ones.view(dtype).astype(np.float64)).all()


def test_without_the_barrier_some_threads_do_not_know_that_all_is_well(tmp_path):
    headers = tmp_path / "kernels"
    (headers / "cuda").mkdir(parents=True)
    for name in ("numeric.h", "cuda/jobs.h"):
        (headers / name).write_text((HEADERS / name).read_text())
    (headers / "cuda" / "run.h").write_text((HEADERS / "cuda" / "run.h").read_text().replace("__syncthreads();", ""))
    kernels = compiled(tmp_path, headers)
    for seed in range(20):
        if not (end(kernels, np.array([0, 7, 3], np.uint32), seed=seed)[1] == 1).all():
            return
    pytest.fail("the results are right without the barrier, too")
