"""The CUDA kernels' source, compiled for the host (emulator.py), against the host's kernels: byte for byte.

test_ptx_kernels.py has the same cases for what NVRTC makes of the source.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from emulator import Emulator
from kernel_cases import CASES, Case, Operations, TwoOutliers

from qccl import codecs, dtypes
from qccl.codecs import MinMax
from qccl.cuda import source as cuda_source

pytestmark = pytest.mark.starts_first

HEADERS = Path(cuda_source.__file__).parent.parent / "kernels"
DEVICE_HEADERS = sorted((*HEADERS.glob("cuda/*.h"), *HEADERS.glob("codecs/*/device.h")))
#: not __syncwarp(kAllLanes), which precedes reading addresses: without it the emulation would crash
SYNCHRONISATION = re.compile(r"__sync(?:threads|warp)\(\);")


@pytest.fixture(scope="module")
def prepared() -> dict[Case, Operations]:
    return {case: Operations(case) for case in CASES}


@pytest.fixture(scope="module")
def emulator(prepared: dict[Case, Operations], tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    launches = [launch for each in (*prepared.values(), TwoOutliers()) for launch in each.launches.values()]
    return Emulator([name for launch in launches for name in launch.kernels], tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_the_hosts(emulator: Emulator, prepared: dict[Case, Operations], case: Case) -> None:
    prepared.pop(case).check(emulator)


def test_of_two_outliers_for_an_element_the_first_is_valid(emulator: Emulator) -> None:
    TwoOutliers().check(emulator)


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
    emulator = Emulator(Operations(case).launches["reduce"].kernels, tmp_path, headers)
    for seed in range(100):
        try:
            Operations(case, seed).check(emulator, ["reduce"], seed)
        except AssertionError:
            return
    pytest.fail(f"nothing shows that {path} lacks what was at {offset}")
