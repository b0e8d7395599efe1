"""The kernels of kernels/cuda/run.h, which surround each run: their PTX for each architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import ARCHITECTURES, HEADERS, Fault, PtxEmulator, changed, nvrtc_13

from qccl.base.arrays import EXPONENT_BITS
from qccl.engine.cuda import source as cuda_source

pytestmark = pytest.mark.processes

#: of each type, the largest finite number, and a number that is not finite
_BITS = {"float32": (0x7F7FFFFF, 0xFF800000), "float16": (0x7BFF, 0x7E00), "bfloat16": (0x7F7F, 0x7F80)}
BEGIN, END, NONFINITE = cuda_source.BEGIN_KERNEL, cuda_source.END_KERNEL, cuda_source.NONFINITE_KERNEL
_TYPES = {"Q": np.uint64, "I": np.uint32}
#: what each kernel takes: P a pointer to an array, Q and I integers of 64 and 32 bits, V an array by value
_SIGNATURES = {BEGIN: "PQIPI", NONFINITE: "PQIIPI", cuda_source.ADDRESS_KERNEL: "PVI", END: "VPIPII"}


def run(
    kernels: PtxEmulator, name: str, *arguments: object, blocks: int = 1, seed: int = 0,
    reached: Sequence[np.ndarray] = (),
) -> None:  # fmt: skip
    """Run a kernel. ``reached``: arrays that it reaches by addresses among its arguments' content."""
    values: list[np.ndarray | np.generic] = []
    for kind, given in zip(_SIGNATURES[name], arguments, strict=True):
        if kind == "P":
            values.append(np.uint64(given.ctypes.data if isinstance(given, np.ndarray) else 0))
        else:
            values.append(given if isinstance(given, np.ndarray) else _TYPES[kind](given))
    pointed = [each for each in arguments if isinstance(each, np.ndarray)]
    memory = [*reached, *(each for each in pointed if not any(np.shares_memory(each, other) for other in reached))]
    known = [(each.ctypes.data, each.nbytes, True, True) for each in memory]
    threads = 1 if name == BEGIN else cuda_source.THREADS
    kernels.execute([name], values, known, blocks=blocks, threads=threads, seed=seed)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> PtxEmulator:
    return PtxEmulator(nvrtc_13(), arch=request.param)


def end(
    kernels: PtxEmulator, flags: np.ndarray, *, replay: int = 0, number: int = 7, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Two buffers of ones, of which the second is a result, after the last kernel of a run."""
    buffers = np.ones(1000, np.float32), np.ones(1001, np.float32)
    memory = np.zeros(cuda_source.MEMORY_WORDS, np.uint64)
    memory[:2] = [buffer.ctypes.data for buffer in buffers]
    sizes = np.array([0, 4 * 1000], np.uint64)
    run(kernels, END, memory, sizes, replay, flags, number, 2, seed=seed, reached=[buffers[1][:1000]])
    return buffers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("count", "bad"), [(1, []), (1, [0]), (1000, [999]), (5000, [4000, 300, 2500]), (5000, [])])
def test_the_first_nonfinite_element(kernels: PtxEmulator, dtype: str, count: int, bad: list[int]) -> None:
    """Also where several threads find one; the largest finite number is none."""
    exponent, largest, wrong = EXPONENT_BITS[dtype], *_BITS[dtype]
    bits = np.full(count, largest, "u4" if dtype == "float32" else "u2")
    bits[bad] = wrong
    for blocks in (1, 3):
        first = np.array([2**64 - 1], np.uint64)
        run(kernels, NONFINITE, bits, count, bits.itemsize, exponent, first, blocks, blocks=blocks, seed=5)
        assert first[0] == (min(bad) if bad else 2**64 - 1)


@pytest.mark.parametrize(("replay", "flags"), [(0, [0, 7, 7]), (1, [0, 3, 3])])
def test_a_run_tells_the_host_its_number_and_a_replay_nothing(
    kernels: PtxEmulator, replay: int, flags: list[int]
) -> None:
    found, words = np.array([0, 3, 3], np.uint32), np.array([0, 5], np.uint64)
    run(kernels, BEGIN, words, 100, replay, found, 7)
    assert list(words) == ([105, 6] if replay else [100, 5])
    assert all((each == 1).all() for each in end(kernels, found, replay=replay))
    assert list(found) == flags


def test_a_run_without_random_numbers_has_no_number_to_store(kernels: PtxEmulator) -> None:
    found = np.zeros(3, np.uint32)
    run(kernels, BEGIN, None, 100, 0, found, 7)
    assert list(found) == [0, 7, 0]


@pytest.mark.parametrize("count", [0, 1, 300, cuda_source.ADDRESSES])
def test_addresses_are_stored_in_the_table(kernels: PtxEmulator, count: int) -> None:
    values = np.random.default_rng(count).integers(0, 2**64, cuda_source.ADDRESSES, np.uint64)
    table = np.zeros(cuda_source.ADDRESSES, np.uint64)
    run(kernels, cuda_source.ADDRESS_KERNEL, table, values, count)
    assert np.array_equal(table[:count], values[:count]) and not table[count:].any()


def test_results_whose_addresses_are_in_the_table_are_poisoned() -> None:
    kernels = PtxEmulator(nvrtc_13(), options=[cuda_source.MANY_BUFFERS])
    count = cuda_source.DIRECT_BUFFERS + 2
    buffers = np.ones((count, 100), np.float32)
    addresses = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
    memory, flags = np.zeros(cuda_source.MEMORY_WORDS, np.uint64), np.array([1, 7, 3], np.uint32)
    memory[: cuda_source.DIRECT_BUFFERS] = addresses[: cuda_source.DIRECT_BUFFERS]
    table = addresses[cuda_source.DIRECT_BUFFERS :].copy()
    memory[cuda_source.TABLE_WORD] = table.ctypes.data
    sizes = np.zeros(count, np.uint64)
    sizes[[0, count - 1]] = 400
    run(kernels, END, memory, sizes, 0, flags, 7, count, reached=[table, buffers])
    assert np.isnan(buffers[[0, -1]]).all() and (buffers[1:-1] == 1).all()


@pytest.mark.parametrize("replay", [0, 1])
def test_results_are_poisoned_after_a_failure(kernels: PtxEmulator, replay: int) -> None:
    source, result = end(kernels, np.array([1, 7, 3], np.uint32), replay=replay)
    assert (source == 1).all() and np.isnan(result[:-1]).all() and result[-1] == 1


def end_within_a_result(kernels: PtxEmulator, seed: int = 0) -> np.ndarray:
    """The flags after a failed run whose result they are part of, so that a write to the result may hide the end."""
    result = np.ones(1000, np.uint32)
    flags = result[500:503]
    flags[:] = [1, 7, 3]
    memory, sizes = np.zeros(cuda_source.MEMORY_WORDS, np.uint64), np.zeros(2, np.uint64)
    memory[0], sizes[0] = result.ctypes.data, result.nbytes
    run(kernels, END, memory, sizes, 0, flags, 7, 2, seed=seed, reached=[result])
    return flags


def test_the_host_hears_of_the_end_after_the_last_write(kernels: PtxEmulator) -> None:
    for seed in range(20):
        assert end_within_a_result(kernels, seed)[2] == 7


@pytest.mark.parametrize("which", [0, 1])
def test_without_either_barrier_there_is_a_race(which: int, tmp_path: Path) -> None:
    """Without the first, of whether the communicator has failed; without the second, of the results and the end."""
    header, barrier = "cuda/run.h", "__syncthreads();"
    before = barrier.join((HEADERS / header).read_text().split(barrier)[: which + 1])
    kernels = changed(tmp_path / "kernels", header, before + barrier, before)
    with pytest.raises(Fault, match=r"race|never set"):
        end_within_a_result(kernels)
