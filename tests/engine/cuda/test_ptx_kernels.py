"""NVRTC's PTX of the CUDA kernels, executed by an interpreter (ptx_emulator.py), against the host's bytes.

scripts/test has one kernel for each architecture, ``--all`` some cases of each codec for each, and ``-m every_arch``
all cases for sm_90. Each barrier of the kernels is taken away once, which must be a race. test_run_kernels.py has the
kernels that surround each run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_cases import CASES, Case, EncodedCodes, Operations, TwoOutliers
from ptx_emulator import ARCHITECTURES, HEADERS, Fault, PtxEmulator, changed, nvrtc_13
from state_cases import COMMITS, STATE_CASES, AnyCase, StateCase, prepared

from qccl import codecs
from qccl.base.dtypes import BFLOAT16, FLOAT32
from qccl.codecs import MinMax, OneBit

pytestmark = [pytest.mark.starts_first, pytest.mark.processes]


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
        state.setdefault(codecs.get(each.spec).name, []).append(each)
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


@pytest.mark.slow
def test_codes_of_nvfp4_without_their_number() -> None:
    """The wire of an Encoded, which is decoded alone and times a tensor scale."""
    EncodedCodes().check(emulator(ARCHITECTURES[0]))


def test_each_kernel_is_among_them() -> None:
    kernels = re.compile(r"__global__ void(?: __launch_bounds__\(.*\)(?: *//.*)?)?\s+(\w+)\(")
    headers = {*HEADERS.glob("cuda/*.h")} - {HEADERS / "cuda" / "run.h"}
    known = {name for file in headers for name in kernels.findall(file.read_text())}
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


SYNCHRONISATION = re.compile(r"__sync(?:threads|warp)\((?:kAllLanes)?\);")
#: a header, and the place of one of its barriers
SYNCHRONISATIONS = [
    pytest.param(path, *match.span(), id=f"{path.name}-{path.read_text()[: match.start()].count(chr(10)) + 1}")
    for path in sorted((*HEADERS.glob("cuda/*.h"), *HEADERS.glob("codecs/*/device.h")))
    if path.name != "run.h"  # see test_run_kernels.py
    for match in SYNCHRONISATION.finditer(path.read_text())
]


def test_barriers_of_blocks_and_of_warps_are_taken_away() -> None:
    found = [path.read_text()[begin:end] for path, begin, end in (each.values for each in SYNCHRONISATIONS)]
    assert "__syncthreads();" in found and found.count("__syncwarp();") > 5


@pytest.mark.slow
@pytest.mark.parametrize(("path", "begin", "end"), SYNCHRONISATIONS)
def test_a_missing_synchronisation_is_a_race(path: Path, begin: int, end: int, tmp_path: Path) -> None:
    # values and codes go through shared memory, a bucket takes a block, and no shuffle hides a missing barrier
    codec = OneBit(1032, "mean") if path.name == "team.h" else MinMax(6, 8192, "nearest")
    text = path.read_text()[:end]
    emulator = changed(tmp_path / "kernels", path.relative_to(HEADERS), text, text[:begin])
    with pytest.raises(Fault, match=r"^race"):
        for seed in range(4):  # the addresses differ: some arrays are copied through shared memory
            Operations(Case(codec, FLOAT32, "sum", aligned=False), seed).check(emulator, ["reduce"])
