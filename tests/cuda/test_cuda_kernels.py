"""The CUDA kernels, emulated on the host, against the host's kernels and the oracle: byte for byte.

Twice: their source, compiled for the host (emulator.py), and with ``-m every_arch`` the PTX that NVRTC makes of it
(ptx_emulator.py): one case of each QCCL_PTX_EVERY (20), because NVRTC takes most of the time.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import kernel_calls
import numpy as np
import ptx_emulator
import pytest
from codec_table import oracle_of
from emulator import Emulator
from kernel_cases import BUCKETED, CASES, Case, Operations, Runs
from nvrtc import Nvrtc
from spans import Arrays

from qccl import codecs, dtypes
from qccl.codecs import MinMax, Trellis
from qccl.cuda import source as cuda_source
from qccl.schedule import Decode

pytestmark = pytest.mark.starts_first

HEADERS = Path(cuda_source.__file__).parent.parent / "kernels"
DEVICE_HEADERS = sorted((*HEADERS.glob("cuda/*.h"), *HEADERS.glob("codecs/*/device.h")))
#: not __syncwarp(kAllLanes), which precedes reading addresses: without it the emulation would crash
SYNCHRONISATION = re.compile(r"__sync(?:threads|warp)\(\);")


#: a codec with as many outliers as there may be
OUTLIERS = next(each for each in BUCKETED if isinstance(each, Trellis) and each.outliers == 16)
#: the cases whose PTX is executed: some, and those of OUTLIERS
EVERY = int(os.environ.get("QCCL_PTX_EVERY", "20"))
PTX_CASES = [case for i, case in enumerate(CASES) if i % EVERY == 0 or case.codec == OUTLIERS]


@pytest.fixture(scope="module", params=["source", pytest.param("ptx", marks=pytest.mark.every_arch)])
def kind(request: pytest.FixtureRequest) -> str:
    """What is emulated."""
    return request.param


@pytest.fixture(scope="module")
def prepared(kind: str) -> dict[Case, Operations]:
    return {case: Operations(case) for case in (PTX_CASES if kind == "ptx" else CASES)}


@pytest.fixture(scope="module")
def emulator(kind: str, prepared: dict[Case, Operations], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    names = [name for each in prepared.values() for launch in each.launches for name in launch.kernels]
    if kind == "ptx":
        return ptx_emulator.PtxEmulator(nvrtc_13(), names)
    return Emulator(names, tmp_path_factory.mktemp("kernels"))


def nvrtc_13() -> Nvrtc:
    try:
        return Nvrtc(13)
    except FileNotFoundError as error:
        pytest.skip(f"{error} (extra 'nvrtc')")


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(pytest.param("source", case, id=f"source-{case}") for case in CASES),
        *(pytest.param("ptx", case, id=f"ptx-{case}", marks=pytest.mark.every_arch) for case in PTX_CASES),
    ],
    indirect=["kind"],
    scope="module",
)
def test_bytes_are_the_hosts(kind: str, emulator: Runs, prepared: dict[Case, Operations], case: Case) -> None:
    prepared.pop(case).check(emulator)


def test_of_two_outliers_for_an_element_the_first_is_valid(emulator: Runs) -> None:
    """Also several outliers of one thread, and NaNs and other words that no encoder makes; the last bucket is short."""
    rng, count = np.random.default_rng(5), 2100
    codec = OUTLIERS
    distances = np.linspace(-9, 9, 16, dtype=np.float32)
    distances[[0, 6, 12]] = 0, np.inf, -0.0  # a zero of either sign marks an unused word
    nan = np.array([0xFFC55800], np.uint32)
    distances[[4]] = nan.view(np.float32)
    elements = np.array([7, 7, 4, 5, 6, 132, 1023, 51, 52, 7, 0, 0, 900, 900, 2047, 4], np.uint32)
    wire = codec.encode(rng.standard_normal(count).astype(np.float32))
    first, second, third = wire.size - np.array([2 * 104 + 76, 104 + 76, 76])  # the meta sections of the buckets
    for begin in (first, third):
        wire[begin + 8 : begin + 72] = (elements << 21 | distances.view(np.uint32) >> 11).view(np.uint8)
    wire[second : second + 4] = nan.view(np.uint8)  # the centre
    for accumulate in (False, True):
        arrays, before = Arrays(True, rng), rng.standard_normal(count).astype(np.float32)
        op = Decode(codec, arrays.add(wire), arrays.add(before), accumulate)
        emulator.run(cuda_source.launch([op], 0, dtypes.FLOAT32, arrays.place), arrays, 0)
        expected = kernel_calls.decode(oracle_of(codec), wire, count, "float32", before if accumulate else None)
        kernel_calls.assert_same_bits(arrays.take(op.dst, np.float32), expected, f"{accumulate=}")


def synchronisations() -> list[tuple[Path, int]]:
    """Each barrier in the headers: file and offset."""
    return [
        (path.relative_to(HEADERS), match.start())
        for path in DEVICE_HEADERS
        if path.name != "run.h"  # see test_cuda_run_kernels.py
        for match in SYNCHRONISATION.finditer(path.read_text())
    ]


def test_there_is_a_barrier_and_several_waits_within_warps() -> None:
    texts = "".join(path.read_text() for path in DEVICE_HEADERS)
    assert texts.count("__syncthreads();") >= 1
    assert len(synchronisations()) > 5


@pytest.mark.parametrize(("path", "offset"), synchronisations(), ids=str)
def test_a_missing_synchronisation_shows(path: Path, offset: int, tmp_path: Path) -> None:
    headers = tmp_path / "kernels"
    shutil.copytree(HEADERS, headers, ignore=shutil.ignore_patterns("host"))
    text = (headers / path).read_text()
    (headers / path).write_text(text[:offset] + SYNCHRONISATION.sub("", text[offset:], count=1))
    # values and codes go through shared memory, a bucket takes a block, and no shuffle hides a missing barrier
    codec = codecs.OneBit(1032, "mean") if path.name == "team.h" else MinMax(6, 8192, "nearest")
    case = Case(codec, dtypes.FLOAT32, "sum", aligned=False)
    reduce = Operations(case).launches[3]
    emulator = Emulator(reduce.kernels, tmp_path, headers)
    for seed in range(100):
        operations = Operations(case, seed)
        emulator.run(operations.launches[3], operations.arrays, operations.call, seed)
        if any(
            operations.arrays.take(span, expected.dtype.type).tobytes() != expected.tobytes()
            for what, span, expected in operations.expected
            if what.startswith("reduced")
        ):
            return
    pytest.fail(f"nothing shows that {path} lacks what was at {offset}")
