"""bench/sass.py on a small disassembly: what a warp executes, how wide it loads and stores, and what limits it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sass

from qccl import codecs
from qccl.dtypes import BFLOAT16, FLOAT32, DType

pytestmark = pytest.mark.slow

HOPPER = next(gpu for gpu in sass.GPUS if gpu.arch == 90)

SAMPLE = """
        /*0000*/                   LDG.E R0, desc[UR4][R2.64] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, RZ, PT ;
        /*0020*/               @P0 EXIT ;
.L_x_0:
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64+0x10] ;
        /*0040*/                   FADD R8, R4, R8 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   CALL.REL.NOINC `($division) ;
.L_x_1:
        /*0080*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0090*/                   STG.E.U8 desc[UR4][R2.64+0x10], R8 ;
        /*00a0*/                   EXIT ;
"""


def test_a_trace_repeats_loops_and_leaves_out_calls() -> None:
    opcodes = [each.opcode for each in sass.trace(SAMPLE, 3)]
    assert opcodes.count("LDG.E.128") == 3 and opcodes.count("FADD") == 3
    assert "CALL.REL.NOINC" not in opcodes
    assert opcodes[-3:] == ["STG.E.128", "STG.E.U8", "EXIT"]


def test_a_warp_waits_for_its_loads() -> None:
    once, thrice = (sass.lifetime(sass.trace(SAMPLE, trips)) for trips in (1, 3))
    assert once > 2 * sass._LOAD  # the first load, and the one of the loop
    assert thrice - once >= 2 * sass._LOAD
    assert sass.waiting(sass.trace(SAMPLE, 1)) >= sass._START + 2 * sass._LOAD


def test_widths_and_occupancy() -> None:
    kernel = sass.Kernel(sass.trace(SAMPLE, 1), registers=128, shared=0, elements=1024, nbytes=8)
    assert kernel.accesses("LDG") == {16: 1, 4: 1}
    assert kernel.accesses("STG") == {16: 1, 1: 1}
    assert [kernel.resident(arch) for arch in (80, 90, 100)] == [2, 2, 2]


def test_limits_near_each_other_add_up() -> None:
    """Two equal stations are each busy for n / (n + 1) of the time; a customer alone waits for nobody."""
    assert sass.throughput((10.0, 10.0), 0.0, 16) == pytest.approx(16 / 17 / 10)
    assert sass.throughput((10.0, 4.0), 86.0, 1) == pytest.approx(1 / 100)
    assert sass.throughput((10.0, 1.0), 0.0, 64) == pytest.approx(1 / 10)
    few, many = (sass.throughput((10.0, 4.0), 86.0, customers) for customers in (4, 8))
    assert few < many < min(8 / 100, 1 / 10)


def test_a_share_is_less_than_each_limit_alone() -> None:
    kernel = sass.Kernel(sass.trace(SAMPLE, 1), registers=128, shared=0, elements=1024, nbytes=4)
    share, limit = kernel.share(HOPPER)
    moved = 1024 * 4 / HOPPER.bytes_per_clock / 8  # clocks of memory for a warp
    alone = sass.waiting(kernel.warp) + sass.lifetime(kernel.warp, 0, 0)
    assert limit == "latency" and share < min(1, moved / (alone / 16))
    rare = sass.Kernel(kernel.warp, registers=32, shared=0, elements=1 << 20, nbytes=8)  # nearly all of the time: bytes
    share, limit = rare.share(HOPPER)
    assert limit == "bytes" and 0.99 < share < 1


def test_instructions_take_the_clocks_of_their_pipe_and_of_few_warps() -> None:
    kernel = sass.Kernel(sass.trace(SAMPLE, 1), registers=128, shared=0, elements=1024, nbytes=8)
    clocks = kernel.instruction_clocks(90)
    assert clocks["memory"] == 1 + 4 + 4 + 1  # two loads and two stores, of which two have 16 bytes a thread
    assert clocks["issue"] == pytest.approx(len(kernel.warp) / 3, rel=0.02)  # 16 warps
    crowded = sass.Kernel(kernel.warp, registers=32, shared=0, elements=1024, nbytes=8)  # 64 warps
    assert crowded.instruction_clocks(90)["issue"] == pytest.approx(len(kernel.warp) / 4, rel=0.02)


def test_a_generic_load_counts_and_one_of_spilled_registers_is_refused() -> None:
    generic = sass.trace(SAMPLE.replace("LDG.E.128", "LD.E.128"), 2)
    assert sass.lifetime(generic) == sass.lifetime(sass.trace(SAMPLE, 2))
    spilled = sass.trace(SAMPLE.replace("FADD R8, R4, R8", "LDL R8, [R1]"), 1)
    with pytest.raises(ValueError, match="does not know the memory instruction LDL"):
        sass.Kernel(spilled, registers=128, shared=0, elements=1024, nbytes=8).share(HOPPER)


@pytest.mark.skipif(not sass.nvdisasm(), reason="nvdisasm is not installed (extra 'nvrtc', or CUDA's toolkit)")
@pytest.mark.parametrize(
    ("kind", "spec", "dtype", "vectors"),
    [
        ("encode", "minmax8", FLOAT32, (8, 0)),
        ("decode", "trellis4", FLOAT32, (0, 8)),
        ("reduce+ef", "onebit", BFLOAT16, (12, 12)),  # 4 of values in and out, and 8 of residuals
    ],
)
def test_values_move_in_vectors_of_16_bytes(
    kind: str, spec: str, dtype: DType, vectors: tuple[int, int], tmp_path: Path
) -> None:
    """Also without spills: the model refuses instructions of local memory."""
    kernel = sass.kernel(kind, codecs.get(spec), dtype, HOPPER.arch, sass.common_case(tmp_path))
    assert kernel is not None
    assert (kernel.accesses("LDG").get(16, 0), kernel.accesses("STG").get(16, 0)) == vectors
    assert kernel.accesses("STG").get(1, 0) == 0
    kernel.share(HOPPER)
