"""Faults that are planted in lines of the kernels' PTX that run are found, all of them."""

from __future__ import annotations

import functools
import random

import pytest
from kernel_cases import Case, Operations
from nvrtc import Nvrtc
from planted_faults import Bench
from ptx_emulator import PtxEmulator

from qccl import codecs, dtypes

pytestmark = pytest.mark.starts_first


@functools.cache
def bench(spec: str) -> Bench:
    """The kernels of a codec for float32."""
    try:
        library = Nvrtc(13)
    except FileNotFoundError as error:
        pytest.skip(f"{error} (extra 'nvrtc')")
    operations = Operations(Case(codecs.get(spec), dtypes.FLOAT32, "sum", True))
    return Bench(PtxEmulator(library, [name for each in operations.launches for name in each.kernels]), operations)


def check(specs: tuple[str, ...], seed: int, least: int) -> None:
    results = [result for spec in specs for result in bench(spec).plants(random.Random(seed))]
    assert len(results) >= least
    assert not [(place, line) for place, line, found in results if found is None]


def test_faults_planted_in_the_kernels_of_randomk_are_found() -> None:
    check(("randomk:k=3,block=16",), 1, 20)


@pytest.mark.every_arch
@pytest.mark.parametrize("seed", [1, 2])
def test_faults_planted_in_the_kernels_of_several_codecs_are_found(seed: int) -> None:
    check(("topk:k=3,block=16", "randomk:k=3,block=16", "onebit:bucket=16"), seed, 60)
