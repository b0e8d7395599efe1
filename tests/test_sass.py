"""bench/sass.py on a small disassembly: what a warp executes, how wide it loads and stores, and what limits it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed (extra 'nvrtc')")
sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import sass

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


def test_widths_occupancy_and_limit() -> None:
    kernel = sass.Kernel(sass.trace(SAMPLE, 1), registers=128, shared=0, elements=1024, nbytes=8)
    assert kernel.accesses("LDG") == {16: 1, 4: 1}
    assert kernel.accesses("STG") == {16: 1, 1: 1}
    assert [kernel.resident(arch) for arch in (80, 90, 100)] == [2, 2, 2]
    hopper = next(gpu for gpu in sass.GPUS if gpu.arch == 90)
    share, limit = kernel.share(hopper)
    bytes_clocks = 1024 * 8 / hopper.bytes_per_clock
    assert limit == "latency" and share == pytest.approx(bytes_clocks / (sass.lifetime(kernel.warp) / 2))
