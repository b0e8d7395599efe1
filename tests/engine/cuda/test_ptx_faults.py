"""Faults that are planted in the source of the kernels are found, all of them, by the PTX machine.

| planted | by | found as |
| --- | --- | --- |
| a wrong bound, alignment, lane, conversion, value, counter, place, scale, guard or barrier (MISTAKES) | `test_a_mistake_in_the_source_is_found` | a fault of the machine, or other bytes than the host's |
| each barrier of a block or of a warp taken away | `test_a_missing_synchronisation_is_a_race` | a race |
| either barrier of the kernels around a run taken away | test_run_kernels.py | a race, or bits never set |
| in PTX written by hand: each kind of mistake that the machine reports | test_ptx_machine.py | the report of that mistake |
"""  # noqa: E501

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from kernel_cases import Case, Operations, Prepared
from ptx_emulator import HEADERS, Fault, PtxEmulator, changed, nvrtc_13
from state_cases import AnyCase, CommitCase, StateCase, prepared

from qccl import codecs
from qccl.base.dtypes import BFLOAT16, FLOAT32
from qccl.codecs import MinMax, OneBit

pytestmark = [pytest.mark.starts_first, pytest.mark.processes, pytest.mark.slow]

RANDOMK = "randomk:k=3,block=16"
DITHERED = "dithering:k=4,bucket=256,seed=4"
UNALIGNED, ALIGNED = (Case(MinMax(6, 1000, "nearest"), BFLOAT16, "sum", aligned) for aligned in (False, True))
OWN_LAST = Case(MinMax(6, 1000, "nearest"), FLOAT32, "own last", aligned=True)
ONE_BIT = Case(OneBit(1032, "mean"), FLOAT32, "sum", aligned=True)
DITHERING = Case(codecs.get(DITHERED), FLOAT32, "sum", aligned=True)
BUCKETED = StateCase(RANDOMK, FLOAT32, "an owner", FLOAT32, "normal")
SPARSE_SENDER = StateCase(RANDOMK, FLOAT32, "a sender", FLOAT32, "normal")
TILED = StateCase("minmax8:bucket=1000,rounding=stochastic,seed=6", BFLOAT16, "an owner", BFLOAT16, "normal")
SENDER = StateCase(DITHERED, FLOAT32, "a sender", BFLOAT16, "normal")
OWNER = StateCase(DITHERED, FLOAT32, "an owner", FLOAT32, "normal")
FINITE, SPOILT = CommitCase(FLOAT32, None, 0.0), CommitCase(FLOAT32, 8999, float("inf"))
AFTER_A_FAILURE = CommitCase(FLOAT32, 0, "a failure")


#: a name, what replaces a text of a header, and a case whose result is then wrong
MISTAKES = (
    ("a store beyond the unit", "cuda/tile.h", "if (row * kPerRow<T> + i / steps < unit.warp_size) to", "to",
     UNALIGNED),
    ("a load beyond the unit", "cuda/tile.h", "smaller(row * kPerRow<T> + i / steps, unit.warp_size - 1)",
     "(row * kPerRow<T> + i / steps)", UNALIGNED),
    ("wide accesses everywhere", "cuda/tile.h", "(alignment - 1)) == 0", "(alignment - 1)) >= 0", UNALIGNED),
    ("a lane is missing", "cuda/instructions.h", "kAllLanes = 0xffffffffu", "kAllLanes = 0x7fffffffu", ALIGNED),
    ("halves are swapped", "cuda/instructions.h", '"f"(second), "f"(first)', '"f"(first), "f"(second)', ALIGNED),
    ("values are cut off", "cuda/instructions.h", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32", ALIGNED),
    ("own values come first", "cuda/kernels.h", "if (k == own_index)", "if (k == 0)", OWN_LAST),
    ("a sum lacks its last term", "cuda/team.h", "i < n && i < tile", "i + 1 < n && i < tile", ONE_BIT),
    ("shared values are not reduced", "cuda/team.h", "k > most ? k", "false ? k", DITHERING),
    ("the residual is dropped", "shared/state.h", "total + residual * factor", "total", TILED),
    ("the residual of a bucket is dropped", "shared/state.h", "total + residual * factor", "total", BUCKETED),
    ("a residual is the total", "shared/state.h", "(total - decoded) * lr", "total * lr", TILED),
    ("a residual lacks the rate", "shared/state.h", "(total - decoded) * lr", "total - decoded", SENDER),
    ("the residual does not decay", "shared/state.h", "beta * (1.0f / lr)", "1.0f / lr", BUCKETED),
    ("momentum is dropped", "shared/state.h", "x + mu * next", "x", TILED),
    ("momentum lacks the old one", "shared/state.h", "mu * momentum + x", "x", SENDER),
    ("a product is fused with a sum", "shared/state.h", "mu * momentum + x", "__fmaf_rn(mu, momentum, x)", SENDER),
    ("a residual ignores rounding", "cuda/kernels.h", "out ? rounded<T>(value) : value", "value", TILED),
    ("a residual is cut off", "shared/state.h", "R::from_float((total - decoded) * lr)",
     "(typename R::Storage)(bits_of((total - decoded) * lr) >> 16)", SENDER),
    ("all buckets have one residual", "cuda/state.h", "job.residual, first)", "job.residual, 0)", BUCKETED),
    ("one new residual", "cuda/state.h", "job.new_residual, first)", "job.new_residual, 0)", BUCKETED),
    ("one momentum", "cuda/state.h", "job.momentum, first)", "job.momentum, 0)", SENDER),
    ("one random number", "cuda/state.h", "reduce.index + first", "reduce.index", SENDER),
    ("the other wire", "cuda/bucket.h", "sources[job.first_source + k]", "sources[k]", BUCKETED),
    ("the next residuals", "cuda/kernels.h", "state->residual, 0)", "state->residual, 8)", TILED),
    ("no scale", "cuda/state.h", "if (reduce.scale != 1.0f)", "if (false)", BUCKETED),
    ("no barrier before adding", "cuda/bucket.h", "neutral<Op>(); });\n  team.sync();",
     "neutral<Op>(); });", OWNER),
    ("no barrier after zeros", "cuda/state.h", "0.0f); });\n      team.sync();", "0.0f); });", SPARSE_SENDER),
    ("no barrier after encoding", "cuda/state.h", "parameters));\n  team.sync();", "parameters));", OWNER),
    ("no barrier after decoding", "cuda/state.h", "out);\n    team.sync();", "out);", BUCKETED),
    ("no wait for the job", "cuda/kernels.h", "__syncwarp(kAllLanes);", "", TILED),
    ("a commit in spite of infinity", "cuda/state.h", "if (!is_finite(", "if (false && !is_finite(", SPOILT),
    ("a commit without a look", "cuda/state.h", "if (*parameters.scratch) return;", "", SPOILT),
    ("a commit after a failure", "cuda/state.h", "&& *memory.failed", "&& false", AFTER_A_FAILURE),
    ("a commit of too much", "cuda/state.h", "rest < kCommitted ? rest : kCommitted", "kCommitted", FINITE),
    ("a commit of one half", "cuda/state.h", "copy_elements<Float32>(memory, job, first, n)",
     "copy_elements<BFloat16>(memory, job, first, n)", FINITE),
)  # fmt: skip


def ordinary(case: AnyCase) -> Prepared:
    """The operations of a case, with ordinary values: beside huge ones a wrong sum may be right."""
    return Operations(case, kinds=("normal",)) if isinstance(case, Case) else prepared(case)


@functools.cache
def right(case: AnyCase) -> None:
    """Without a mistake the case passes."""
    ordinary(case).check(PtxEmulator(nvrtc_13()))


@pytest.mark.parametrize(
    ("header", "text", "replacement", "case"), [pytest.param(*rest, id=name) for name, *rest in MISTAKES]
)
def test_a_mistake_in_the_source_is_found(
    header: str, text: str, replacement: str, case: AnyCase, tmp_path: Path
) -> None:
    right(case)
    emulator = changed(tmp_path / "kernels", header, text, replacement)
    with pytest.raises((Fault, AssertionError), match=r"line \d+, thread|differ from the host's|written outside"):
        ordinary(case).check(emulator)


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


@pytest.mark.parametrize(("path", "begin", "end"), SYNCHRONISATIONS)
def test_a_missing_synchronisation_is_a_race(path: Path, begin: int, end: int, tmp_path: Path) -> None:
    # values and codes go through shared memory, a bucket takes a block, and no shuffle hides a missing barrier
    codec = OneBit(1032, "mean") if path.name == "team.h" else MinMax(6, 8192, "nearest")
    text = path.read_text()[:end]
    emulator = changed(tmp_path / "kernels", path.relative_to(HEADERS), text, text[:begin])
    with pytest.raises(Fault, match=r"^race"):
        for seed in range(4):  # the addresses differ: some arrays are copied through shared memory
            Operations(Case(codec, FLOAT32, "sum", aligned=False), seed).check(emulator, ["reduce"])
