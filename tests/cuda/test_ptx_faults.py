"""Faults that are planted in the PTX of every codec's kernels are found, by what is expected of each kind."""

from __future__ import annotations

import functools
import re

import pytest
from kernel_cases import Case, Operations
from nvrtc import Nvrtc
from planted_faults import KINDS, PLANTS, Bench
from ptx_emulator import PtxEmulator

from qccl import codecs, dtypes
from qccl.codecs import MinMax, NoCodec

CASES = {
    "none": Case(NoCodec(), dtypes.BFLOAT16, "sum", True),
    "minmax in blocks": Case(MinMax(6, 8192, "nearest"), dtypes.FLOAT32, "sum", True),
    "minmax in warps": Case(MinMax(4, 1024, "stochastic", 3), dtypes.BFLOAT16, "avg", True),
    "minmax in two passes": Case(MinMax(8, 20_000, "nearest"), dtypes.FLOAT16, "max", True),
    **{
        name: Case(codecs.get(name), dtype, "sum", True)
        for name, dtype in (
            ("cast:dtype=float8_e4m3", dtypes.FLOAT32),
            ("dithering:k=15", dtypes.FLOAT16),
            ("onebit", dtypes.BFLOAT16),
            ("randomk:k=0.1", dtypes.FLOAT32),
            ("topk:k=0.1", dtypes.FLOAT32),
            ("trellis2", dtypes.FLOAT32),
        )
    },
}


@functools.cache
def bench(name: str) -> Bench:
    try:
        library = Nvrtc(13)
    except FileNotFoundError as error:
        pytest.skip(f"{error} (extra 'nvrtc')")
    operations = Operations(CASES[name])
    kernels = [kernel for launch in operations.launches for kernel in launch.kernels]
    return Bench(PtxEmulator(library, kernels), operations)


@functools.cache
def findings(name: str, kind: str) -> dict[str, str]:
    """What is found of each kind of fault that a kernel has a place for."""
    every = {plant.name: bench(name).find(plant, kind) for plant in PLANTS}
    return {plant: found for plant, found in every.items() if found is not None}


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each == "reduce" else pytest.mark.every_arch) for each in KINDS]
)
@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_found(name: str, kind: str) -> None:
    expected = {plant.name: plant.finding for plant in PLANTS}
    missed = {plant: found for plant, found in findings(name, kind).items() if not re.search(expected[plant], found)}
    assert not missed


def test_each_kind_of_fault_was_planted() -> None:
    planted = [plant for name in CASES for plant in findings(name, "reduce")]
    assert set(planted) == {plant.name for plant in PLANTS}
    assert len(planted) >= 30
