"""The kernels compile for every architecture, with few registers and no spills."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from codec_table import TABLE
from nvrtc import Nvrtc, Program

from qccl import codecs
from qccl.base.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, DType
from qccl.codecs import Codec, MinMax, NoCodec, Trellis
from qccl.collectives.schedule import Commit, Decode, Encode, Reduce, Span, State, StateBuffer
from qccl.engine.cuda import cache
from qccl.engine.cuda import source as cuda_source

pytestmark = pytest.mark.starts_first

ARCHITECTURES = (75, 80, 90, 100, 120)
DEFAULT = 80
#: compiled for this one: most kernels of the default bucket, and Reduce of all codecs with and without state
EVERYTHING = 90
ROUNDINGS = ("nearest", "stochastic")
OPS = ("sum", "min", "max")
PER_PROGRAM = 16  # kernels that are compiled together

#: elements per bucket: all shapes of a unit but the default, and one that takes two kernels
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 2048, 4096, 8192, 16384)

#: per architecture: which bits go with a bucket; over all architectures each bucket has all eight. The default one has
#: none, because its compilation takes long enough
SHIFTS = ((0,), (), (1, 2, 3, 4, 5), (6,), (7,))

_SPAN = Span("values", 0, 100_000)
_USAGE = re.compile(
    r"Compiling entry function '(\S+)' for 'sm_\d+'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def names(op: Encode | Decode | Reduce | Commit, dtype: DType) -> tuple[str, ...]:
    return cuda_source.launch([op], 0, dtype, lambda span: (len(span.buffer), 0)).kernels


def encode(codec: Codec, dtype: DType) -> tuple[str, ...]:
    return names(Encode(codec, _SPAN, _SPAN, 0), dtype)


def decode(codec: Codec, dtype: DType, accumulate: bool) -> tuple[str, ...]:
    return names(Decode(codec, Span("wire", 0, 1), _SPAN, accumulate), dtype)


def reduce(codec: Codec, dtype: DType, op: str, encoded: bool = True) -> tuple[str, ...]:
    return names(Reduce(codec, (_SPAN,), _SPAN, 0, _SPAN if encoded else None, _SPAN, op), dtype)


def plain() -> Iterator[str]:
    """Kernels of the codec none, and the one without a codec."""
    yield from (cuda_source.BEGIN_KERNEL, cuda_source.END_KERNEL)
    yield from (cuda_source.ADDRESS_KERNEL, cuda_source.NONFINITE_KERNEL)
    for dtype in DTYPES:
        yield from encode(NoCodec(), dtype)
        yield from decode(NoCodec(), dtype, True)
        for op in OPS:
            yield from reduce(NoCodec(), dtype, op)


def bucketed(number: int, everything: bool) -> Iterator[str]:
    """Kernels of all codecs but none and minmax, and of all formats of blocks.

    Types, operations, and Reduce with and without state take turns; ``everything``: each codec has all types, and both.
    """
    chosen = [codecs.get(row.spec) for rows in TABLE.values() for row in rows]
    first = {codec.name: codec for codec in reversed(chosen)}
    chosen = [codec for codec in chosen if codec is first[codec.name] or codec.kernel().type == "Blocks"]
    for i, codec in enumerate(chosen):
        for turn in range(i + number, i + number + (3 if everything else 1)):
            dtype = DTYPES[turn % 3]
            yield from encode(codec, dtype)
            for accumulate in (False, True):
                yield from decode(codec, dtype, accumulate)
            if everything or turn % 2:
                yield from reduce(codec, dtype, OPS[0 if codec.sparse else turn % 3])
            if everything or not turn % 2:
                yield from reduce_with_state(codec, dtype)


def decoded(number: int) -> Iterator[str]:
    """The decoders of trellis with all bits; types, buckets and numbers of outliers take turns."""
    for bits in range(1, 9):
        turn = bits + number
        codec = Trellis(bits, (2048, 1024, 8)[turn // 2 % 3], (32, 128, 2048)[turn // 3 % 3], (0, 4, 16)[turn % 3])
        yield from decode(codec, DTYPES[turn // 2 % 3], bool(turn % 2))
    for dtype in DTYPES:
        yield from decode(Trellis(2 + 2 * (number % 2), outliers=16), dtype, False)


def with_state(number: int) -> Iterator[str]:
    """Kernels with state of the codecs with a tile, and Commit; element types take turns."""
    for i, codec in enumerate((NoCodec(), MinMax(3, rounding="stochastic"))):
        yield from reduce_with_state(codec, DTYPES[(i + number) % 3])
    for dtype in DTYPES:
        yield from names(Commit((_SPAN,), (StateBuffer(_SPAN, _SPAN),)), dtype)


def reduce_with_state(codec: Codec, dtype: DType) -> tuple[str, ...]:
    state = State(StateBuffer(_SPAN, _SPAN), StateBuffer(_SPAN, _SPAN), 0.9)
    return names(Reduce(codec, (_SPAN,), _SPAN, 0, _SPAN, _SPAN, state=state), dtype)


def of_the_default_bucket() -> Iterator[str]:
    """All bits, element types and roundings; the operations of Reduce take turns."""
    for i, (dtype, bits, rounding) in enumerate(itertools.product(DTYPES, range(1, 9), ROUNDINGS)):
        codec = MinMax(bits, rounding=rounding)
        yield from encode(codec, dtype)
        yield from reduce(codec, dtype, OPS[i % 3])
        for accumulate in (False, True):
            yield from decode(codec, dtype, accumulate)


def of_an_architecture(number: int) -> Iterator[str]:
    """All bits, kinds and shapes; element types, roundings and operations take turns."""
    for bits in range(1, 9):
        turn = bits + number
        codec, dtype = MinMax(bits, rounding=ROUNDINGS[turn % 2]), DTYPES[turn % 3]
        yield from encode(codec, dtype)
        yield from reduce(codec, dtype, OPS[turn // 3 % 3])
        for accumulate in (False, True):
            yield from decode(codec, dtype, accumulate)
    for i, (shift, bucket) in enumerate(itertools.product(SHIFTS[number], BUCKETS)):
        turn, bits = i + number, 1 + (BUCKETS.index(bucket) + shift) % 8
        codec, dtype = MinMax(bits, bucket, ROUNDINGS[turn // 2 % 2]), DTYPES[turn % 3]
        yield from encode(codec, dtype)
        yield from decode(codec, dtype, bool(turn % 2))
        yield from reduce(codec, dtype, OPS[turn // 3 % 3], encoded=turn % 4 != 0)


@dataclass(frozen=True)
class Usage:
    """A kernel's resources per thread: bytes of stack and spills, and registers."""

    stack: int
    spilled: int
    registers: int


class Kernels(Program):
    """Kernels compiled for an architecture; ``arch`` is "sm_90" or "compute_90"."""

    def __init__(self, library: Nvrtc, kernels: Sequence[str], arch: str, *more: str) -> None:
        code, options = cuda_source.source(kernels)
        super().__init__(library, code, kernels, [f"--gpu-architecture={arch}", "--ptxas-options=-v", *options, *more])


def usage(library: Nvrtc, kernels: Iterable[str], arch: int, *more: str) -> dict[str, Usage]:
    """Compile on all processors; fails with the compiler's message.

    What a program uses is kept as compiled kernels are: an unchanged source is not compiled again.
    """
    chosen = list(dict.fromkeys(kernels))
    groups = [chosen[i : i + PER_PROGRAM] for i in range(0, len(chosen), PER_PROGRAM)]
    path = Path(library.library._name)
    compiler = f"NVRTC {library.version}, {path.stat().st_size if path.is_file() else path} bytes"

    def compile(group: list[str]) -> dict[str, Usage]:
        def make() -> tuple[bytes, str]:
            program = Kernels(library, group, f"sm_{arch}", *more)
            assert not program.failed, program.log[:3000]
            assert "warning" not in program.log, program.log[:3000]
            found = {mangled: [*map(int, figures)] for mangled, *figures in _USAGE.findall(program.log)}
            return json.dumps([found[program.mangled(name)] for name in group]).encode(), ""

        code, options = cuda_source.source(group)
        figures, _ = cache.load_or_make(["usage", compiler, f"sm_{arch}", code, *options, *more], make)
        return {
            name: Usage(stack, stores + loads, registers)
            for name, (stack, stores, loads, registers) in zip(group, json.loads(figures), strict=True)
        }

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: use for each in pool.map(compile, groups) for name, use in each.items()}


def check(found: dict[str, Usage], arch: int) -> None:
    """No kernel spills, and the blocks of its launch bounds fit a multiprocessor's 65,536 registers."""
    spilling = {name: use for name, use in found.items() if use.stack or use.spilled}
    assert not spilling, f"kernels use local memory: {spilling}"
    for name, use in found.items():
        large = (f"Shape<{cuda_source.THREADS}", "::TopK", "::RandomK", "::BlocksTile")
        is_large = "encode<" in name and any(each in name for each in large)
        of_bytes = re.search(r"decode<qccl::BlocksTile<[01],", name)  # mxfp8
        blocks = 2 if "reduce" in name or name.endswith("true>") or of_bytes else 3 if is_large else 4
        scarce = "Float16" in name or "BlocksTile" in name
        if arch >= 100 and "::reduce" in name and "Tile" in name and scarce:  # see fitting_blocks()
            blocks = 1
        if blocks == 4 and ("TrellisTile<7" in name or "TrellisTile<8" in name):  # see decode_blocks
            blocks = 3
        if "reduce_with_state<qccl::MinMaxTile" in name and ", true>, " in name:  # random words, too: see state_blocks
            blocks = 1
        if "reduce_with_state<qccl::BlocksTile" in name:
            blocks = 1
        assert use.registers * blocks * cuda_source.THREADS <= 65536, f"{name} uses {use.registers} registers"


def library_of(cuda: int) -> Nvrtc:
    """NVRTC of a CUDA version; the reason of a skip where it is not installed."""
    try:
        return Nvrtc(cuda)
    except FileNotFoundError as error:
        pytest.skip(f"{error} (extra 'nvrtc')")


@pytest.fixture(params=[pytest.param(12, marks=pytest.mark.packages), 13], scope="module")
def library(request: pytest.FixtureRequest) -> Nvrtc:
    return library_of(request.param)


#: CUDA 12's compiler for each architecture, and CUDA 13's for the one with the most kernels
COMPILERS = [*((12, arch) for arch in ARCHITECTURES), (13, EVERYTHING)]


@pytest.mark.packages
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuda", "arch"),
    [pytest.param(*each, marks=() if each == (12, DEFAULT) else pytest.mark.every_arch) for each in COMPILERS],
)
def test_kernels_compile_without_spills(cuda: int, arch: int) -> None:
    library = library_of(cuda)
    if arch not in library.architectures():
        pytest.skip(f"this NVRTC cannot compile for sm_{arch}; it knows {library.architectures()}")
    number = ARCHITECTURES.index(arch)
    everything = arch == EVERYTHING
    kernels = [*plain(), *bucketed(number, everything), *decoded(number), *with_state(number)]
    kernels += of_an_architecture(number)
    if everything:
        kernels += of_the_default_bucket()
    check(usage(library, kernels, arch), arch)


def test_kernels_for_many_buffers_compile_without_spills(library: Nvrtc) -> None:
    """Those with the most registers, which look up addresses in a table, too."""
    kernels = [*reduce_with_state(codecs.get("cast"), FLOAT16), *reduce(MinMax(1), FLOAT16, "min")]
    check(usage(library, kernels, DEFAULT, cuda_source.MANY_BUFFERS), DEFAULT)


@pytest.mark.parametrize(
    ("kernels", "loads", "stores"),
    [
        (encode(MinMax(8), FLOAT32), 8, 0),
        (decode(MinMax(4), FLOAT32, False), 0, 8),
        (reduce(MinMax(7), BFLOAT16, "sum"), 4, 4),
        (decode(Trellis(4), FLOAT32, False), 0, 8),
        (reduce_with_state(codecs.get("onebit"), BFLOAT16), 12, 12),  # 4 of values in and out, and 8 of residuals
    ],
    ids=lambda each: each[0].split("<")[0].split("::")[1] if isinstance(each, tuple) else str(each),
)
def test_values_move_in_steps_of_16_bytes(kernels: tuple[str, ...], loads: int, stores: int, library: Nvrtc) -> None:
    """Loads and stores of single elements would bound the kernel."""
    program = Kernels(library, kernels, "compute_90")
    assert not program.failed, program.log[:3000]
    ptx = program.ptx()
    assert ptx.count("ld.global.v4.u32") >= loads and ptx.count("st.global.v4.u32") >= stores


def test_a_build_that_flushes_subnormals_is_refused(library: Nvrtc) -> None:
    program = Kernels(library, encode(MinMax(8), FLOAT32), "sm_90", "-ftz=true")
    assert program.failed
    assert "without -ftz=true" in program.log
