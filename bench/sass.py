"""Predicts the kernels' speed on a GPU from their machine code; it needs no GPU.

NVRTC compiles each kernel as qccl does, nvdisasm disassembles it, and this script counts what a warp executes in the
common case (``_COMMON``): wires and values at multiples of 16 bytes, whole buckets, finite values, ordinary scales. The
warps of a multiprocessor then queue at two stations: instructions, at the rate of the busiest of issue and pipes, and
memory, at the rate of a copy. In between each warp waits alone: for the start of its block, and for its loads, by the
latency of an idle memory; the queue is what a load takes longer under load. Mean value analysis (Reiser and Lavenberg,
JACM 27(2), 1980) gives the rate at which the warps pass through both, so limits that are near each other add up. The
prediction is the share of the time in which memory is busy: 100% means as fast as a copy of the same bytes.

The model does not see bank conflicts, caches, partly filled sectors, the clock under load, the first and the last
blocks of a launch, and warps that wait for the last one of their block. Its constants are those of data sheets and of
the CUDA C++ Programming Guide; the latency of memory was measured by others (``_LOAD``); other latencies, the start of
a block and ``_READY`` are round numbers. It predicts no kernel with loops over elements: those of
kernels/cuda/bucket.h, such as encoding and reductions with trellis.

    python bench/sass.py                          # prints the table
    python bench/sass.py --write docs/cuda.md     # and replaces the one in a page
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import nvrtc

from qccl import codecs, dtypes
from qccl.codecs import Codec
from qccl.cuda import source as cuda_source
from qccl.dtypes import DType
from qccl.schedule import Decode, Encode, Op, Reduce, Span, State, StateBuffer

PEERS = 7
SPECS = ("minmax8", "minmax4", "cast:dtype=float8_e4m3", "onebit")
KINDS = ("encode", "decode", "reduce", "encode+ef", "reduce+ef")
DECODED = ("trellis4", "trellis2")  # their tile only decodes
DTYPES = (dtypes.FLOAT32, dtypes.BFLOAT16)
_COUNT = 1 << 22

#: the headers' text that tells rare cases apart, and what replaces it in the code that is counted
_COMMON = {
    "return unit.warp_size % kPerVector<T> == 0;": "return true;",
    "return unit.warp_size == S::vectors * kPerRow<T>;": "return true;",
    "return (reinterpret_cast<u64>(address) & (alignment - 1)) == 0;": "return true;",
    "if (!shuffles && begin >= unit.vectors) break;": "",
    "if (Coder::is_common(encoder)) {": "if (true) {",
    "if (Coder::template is_common<T, S>(decoder, wire.pieces)) {": "if (true) {",
    "if (nan) {": "if (false) {",
    "if (parameters.units_per_bucket != 1) {": "if (false) {",
    "if (job.scale != 1.0f)": "if (false)",
    "if (k > 0 && k % 32 == 0)": "if (false)",
    "if (unit.last)": "if (false)",
    "if (Stateful && old) {": "if (false) {",
    "own ^= 1u << k;": "own = 0;",  # no thread has two outliers
}


@dataclass(frozen=True)
class Gpu:
    """What the data sheet says. ``clock`` (Hz) follows from its fp32 rate: two operations per core and clock."""

    name: str
    arch: int
    processors: int
    clock: float
    bandwidth: float  # bytes per second

    @property
    def bytes_per_clock(self) -> float:
        """Of a multiprocessor during a copy, which reaches 92% of the data sheet's bandwidth."""
        return 0.92 * self.bandwidth / self.processors / self.clock


GPUS = (
    Gpu("A100", 80, 108, 1.41e9, 2.039e12),  # NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM
    Gpu("H100", 90, 132, 1.98e9, 3.35e12),
    Gpu("H200", 90, 132, 1.98e9, 4.8e12),
)

_PIPES = {
    **dict.fromkeys(("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"), "float"),
    **dict.fromkeys(("IMAD",), "multiply"),
    **dict.fromkeys(("I2F", "F2I", "F2F", "I2FP", "F2FP"), "convert"),
    **dict.fromkeys(("MUFU", "REDUX", "CREDUX"), "special"),
    **dict.fromkeys(("LDG", "STG", "LDS", "STS", "SHFL", "ATOM", "RED", "CCTL", "VOTE"), "memory"),
    **dict.fromkeys(("BRA", "EXIT", "BAR", "NOP", "BSSY", "BSYNC", "WARPSYNC"), "other"),
    **dict.fromkeys(("LDC", "LDCU", "S2R", "CS2R", "R2UR"), "other"),
}  # all others but memory instructions are integer operations; those of the uniform datapath are "other"
_GENERIC = {"LD": "LDG", "ST": "STG"}  # a generic address counts as one of global memory
_MEMORY = re.compile(r"LD|ST|ATOM|RED|TEX|SU")
#: threads per clock of a multiprocessor (Programming Guide, "Arithmetic Instructions")
_HOPPER = {"float": 128, "multiply": 64, "convert": 64, "special": 16, "memory": 32, "integer": 64}
_RATES = {80: {**_HOPPER, "float": 64, "convert": 16}, 90: _HOPPER, 100: _HOPPER}
_SCHEDULERS = 4  # of a multiprocessor: each issues one instruction of one of its warps in a clock
#: how often a warp that does not wait for memory can issue its next instruction: then 16 warps issue 3 in a clock. An
#: assumption, a round number
_READY = 0.3
_LINE_NBYTES = 128  # that a warp's access moves in a clock: 4 bytes per thread take one, 16 bytes four
#: clocks until a result can be used: assumptions, round numbers
_LATENCY = {"float": 4, "integer": 5, "multiply": 5, "convert": 14, "special": 20, "memory": 30, "other": 20}
#: of idle global memory and of the L2 cache: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
#: Architecture" (arXiv:2402.13499), Table IV, 478.8 and 263.0 clocks. M. Dewing (github.com/markdewing/AI_kernels,
#: latency/README.md) measured 700 and 291 on H100 SXM, 550 and 210 on A100, which changes the shares by a few points
_LOAD, _PREFETCHED = 480, 263
#: clocks from the end of a block to the first instruction of the next one in its place: an assumption, a round number
_START = 300
_WARPS = cuda_source.THREADS // 32  # of a block
_SHARED_MEMORY = {80: 164, 90: 228, 100: 228}  # KiB of a multiprocessor

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_ENDS = ("BRA", "EXIT", "RET", "BRX", "CALL")


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    guarded: bool
    opcode: str
    operands: str
    prefetched: bool = False  # what it loads is in the L2 cache

    @property
    def base(self) -> str:
        """The opcode without its modifiers; a generic load or store counts as one of global memory."""
        name = self.opcode.split(".")[0]
        return _GENERIC.get(name, name)

    @property
    def pipe(self) -> str:
        """Raises ValueError for memory instructions that the model does not know, such as those of spills."""
        if self.base not in _PIPES and _MEMORY.match(self.base):
            raise ValueError(f"the model does not know the memory instruction {self.opcode}")
        return "other" if self.base.startswith("U") else _PIPES.get(self.base, "integer")

    @property
    def width(self) -> int:
        """Bytes per thread, of a load or store."""
        return next((_WIDTH[part] for part in self.opcode.split(".") if part in _WIDTH), 4)

    @property
    def conditional(self) -> bool:
        """Whether it may be skipped: by a predicate before it, or by one among its operands."""
        return self.guarded or bool(re.match(r"!?U?P\d|~?U?R", self.operands))


Code = list[list[Instruction]]
Edges = list[list[int]]


def blocks(text: str) -> tuple[Code, Edges]:
    """Basic blocks of a disassembled kernel, and the numbers of the blocks that follow each.

    None follows a call: the division's subroutine, which serves subnormals, is no common case.
    """
    code: Code = [[]]
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            code += [[]] if code[-1] else []
            labels[label[1]] = len(code) - 1
        elif match := _LINE.search(line):
            code[-1].append(Instruction(bool(match[1]), match[2], match[3]))
            code += [[]] if code[-1][-1].base in _ENDS else []
    edges: Edges = []
    for i, block in enumerate(code):
        last = block[-1] if block else Instruction(False, "NOP", "")
        target = re.search(r"\((\.L_x_\d+)\)", last.operands) if last.base == "BRA" else None
        falls = last.base not in _ENDS or (last.base in ("BRA", "EXIT") and last.conditional)
        edges.append([*([labels[target[1]]] if target else []), *([i + 1] if falls and i + 1 < len(code) else [])])
    return code, edges


def _longest(code: Code, edges: Edges, first: int, ends: Sequence[int]) -> list[int]:
    """The forward way from a block to one of ``ends`` with the most instructions; empty if there is none."""
    best: dict[int, tuple[int, list[int]]] = {}
    for i in reversed(range(first, max(ends) + 1)):
        ways = [best[j] for j in edges[i] if j > i and j in best]
        if ways or i in ends:
            length, way = max(ways, default=(0, []))
            best[i] = (length + len(code[i]), [i, *way])
    return best[first][1] if first in best else []


def trace(text: str, trips: int) -> list[Instruction]:
    """What a warp executes: the longest way to an exit, with ``trips`` rounds of each loop on it.

    Loads in a loop that a branch can skip count once: own values, which a Reduce adds after one of its sources. After
    the first prefetch all loads count as prefetched.
    """
    code, edges = blocks(text)
    way = _longest(code, edges, 0, [i for i, block in enumerate(code) if block and block[-1].base == "EXIT"])
    loops = {first: last for last, targets in enumerate(edges) for first in targets if first <= last}
    result: list[Instruction] = []
    for i in way:
        last = loops.get(i, i)
        body = _longest(code, edges, i, [last]) if i in loops else []
        skippable = {j for j in body for k in range(i, j) for target in edges[k] if j < target <= last}
        once = {j for j in skippable if any(each.base == "LDG" for each in code[j])}
        taken = [each for j in body if j not in once for each in code[j]]
        result += (trips - (last in way)) * taken + code[i]
    first = next((n for n, each in enumerate(result) if each.base == "CCTL"), len(result))
    return result[:first] + [replace(each, prefetched=True) for each in result[first:]]


def lifetime(instructions: Iterable[Instruction], load: int = _LOAD, prefetched: int = _PREFETCHED) -> int:
    """Clocks of a warp alone: it issues in order, and waits for the registers that an instruction reads.

    ``load`` and ``prefetched`` are the clocks of loads from global memory and from the L2 cache.
    """
    ready: dict[str, int] = {}
    now = 0
    for each in instructions:
        registers = re.findall(r"\bU?[RP]\d+\b", each.operands)
        writes = bool(registers) and each.base not in ("STG", "STS", "RED", "CCTL", "BRA", "EXIT", "BAR")
        now = 1 + max([now, *(ready.get(name, 0) for name in registers[writes:])])
        if writes:
            latency = (prefetched if each.prefetched else load) if each.base == "LDG" else _LATENCY[each.pipe]
            kind, number = re.split(r"(?<=[RP])", registers[0])
            for i in range(each.width // 4 if each.base in ("LDG", "LDS") and each.width > 4 else 1):
                ready[f"{kind}{int(number) + i}"] = now + latency
    return now


def waiting(instructions: Sequence[Instruction]) -> int:
    """Clocks that a warp alone waits for the start of its block and for loads of an idle memory."""
    return _START + lifetime(instructions) - lifetime(instructions, 0, 0)


def throughput(demands: Sequence[float], delay: float, customers: int) -> float:
    """Customers per clock in a closed network of stations with queues, by mean value analysis.

    ``demands`` are the clocks of a customer at each station, ``delay`` those that it spends alone.
    """
    queues = [0.0] * len(demands)
    rate = 0.0
    for number in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = number / (delay + sum(times))
        queues = [rate * time for time in times]
    return rate


@dataclass(frozen=True)
class Kernel:
    """What a warp executes in the common case, and what a block needs."""

    warp: list[Instruction]
    registers: int
    shared: int  # bytes
    elements: int  # of a block
    nbytes: float  # per element, that must move

    def resident(self, arch: int) -> int:
        """Blocks of a multiprocessor at a time."""
        by_registers = 65536 // (-(-self.registers // 8) * 8 * cuda_source.THREADS)
        return min(by_registers, _SHARED_MEMORY[arch] * 1024 // (self.shared + 1024), 2048 // cuda_source.THREADS)

    def share(self, gpu: Gpu) -> tuple[float, str]:
        """The predicted share of a copy's rate, and which limit alone would take the most time."""
        warps = self.resident(gpu.arch) * _WARPS
        clocks = self.instruction_clocks(gpu.arch)
        moved = self.elements * self.nbytes / gpu.bytes_per_clock / _WARPS
        busiest, delay = max(clocks.values()), waiting(self.warp)
        clocks |= {"bytes": moved, "latency": (delay + lifetime(self.warp, 0, 0)) / warps}
        return moved * throughput((moved, busiest), delay, warps), max(clocks, key=lambda name: clocks[name])

    def instruction_clocks(self, arch: int) -> dict[str, float]:
        """Clocks of a multiprocessor for a warp's instructions, by their issue and in each pipe."""
        threads, lines = 32, Counter[str]()
        for each in self.warp:
            if each.pipe != "other":
                wide = each.width * threads // _LINE_NBYTES if _MEMORY.match(each.base) else 1
                lines[each.pipe] += max(wide, 1)
        clocks = {pipe: number * threads / _RATES[arch][pipe] for pipe, number in lines.items()}
        of_scheduler = self.resident(arch) * _WARPS / _SCHEDULERS
        issued = _SCHEDULERS * (1 - (1 - _READY) ** of_scheduler)
        return clocks | {"issue": len(self.warp) / issued}

    def accesses(self, base: str) -> dict[int, int]:
        """How many loads ("LDG") or stores ("STG") of global memory there are of each width in bytes."""
        return dict(sorted(Counter(each.width for each in self.warp if each.base == base).items(), reverse=True))


def operation(kind: str, codec: Codec, dtype: DType) -> tuple[Op, float]:
    """An operation on whole buckets, and the bytes per element that it must move."""
    values, wire = Span("values", 0, _COUNT), Span("wire", 0, codec.encoded_nbytes(_COUNT, dtype))
    state = State(StateBuffer(Span("old", 0, _COUNT), Span("new", 0, _COUNT))) if kind.endswith("+ef") else None
    moved = dtype.itemsize + len(wire) / _COUNT + (8 if state else 0)
    match kind:
        case "encode":
            return Encode(codec, values, wire, 0), moved
        case "decode":
            return Decode(codec, wire, values), moved
        case "encode+ef":
            return Reduce(codec, (), values, 0, wire, None, state=state), moved
    moved += dtype.itemsize + PEERS * len(wire) / _COUNT
    return Reduce(codec, (wire,) * PEERS, values, 0, wire, values, state=state), moved


def kernel(kind: str, codec: Codec, dtype: DType, arch: int, headers: Path) -> Kernel | None:
    """The kernel of an operation; None if it is a copy or has loops over elements: the model predicts neither."""
    op, nbytes = operation(kind, codec, dtype)
    (name,) = cuda_source.launch([op], 0, dtype, lambda span: (len(span.buffer), 0)).kernels
    shape = re.search(r"Shape<(\d+), (\d+)>", name)
    if not shape or "copy" in name:
        return None
    _, log = compiled(name, arch)
    used = re.search(r"entry function '_Z\S+' for 'sm_\d+'[^']*?Used (\d+) registers(?:.*?(\d+) bytes smem)?", log)
    assert used, log
    cubin, _ = compiled(name, arch, headers)
    capacity = int(shape[1]) * int(shape[2]) * 16 // dtype.itemsize
    elements = cuda_source.THREADS // int(shape[1]) * min(codec.kernel().bucket or capacity, capacity)
    trips = len(op.srcs) if isinstance(op, Reduce) else 1
    return Kernel(trace(disassembled(cubin), trips), int(used[1]), int(used[2] or 0), elements, nbytes)


def compiled(name: str, arch: int, headers: Path | None = None) -> tuple[bytes, str]:
    """The machine code of one kernel, and the compiler's log."""
    code, options = cuda_source.source([name])
    given = [f"-I{headers}" if headers and option.startswith("-I") else option for option in options]
    given += [f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v"]
    program = nvrtc.Program(nvrtc.find(), code, [name], given)
    if program.failed:
        raise SystemExit(f"{name} does not compile for sm_{arch}: {program.log}")
    return program.cubin(), program.log


def nvdisasm() -> str | None:
    """The path of the disassembler: on PATH, in CUDA's toolkit, or in its wheel."""
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    folders += [f"{path}/nvidia/cu13/bin" for path in sys.path]
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=os.pathsep.join(folders))


def disassembled(cubin: bytes) -> str:
    """The code of a cubin's template kernel; it also has those of every run's ends, whose names are not mangled."""
    tool = nvdisasm()
    if not tool:
        raise SystemExit("there is no nvdisasm: pip install nvidia-cuda-nvdisasm, or set CUDA_HOME to CUDA's toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, timeout=60, check=True)
    return next(part for part in done.stdout.split(".section\t.text.")[1:] if part.startswith("_Z"))


def common_case(folder: Path) -> Path:
    """A copy of the headers in which rare cases do not occur."""
    headers, missing = folder / "kernels", set(_COMMON)
    shutil.copytree(
        Path(cuda_source.__file__).parent.parent / "kernels", headers, ignore=shutil.ignore_patterns("host")
    )
    for path in headers.rglob("*.h"):
        text = path.read_text()
        missing -= {rare for rare in _COMMON if rare in text}
        for rare, common in _COMMON.items():
            text = text.replace(rare, common)
        path.write_text(text)
    if missing:
        raise SystemExit(f"the kernels' headers have changed and lack {sorted(missing)}: correct _COMMON")
    return headers


def rows(headers: Path) -> Iterator[str]:
    """The lines of the table."""
    title = ["kernel", "type", *(gpu.name for gpu in GPUS), "instructions", "registers", "blocks", "loads", "stores"]
    yield f"| {' | '.join(title)} |"
    yield f"|{' --- |' * len(title)}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shown = [*itertools.product(SPECS, KINDS, DTYPES), *itertools.product(DECODED, ("decode",), DTYPES)]
        yield from pool.map(partial(row, headers), *zip(*shown, strict=True))


def row(headers: Path, spec: str, kind: str, dtype: DType) -> str:
    """A line: the shares on each GPU, and what the code for sm_90 has."""
    codec = codecs.get(spec)
    arches = {gpu.arch for gpu in GPUS}
    found = {arch: each for arch in arches if (each := kernel(kind, codec, dtype, arch, headers))}
    shares = [found[gpu.arch].share(gpu) for gpu in GPUS]
    cells = [f"{share:.0%}" + ("" if limit == "bytes" else f" {limit}") for share, limit in shares]
    here = found[90]
    per_element = len(here.warp) * cuda_source.THREADS / here.elements
    cells += [f"{per_element:.1f}", str(here.registers), str(here.resident(90))]
    for base in ("LDG", "STG"):
        cells.append(", ".join(f"{number} x {width}" for width, number in here.accesses(base).items()))
    return f"| {kind} {spec} | {dtype} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table; with --write, replace the one in a page, too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="a page that has the table")
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in rows(common_case(Path(folder))):
            print(line, flush=True)
            lines.append(line)
    if given.write:
        begin, end = "<!-- the table of bench/sass.py -->\n", "<!-- its end -->"
        head, _, rest = given.write.read_text().partition(begin)
        given.write.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
