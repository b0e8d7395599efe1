"""Faults that are planted in the kernels are found, all of them, by the PTX machine.

| planted | by | found as |
| --- | --- | --- |
| in the PTX of each codec's kernels: barriers, bounds, alignment, lanes, conversions, values (PLANTS) | `check()` | a fault of the machine, or other bytes than the host's |
| in the source: each barrier of a block or of a warp taken away | `test_a_missing_synchronisation_is_a_race` | a race |
| in the source: a wrong value, counter, place, scale, guard or barrier in kernels with state and commits (MISTAKES) | `test_a_mistake_in_the_source_is_found` | a fault, or other bytes |
| in the PTX of the kernels around a run: either barrier | test_run_kernels.py | a race, or bits never set |
| in PTX written by hand: each kind of mistake that the machine reports | test_ptx_machine.py | the report of that mistake |
"""  # noqa: E501

from __future__ import annotations

import functools
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_cases import CASES, Case, Operations, Prepared
from ptx_emulator import Fault, PtxEmulator, nvrtc_13
from state_cases import AnyCase, CommitCase, StateCase, prepared

from qccl import codecs, dtypes
from qccl.codecs import MinMax, OneBit
from qccl.cuda import source as cuda_source
from qccl.dtypes import BFLOAT16, FLOAT32

pytestmark = [pytest.mark.starts_first, pytest.mark.processes, pytest.mark.slow]

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


# -- in lines of PTX -------------------------------------------------------------------------------------------------

_OFFSET = r"(?:\+\d+)?\]"


@dataclass(frozen=True)
class Plant:
    """A kind of fault: a regular expression for the code that it replaces, and the new code."""

    kind: str
    name: str
    pattern: str
    replacement: str
    everywhere: bool = False  # in all lines that run, not in one


PLANTS = (
    # all of them: another one may stand between the same accesses
    Plant("barrier", "barriers are missing", r"\bbar\.sync\s+0;", "", everywhere=True),
    Plant("barrier", "barriers of warps are missing", r"\bbar\.warp\.sync\s+-1;", "", everywhere=True),
    Plant("bounds", "a load is far away", rf"(ld\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]"),
    Plant("bounds", "a store is far away", rf"(st\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]"),
    Plant("bounds", "a store is wider", r"st\.global\.u?b?8(\s+\[%\w+(?:\+\d+)?\], )%\w+;", r"st.global.u32\g<1>%r1;"),
    Plant("bounds", "shared memory is not there", rf"((?:ld|st)\.shared[^;]*\[[%\w$]+){_OFFSET}", r"\1+131072]"),
    Plant("alignment", "a load is one byte further", rf"(ld\.global[^;]*(?:16|32|64)\s[^;]*\[%\w+){_OFFSET}", r"\1+1]"),
    Plant("alignment", "a store is one byte further", rf"(st\.global[^;]*\[%\w+){_OFFSET}", r"\1+1]"),
    Plant("lane", "a lane is missing", r"(shfl\.sync\.[^;]*), [^,;]+;", r"\1, 0x7fffffff;"),
    Plant("lane", "a warp's barrier lacks a lane", r"(bar\.warp\.sync)\s+-1;", r"\1 0x7fffffff;"),
    Plant("conversion", "values are cut off", r"cvt\.rn\.(bf16\w*\.f32)", r"cvt.rz.\1", everywhere=True),
    Plant("conversion", "values are rounded", r"cvt\.rzi\.s32\.f32", "cvt.rni.s32.f32", everywhere=True),
    Plant(
        "conversion",
        "halves are swapped",
        r"(cvt\.rn\.\w+x2\.f32\s+%\w+), (%\w+), (%\w+);",
        r"\1, \3, \2;",
        everywhere=True,
    ),
    Plant("conversion", "bytes are reversed", r"(prmt\.b32\s[^;]*), [^,;]+;", r"\1, 0x0123;", everywhere=True),
    # of addresses: other undefined bits may decide comparisons without consequence
    Plant("value", "a register is never set", r"cvta\.to\.global\.u64\s+%\w+, %\w+;", "", everywhere=True),
    # not of constants: of NaN the result is the same, of +0 it is for all but -0
    Plant("value", "sums are differences", r"add\.rn\.f32(\s+%\w+, %\w+, %)", r"sub.rn.f32\1", everywhere=True),
    Plant("value", "products are sums", r"mul\.rn\.f32", "add.rn.f32", everywhere=True),
)


class Bench:
    """Prepared kernels, in which faults are planted one at a time."""

    def __init__(self, emulator: PtxEmulator, prepared: Prepared) -> None:
        self._emulator, self._prepared = emulator, prepared
        self._content = [buffer.copy() for buffer in prepared.arrays.buffers]

    def plants(self, chooser: random.Random) -> Iterator[tuple[str, str, str | None]]:
        """Plant each kind of fault that fits in one executed line of each kernel.

        Gives the kernel with the kind, the line, and what was found: None if nothing was.
        """
        for kind, launch in self._prepared.launches.items():
            assert self.found(kind) is None
            for name in launch.kernels:
                lines = self._emulator.text(name).split("\n")
                executed = [i for i in self._emulator.executed_lines(name) if i < len(lines)]
                for plant in PLANTS:
                    changed = {i: re.sub(plant.pattern, plant.replacement, lines[i], count=1) for i in executed}
                    places = [i for i in executed if changed[i] != lines[i]]
                    if places:
                        chosen = places if plant.everywhere else [chooser.choice(places)]
                        text = "\n".join(changed[i] if i in chosen else line for i, line in enumerate(lines))
                        with self._emulator.edited(name, text):
                            yield f"{kind}: {plant.kind}: {plant.name}", lines[chosen[0]].strip(), self.found(kind)

    def found(self, kind: str) -> str | None:
        """What is wrong with a launch."""
        for buffer, content in zip(self._prepared.arrays.buffers, self._content, strict=True):
            buffer[:] = content
        try:
            self._prepared.check(self._emulator, [kind])
        except (Fault, AssertionError) as error:
            return str(error) or "other bytes"
        return None


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


def without(headers: Path, header: str | Path, text: str, replacement: str) -> PtxEmulator:
    """The kernels with another text of a header, in a copy."""
    shutil.copytree(HEADERS, headers, ignore=shutil.ignore_patterns("host", "engine"))
    assert text in (HEADERS / header).read_text()
    (headers / header).write_text((HEADERS / header).read_text().replace(text, replacement))
    return PtxEmulator(nvrtc_13(), headers)


@functools.cache
def right(case: AnyCase) -> None:
    """Without a mistake the case passes."""
    prepared(case).check(PtxEmulator(nvrtc_13()))


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_in_the_source_is_found(mistake: Mistake, tmp_path: Path) -> None:
    right(mistake.case)
    case = prepared(mistake.case)
    (kind,) = case.launches
    assert Bench(without(tmp_path / "kernels", mistake.header, mistake.text, mistake.replacement), case).found(kind)


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
    emulator = without(tmp_path / "kernels", path.relative_to(HEADERS), text, text[:begin])
    with pytest.raises(Fault, match=r"^race"):
        for seed in range(4):  # the addresses differ: some arrays are copied through shared memory
            Operations(Case(codec, FLOAT32, "sum", aligned=False), seed).check(emulator, ["reduce"])
