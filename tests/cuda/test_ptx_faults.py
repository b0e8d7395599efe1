"""Faults that are planted in the kernels are found, all of them: in lines of PTX that run, and in the source."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_cases import CASES, Case, Operations, Prepared
from nvrtc import Nvrtc
from planted_faults import Bench
from ptx_emulator import PtxEmulator
from state_cases import CommitCase, Commits, StateCase, StateOperations

from qccl import codecs, dtypes
from qccl.cuda import source as cuda_source
from qccl.dtypes import BFLOAT16, FLOAT32

pytestmark = pytest.mark.starts_first

HEADERS = Path(cuda_source.__file__).parent.parent / "kernels"
RANDOMK = "randomk:k=3,block=16"
DITHERED = "dithering:k=4,bucket=256,seed=4"
# ordinary values: beside huge ones a wrong sum may be right
BUCKETED = StateCase(RANDOMK, FLOAT32, "an owner", FLOAT32, "normal")
SPARSE_SENDER = StateCase(RANDOMK, FLOAT32, "a sender", FLOAT32, "normal")
TILED = StateCase("minmax8:bucket=1000,rounding=stochastic,seed=6", BFLOAT16, "an owner", BFLOAT16, "normal")
SENDER = StateCase(DITHERED, FLOAT32, "a sender", BFLOAT16, "normal")
OWNER = StateCase(DITHERED, FLOAT32, "an owner", FLOAT32, "normal")
FINITE, SPOILT = CommitCase(FLOAT32, None, 0.0), CommitCase(FLOAT32, 8999, float("inf"))
AFTER_A_FAILURE = CommitCase(FLOAT32, 0, "a failure")
AnyCase = StateCase | CommitCase


def nvrtc_13() -> Nvrtc:
    try:
        return Nvrtc(13)
    except FileNotFoundError as error:
        pytest.skip(f"{error} (extra 'nvrtc')")


def prepared(case: AnyCase) -> Prepared:
    return StateOperations(case) if isinstance(case, StateCase) else Commits(case)


# -- in lines of PTX -------------------------------------------------------------------------------------------------


def of_codec(spec: str, dtype: str) -> Prepared:
    """The kernels of a codec, with ordinary values."""
    return Operations(Case(codecs.get(spec), dtypes.get(dtype), "sum", True), kinds=("normal",))


def check(benches: Iterable[Bench], seed: int, least: int, kinds: Iterable[str]) -> None:
    """All faults are found; there are at least so many, and some of each kind."""
    results = [result for bench in benches for result in bench.plants(random.Random(seed))]
    assert len(results) >= least
    assert {place.split(": ")[1] for place, _, _ in results} >= set(kinds)
    assert not [(place, line) for place, line, found in results if found is None]


@functools.cache
def bench(make: Callable[..., Prepared], *arguments: str | AnyCase) -> Bench:
    return Bench(PtxEmulator(nvrtc_13()), make(*arguments))


#: of each codec, with an element type whose kernels convert
CODECS = (
    *(("none", "bfloat16"), ("minmax8:bucket=64", "float32"), ("minmax4:bucket=64,rounding=stochastic", "bfloat16")),
    *(("cast:dtype=float8_e4m3,bucket=16", "float32"), ("cast:dtype=float16,bucket=16", "bfloat16")),
    *(("onebit:bucket=16", "float16"), ("topk:k=3,block=16", "float32"), (RANDOMK, "bfloat16"), (DITHERED, "float16")),
    ("trellis4:bucket=200,block=64", "bfloat16"),
)
KINDS = ("barrier", "bounds", "alignment", "lane", "conversion", "value")


def test_each_codec_has_planted_faults() -> None:
    assert {codecs.get(spec).name for spec, _ in CODECS} == {case.codec.name for case in CASES}


@pytest.mark.parametrize("which", [1, 7], ids=lambda which: CODECS[which][0])
def test_faults_planted_in_the_kernels_of_a_codec_are_found(which: int) -> None:
    check([bench(of_codec, *CODECS[which])], 1, 35, KINDS)


def test_faults_planted_in_kernels_with_state_are_found() -> None:
    check([bench(prepared, TILED), bench(prepared, SPOILT)], 1, 20, KINDS)


@pytest.mark.every_arch
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_faults_planted_in_the_kernels_of_each_codec_are_found(codec: tuple[str, str], seed: int) -> None:
    check([bench(of_codec, *codec)], seed, 30, KINDS)


@pytest.mark.every_arch
@pytest.mark.parametrize("seed", [2, 3])
def test_faults_planted_in_several_kernels_with_state_are_found(seed: int) -> None:
    check([bench(prepared, case) for case in (BUCKETED, TILED, SENDER, SPOILT)], seed, 40, KINDS)


# -- in the source ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """What replaces a text of a header, and a case whose result is then wrong."""

    name: str
    header: str
    text: str
    replacement: str
    case: AnyCase

    def __str__(self) -> str:
        return self.name


MISTAKES = (
    Mistake("the residual is dropped", "state.h", "total + residual * factor", "total", TILED),
    Mistake("the residual of a bucket is dropped", "state.h", "total + residual * factor", "total", BUCKETED),
    Mistake("a residual is the total", "state.h", "(total - decoded) * lr", "total * lr", TILED),
    Mistake("a residual lacks the rate", "state.h", "(total - decoded) * lr", "total - decoded", SENDER),
    Mistake("the residual does not decay", "state.h", "beta * (1.0f / lr)", "1.0f / lr", BUCKETED),
    Mistake("momentum is dropped", "state.h", "x + mu * next", "x", TILED),
    Mistake("momentum lacks the old one", "state.h", "mu * momentum + x", "x", SENDER),
    Mistake("a product is fused with a sum", "state.h", "mu * momentum + x", "__fmaf_rn(mu, momentum, x)", SENDER),
    Mistake("a residual ignores rounding", "cuda/kernels.h", "out ? rounded<T>(value) : value", "value", TILED),
    Mistake("a residual is cut off", "state.h", "R::from_float((total - decoded) * lr)",
            "(typename R::Storage)(bits_of((total - decoded) * lr) >> 16)", SENDER),
    Mistake("all buckets have one residual", "cuda/state.h", "job.residual, first)", "job.residual, 0)", BUCKETED),
    Mistake("one new residual", "cuda/state.h", "job.new_residual, first)", "job.new_residual, 0)", BUCKETED),
    Mistake("one momentum", "cuda/state.h", "job.momentum, first)", "job.momentum, 0)", SENDER),
    Mistake("one random number", "cuda/state.h", "reduce.index + first", "reduce.index", SENDER),
    Mistake("the other wire", "cuda/bucket.h", "sources[job.first_source + k]", "sources[k]", BUCKETED),
    Mistake("the next residuals", "cuda/kernels.h", "state->residual, 0)", "state->residual, 8)", TILED),
    Mistake("no scale", "cuda/state.h", "if (reduce.scale != 1.0f)", "if (false)", BUCKETED),
    Mistake("no barrier before adding", "cuda/bucket.h", "neutral<Op>(); });\n  team.sync();",
            "neutral<Op>(); });", OWNER),
    Mistake("no barrier after zeros", "cuda/state.h", "0.0f); });\n      team.sync();", "0.0f); });", SPARSE_SENDER),
    Mistake("no barrier after encoding", "cuda/state.h", "parameters));\n  team.sync();", "parameters));", OWNER),
    Mistake("no barrier after decoding", "cuda/state.h", "out);\n    team.sync();", "out);", BUCKETED),
    Mistake("no wait for the job", "cuda/kernels.h", "__syncwarp(kAllLanes);", "", TILED),
    Mistake("a commit in spite of infinity", "cuda/state.h", "if (!is_finite(", "if (false && !is_finite(", SPOILT),
    Mistake("a commit without a look", "cuda/state.h", "if (*parameters.scratch) return;", "", SPOILT),
    Mistake("a commit after a failure", "cuda/state.h", "&& *memory.failed", "&& false", AFTER_A_FAILURE),
    Mistake("a commit of too much", "cuda/state.h", "rest < kCommitted ? rest : kCommitted", "kCommitted", FINITE),
    Mistake("a commit of one half", "cuda/state.h", "copy_elements<Float32>(memory, job, first, n)",
            "copy_elements<BFloat16>(memory, job, first, n)", FINITE),
)  # fmt: skip


@functools.cache
def right(case: AnyCase) -> None:
    """Without a mistake the case passes."""
    prepared(case).check(PtxEmulator(nvrtc_13()))


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_in_the_source_is_found(mistake: Mistake, tmp_path: Path) -> None:
    right(mistake.case)
    headers = tmp_path / "kernels"
    shutil.copytree(HEADERS, headers, ignore=shutil.ignore_patterns("host", "engine"))
    text = (headers / mistake.header).read_text()
    assert mistake.text in text
    (headers / mistake.header).write_text(text.replace(mistake.text, mistake.replacement))
    case = prepared(mistake.case)
    (kind,) = case.launches
    assert Bench(PtxEmulator(nvrtc_13(), headers), case).found(kind)
