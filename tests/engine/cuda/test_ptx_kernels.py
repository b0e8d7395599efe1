"""NVRTC's PTX of the CUDA kernels, executed by an interpreter (ptx_emulator.py), against the host's bytes.

scripts/test has one kernel for each architecture, ``--all`` some cases of each codec for each, and ``-m every_arch``
all cases for sm_90. test_run_kernels.py has the kernels that surround each run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_cases import CASES, Case, Operations, TwoOutliers
from ptx_emulator import ARCHITECTURES, PtxEmulator, nvrtc_13
from state_cases import COMMITS, STATE_CASES, AnyCase, StateCase, prepared

from qccl.base.dtypes import BFLOAT16
from qccl.codecs import MinMax
from qccl.engine.cuda import source as cuda_source

pytestmark = [pytest.mark.starts_first, pytest.mark.processes]

HEADERS = Path(cuda_source.__file__).parents[2] / "kernels" / "cuda"


@functools.cache
def emulator(arch: int) -> PtxEmulator:
    return PtxEmulator(nvrtc_13(), arch=arch)


@pytest.mark.quick
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_of_each_architecture(arch: int) -> None:
    """Of minmax, with bytes packed, warps that exchange, and barriers."""
    Operations(Case(MinMax(4, 64, "nearest"), BFLOAT16, "sum", aligned=False)).check(emulator(arch), ["encode"])


def sample() -> Iterator[tuple[int, AnyCase]]:
    """For each architecture a third of the codecs with their plain kernels, a third with state, in turns, and a commit.

    So over all architectures each codec has both.
    """
    plain: dict[str, list[Case]] = {}
    state: dict[str, list[StateCase]] = {}
    for case in CASES:
        plain.setdefault(case.codec.name, []).append(case)
    for each in STATE_CASES:
        state.setdefault(re.split("[:0-9]", each.spec)[0], []).append(each)
    assert plain.keys() == state.keys()
    for i, arch in enumerate(ARCHITECTURES):
        for j, name in enumerate(plain):
            if (i + j) % 3:
                cases: list[Case] | list[StateCase] = plain[name] if (i + j) % 2 else state[name]
                yield arch, cases[(7 * i + j) % len(cases)]
        yield arch, COMMITS[7 * i]


SAMPLE = list(sample())


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), SAMPLE, ids=str)
def test_some_of_each_codec_and_architecture(arch: int, case: AnyCase) -> None:
    prepared(case).check(emulator(arch))


def test_each_kernel_is_among_them() -> None:
    kernels = re.compile(r"__global__ void(?: __launch_bounds__\(.*\)(?: *//.*)?)?\s+(\w+)\(")
    known = {name for file in HEADERS.glob("*.h") if file.name != "run.h" for name in kernels.findall(file.read_text())}
    launches = [launch for _, case in SAMPLE for launch in prepared(case).launches.values()]
    found = {re.sub(r"^qccl::|<.*", "", name) for launch in launches for name in launch.kernels}
    assert {"encode", "bucket_reduce_with_state", "commit"} <= known
    assert found == known


def test_of_two_outliers_for_an_element_the_first_is_valid() -> None:
    TwoOutliers().check(emulator(90))


@pytest.mark.every_arch
@pytest.mark.parametrize("case", [*CASES, *STATE_CASES, *COMMITS], ids=str)
def test_all_on_sm_90(case: AnyCase) -> None:
    prepared(case).check(emulator(90))
