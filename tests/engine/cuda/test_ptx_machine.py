"""The interpreter of PTX reports each kind of mistake. test_ptx_kernels.py compares its results with the host's."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_emulator import Fault, Kernel, PtxError, extents, machine
from ptx_program import Module

pytestmark = pytest.mark.processes

#: threads have the address of a word of the input in %rd3, of the output in %rd4, and their number in %r0
_KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1)
{
.reg .pred %p<10>; .reg .b16 %rs<10>; .reg .b32 %r<20>; .reg .b64 %rd<20>;
.shared .align 16 .b8 room[1024];
 mov.u32 %r0, %tid.x;
 ld.param.u64 %rd0, [kernel_param_0];
 ld.param.u64 %rd1, [kernel_param_1];
 mul.wide.u32 %rd2, %r0, 4;
 add.s64 %rd3, %rd0, %rd2;
 add.s64 %rd4, %rd1, %rd2;
 mov.u32 %r1, room;
 shl.b32 %r2, %r0, 2;
 add.s32 %r2, %r1, %r2;
 BODY
 ret;
}
"""
_STORE = "st.global.u32 [%rd4], %r4;"


def run(body: str, *, blocks: int = 1, output_defined: bool = True) -> np.ndarray:
    """The output words of 64 threads that run ``body``; block b has the same words as the others."""
    given, output = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    kernel = Kernel(Module(_KERNEL.replace("BODY", body)), "kernel", machine().operations)
    known = extents(
        [(given.ctypes.data, given.nbytes, False, True), (output.ctypes.data, output.nbytes, True, output_defined)]
    )
    parameters = np.array([given.ctypes.data, output.ctypes.data], np.uint64).tobytes()
    machine().run([kernel], parameters, blocks, known, threads=64)
    return output


_PUT, _GET = "st.shared.u32 [%r2], %r0;", "xor.b32 %r5, %r2, {}; ld.shared.u32 %r4, [%r5];"


@pytest.mark.parametrize(
    ("between", "distance", "race"),
    [
        ("", 0, False),
        ("", 4, True),
        ("bar.warp.sync -1;", 4, False),
        ("bar.warp.sync -1;", 128, True),  # a thread of another warp
        ("bar.sync 0;", 128, False),
        ("membar.cta;", 4, True),
        ("shfl.sync.idx.b32 %r6, %r0, 0, 31, -1;", 4, True),
    ],
)
def test_what_orders_accesses_to_shared_memory(between: str, distance: int, race: bool) -> None:
    # room begins at a multiple of 256, so that the exclusive or stays within it
    body = f"{_PUT} {between} {_GET.format(distance)} {_STORE}"
    again = f"{_PUT} bar.sync 0; {_GET.format(distance)} {between} st.shared.u32 [%r2], %r2; {_STORE}"
    for each in (body, again):
        if race:
            with pytest.raises(Fault, match=r"race|never set"):
                run(each)
        else:
            assert np.array_equal(run(each), np.arange(64) ^ distance // 4)


#: what a thread does, and what is reported
FAULTS = [
    ("ld.global.v2.u32 {%r3, %r4}, [%rd3];", "misaligned"),
    ("ld.global.u32 %r3, [%rd3+256];", "outside"),
    ("st.global.u32 [%rd4+-4], %r0;", "outside"),
    ("st.shared.u32 [%r2+1024], %r0;", "outside"),
    ("mov.u64 %rd5, 0; ld.u32 %r3, [%rd5];", "outside"),
    ("mov.u32 %r5, 0; ld.shared.u32 %r3, [%r5];", "outside"),
    ("ld.param.u64 %rd5, [kernel_param_1+8];", "outside"),
    ("st.global.u32 [%rd3], %r0;", "only read"),
    ("st.global.u32 [%rd1], %r0;", "race"),  # each thread stores another value in one place
    (f"{_STORE.replace('%r4', '%r0')} ld.global.nc.u32 %r3, [%rd4];", "constant memory"),
    ("st.global.u32 [%rd4], %r9;", "uninitialised: stores"),
    ("@%p3 mov.u32 %r4, 0;", "uninitialised: the guard"),
    ("cvt.u64.u32 %rd5, %r9; add.s64 %rd5, %rd5, %rd4; ld.global.u32 %r3, [%rd5];", "uninitialised: the address"),
    (f"ld.shared.u32 %r4, [%r2]; {_STORE}", "uninitialised: stores"),
    ("mov.u32 %r5, 1; and.b32 %r5, %r5, %r9; st.global.u32 [%rd4], %r5;", "uninitialised: stores"),
    ("mul.lo.u32 %r5, %r9, 4096; and.b32 %r5, %r5, 8191; st.global.u32 [%rd4], %r5;", "uninitialised: stores"),
    ("atom.global.add.u32 %r4, [%rd4], %r9;", "uninitialised: an atomic"),
    ("shfl.sync.bfly.b32 %r4, %r0, 1, 31, 0x7fffffff;", "mask"),
    (
        "setp.gt.u32 %p0, %r0, 3; @%p0 bra $a; redux.sync.add.s32 %r4, %r0, -1; bra $b; "
        "$a: redux.sync.add.s32 %r4, %r0, -1; $b:",
        "waits for ever",
    ),
    ("setp.gt.u32 %p0, %r0, 3; @%p0 ret; redux.sync.add.s32 %r4, %r0, -1;", "mask"),
    ("setp.gt.u32 %p0, %r0, 3; @%p0 bra $a; bar.sync 0; $a: bar.sync 0;", "different barriers within a warp"),
    ("setp.gt.u32 %p0, %r0, 31; @%p0 bra $a; bar.sync 0; bra $b; $a: bar.sync 0; $b:", "different barriers"),
    ("$a: bra $a;", "does not end"),
    ("trap;", "trap"),
]


@pytest.mark.parametrize(("body", "message"), FAULTS)
def test_mistake_is_reported(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptx_emulator.MOST_INSTRUCTIONS", 10_000)
    with pytest.raises(Fault, match=re.escape(message)):
        run(body)


@pytest.mark.parametrize(
    "body",
    [
        "mov.u32 %r5, 0; and.b32 %r4, %r5, %r9;",  # a zero, whatever the other bit
        "shl.b32 %r4, %r9, 32;",
        "mul.lo.u32 %r4, %r9, 4096; and.b32 %r4, %r4, 4095;",
        "mov.u32 %r5, 0; mov.b64 %rd5, {%r9, %r5}; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r4, %rd5;",
        "mov.u32 %r5, 0; prmt.b32 %r4, %r9, %r5, 0x7654;",
        "mov.u32 %r5, 0; setp.eq.s32 %p0, %r5, 0; selp.b32 %r4, %r5, %r9, %p0;",
    ],
)
def test_bits_that_matter_to_no_result_may_be_undefined(body: str) -> None:
    assert not run(f"{body} {_STORE}").any()


def test_undefined_bits_may_be_kept_in_scratch() -> None:
    run("st.global.u32 [%rd4], %r9;", output_defined=False)


def test_blocks_are_not_ordered() -> None:
    run("st.global.u32 [%rd4], %r0;", blocks=2)  # the same value
    with pytest.raises(Fault, match="race"):
        run("mov.u32 %r4, %ctaid.x; st.global.u32 [%rd4], %r4;", blocks=2)
    assert run("atom.global.add.u32 %r4, [%rd1], 1;", blocks=2)[0] == 128


@pytest.mark.parametrize(
    "body",
    [
        "ex2.approx.f32 %r4, %r0;",
        "add.f32 %r4, %r3, %r3;",  # ptxas may fuse it with a product
        "mul.rn.ftz.f32 %r4, %r3, %r3;",
        "tex.1d.v4.f32.f32 {%r3, %r4, %r5, %r6}, [%rd0, {%r0}];",
        "bra $nowhere;",
        "mov.u32 %r4, %nothing;",
    ],
)
def test_unknown_ptx_is_refused(body: str) -> None:
    with pytest.raises(PtxError):
        run(body)
