"""The interpreter of PTX: results that the PTX ISA gives, and each kind of mistake that it reports."""

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
_LOAD, _STORE = "ld.global.u32 %r3, [%rd3];", "st.global.u32 [%rd4], %r4;"


def run(
    body: str, values: np.ndarray | None = None, *, threads: int = 64, blocks: int = 1, output_defined: bool = True
) -> np.ndarray:
    """The output words of threads that run ``body``; block b has the same words as the others."""
    given = np.arange(threads, dtype=np.uint32) if values is None else values.astype(np.uint32)
    output = np.zeros(threads, np.uint32)
    kernel = Kernel(Module(_KERNEL.replace("BODY", body)), "kernel", machine().operations)
    known = extents(
        [(given.ctypes.data, given.nbytes, False, True), (output.ctypes.data, output.nbytes, True, output_defined)]
    )
    parameters = np.array([given.ctypes.data, output.ctypes.data], np.uint64).tobytes()
    machine().run([kernel], parameters, blocks, known, threads=threads)
    return output


def words(values: object) -> np.ndarray:
    """The bits of floats as u32."""
    return np.asarray(values, np.float32).view(np.uint32)


HARD = np.array(
    [0.0, -0.0, 1.5, 2.5, -2.5, 0.49999997, 65504, 65519, 65520, 1e-7, 6e-8, -3e-8, 3e9, -3e9, np.inf, -np.inf],
    np.float32,
)


def per_thread(instruction: str, values: np.ndarray) -> np.ndarray:
    """What an instruction gives for each value; %r3 is its source, %r4 its result, %rs1 16 bits of it."""
    return run(f"{_LOAD} cvt.u16.u32 %rs0, %r3; {instruction} {_STORE}", values, threads=len(values))


def test_floats_become_halves_as_in_numpy() -> None:
    found = per_thread("cvt.rn.f16.f32 %rs1, %r3; cvt.u32.u16 %r4, %rs1;", words(HARD))
    with np.errstate(over="ignore"):
        assert np.array_equal(found, HARD.astype(np.float16).view(np.uint16))


def test_floats_become_bfloat16_as_in_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).integers(0, 1 << 32, 256, dtype=np.uint32)
    values = values[~np.isnan(values.view(np.float32))]
    found = per_thread("cvt.rn.bf16x2.f32 %r4, %r3, %r3; and.b32 %r4, %r4, 65535;", values)
    assert np.array_equal(found, values.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))


def test_floats_become_integers_within_their_range() -> None:
    values = np.append(HARD, [np.float32(np.nan)])
    whole = np.nan_to_num(np.trunc(values).astype(np.float64), nan=0)
    found = per_thread("cvt.rzi.s32.f32 %r4, %r3;", words(values))
    assert np.array_equal(found, np.clip(whole, -(2**31), 2**31 - 1).astype(np.int64).astype(np.uint32))
    found = per_thread("cvt.rzi.u8.f32 %rs1, %r3; cvt.u32.u16 %r4, %rs1;", words(values))
    assert np.array_equal(found, np.clip(whole, 0, 255).astype(np.uint32))


NAN = 0x7FFFFFFF
#: an instruction with %r3 as its source, the source, and the result, by the definitions of the PTX ISA
RESULTS = [
    ("prmt.b32 %r4, %r3, 0, 0xba98;", 0x80FF017F, 0xFFFF0000),
    ("prmt.b32 %r4, %r3, 0x44332211, 0x7410;", 0xDDCCBBAA, 0x4411BBAA),
    ("shf.r.wrap.b32 %r4, %r3, 0x0000000f, 36;", 0x12345678, 0xF1234567),
    ("shf.l.wrap.b32 %r4, %r3, 0x0000000f, 4;", 0x12345678, 0x000000F1),
    ("shl.b32 %r4, %r3, 32;", 0x12345678, 0),
    ("shr.s32 %r4, %r3, 40;", 0x80000000, 0xFFFFFFFF),
    ("bfe.u32 %r4, %r3, 4, 8;", 0x12345678, 0x67),
    ("bfe.s32 %r4, %r3, 28, 8;", 0x92345678, 0xFFFFFFF9),
    ("bfi.b32 %r4, %r3, 0xFFFFFFFF, 8, 16;", 0x12345678, 0xFF5678FF),
    ("mul.hi.s32 %r4, %r3, -2;", 0x80000000, 1),
    ("clz.b32 %r4, %r3;", 0x0000FFFF, 16),
    ("popc.b32 %r4, %r3;", 0xF0F0, 8),
    ("div.u32 %r4, %r3, 7;", 100, 14),
    ("rem.s32 %r4, %r3, 7;", -100 % 2**32, -2 % 2**32),
    ("cvt.s32.s8 %r4, %r3;", 0x1280, 0xFFFFFF80),
    ("cvt.u32.u8 %r4, %r3;", 0x1280, 0x80),
    ("cvt.rn.f32.u32 %r4, %r3;", 16777217, 0x4B800000),
    ("cvt.rn.f32.s32 %r4, %r3;", 0xFFFFFFFF, 0xBF800000),
    ("min.NaN.f32 %r4, %r3, 0f3F800000;", 0x7FC00001, NAN),
    ("min.f32 %r4, %r3, 0f3F800000;", 0x7FC00001, 0x3F800000),
    ("max.f32 %r4, %r3, 0f80000000;", 0, 0),
    ("min.f32 %r4, %r3, 0f80000000;", 0, 0x80000000),
    ("mul.rn.f32 %r4, %r3, 0f3F000000;", 1, 0),  # half the smallest subnormal: to even
    ("mul.rn.f32 %r4, %r3, 0f3F000000;", 3, 2),
    ("fma.rn.f32 %r4, %r3, %r3, 0fBF801000;", 0x3F800800, 0x33800000),  # (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24
    ("div.rn.f32 %r4, %r3, 0f00000000;", 0x3F800000, 0x7F800000),
    ("sub.rn.f32 %r4, %r3, %r3;", 0x7F800000, NAN),
    ("setp.ltu.f32 %p0, %r3, 0f3F800000; selp.b32 %r4, 1, 0, %p0;", 0x7FC00001, 1),
    ("setp.lt.f32 %p0, %r3, 0f3F800000; selp.b32 %r4, 1, 0, %p0;", 0x7FC00001, 0),
    ("setp.gt.s32 %p0|%p1, %r3, -1; selp.b32 %r4, 1, 0, %p1;", 0xFFFFFFFE, 1),
    ("mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r4, {%rs2, %rs1};", 0x12345678, 0x56781234),
]


@pytest.mark.parametrize(("instruction", "value", "result"), RESULTS)
def test_result(instruction: str, value: int, result: int) -> None:
    assert per_thread(instruction, np.array([value], np.int64))[0] == result


def test_lanes_that_took_other_ways_meet_again() -> None:
    """A loop that each lane leaves after its own number of rounds, then a shuffle of all."""
    body = f"""{_LOAD} mov.u32 %r4, 0; and.b32 %r5, %r3, 7;
    $again: setp.eq.s32 %p0, %r5, 0; @%p0 bra $done; add.s32 %r4, %r4, 1; add.s32 %r5, %r5, -1; bra $again;
    $done: shfl.sync.bfly.b32 %r4, %r4, 1, 31, -1; {_STORE}"""
    assert np.array_equal(run(body), (np.arange(64) ^ 1) % 8)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("shfl.sync.idx.b32 %r4, %r3, 5, 31, -1;", np.arange(64) // 32 * 32 + 5),
        (
            "shfl.sync.down.b32 %r4, %r3, 3, 31, -1;",
            np.where(np.arange(64) % 32 < 29, np.arange(64) + 3, np.arange(64)),
        ),
        (
            "shfl.sync.up.b32 %r4|%p0, %r3, 1, 0, -1;",
            np.where(np.arange(64) % 32 > 0, np.arange(64) - 1, np.arange(64)),
        ),
        ("shfl.sync.bfly.b32 %r4, %r3, 4, 0x181f, -1;", np.arange(64) ^ 4),  # segments of 8 lanes
        ("redux.sync.max.s32 %r4, %r3, -1;", np.arange(64) // 32 * 32 + 31),
    ],
)
def test_lanes_exchange(instruction: str, expected: np.ndarray) -> None:
    assert np.array_equal(run(f"{_LOAD} {instruction} {_STORE}"), expected)


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
