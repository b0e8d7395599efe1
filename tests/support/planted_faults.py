"""Faults that are planted in the PTX of kernels, to see whether the emulation of PTX finds them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_calls import assert_same_bits
from kernel_cases import Operations
from ptx_emulator import Fault, PtxEmulator

__all__ = ["DIFFERENT", "KINDS", "PLANTS", "Bench", "Plant"]

#: what is found if the kernel does nothing wrong but its bytes are not the host's
DIFFERENT = "other bytes"
NOTHING = "nothing"
#: places where a fault is planted in a kernel at most, until it is found: code that serves rare cases is often not run
PLACES = 12
#: what the launches of Operations do
KINDS = ("encode", "decode", "add", "reduce")
_RESULTS = {"encode": "wire of", "decode": "values of", "add": "sum of", "reduce": "reduced"}


@dataclass(frozen=True)
class Plant:
    """A kind of fault: regular expressions for the code that it replaces and for what must be found, and the new code."""

    name: str
    pattern: str
    replacement: str
    finding: str = DIFFERENT

    def plant(self, text: str) -> Iterator[str]:
        """A kernel's text with the fault at one of its places, for each of the first ones."""
        for match in itertools.islice(re.finditer(self.pattern, text), PLACES):
            yield text[: match.start()] + match.expand(self.replacement) + text[match.end() :]


_OFFSET = r"(?:\+\d+)?\]"
_ALL = r"(?:-1|0xffffffff|4294967295)"
PLANTS = (
    Plant("no barrier of the block", r"\bbar\.sync\s+0;", "", "race|uninitialised"),
    Plant("no barrier of the warp", r"\bbar\.warp\.sync\s+[^;]+;", "", "race|uninitialised"),
    Plant("a load 4 bytes further", rf"(ld\.global[^;]*\.v[24]\.[^;]*\[%\w+){_OFFSET}", r"\1+4]", "misaligned"),
    Plant("a store 4 bytes further", rf"(st\.global[^;]*\.v[24]\.[^;]*\[%\w+){_OFFSET}", r"\1+4]", "misaligned"),
    Plant("a load far away", rf"(ld\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]", "outside"),
    Plant("a store far away", rf"(st\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]", "outside"),
    Plant("shared memory that is not there", rf"((?:ld|st)\.shared[^;]*\[[%\w$]+){_OFFSET}", r"\1+131072]", "outside"),
    Plant("a mask without a lane", rf"((?:shfl|redux)\.sync\.[^;]*), {_ALL};", r"\1, 0x7fffffff;", "mask"),
    Plant("a lane's own value", rf"(shfl\.sync\.bfly\.[^;]*), \d+, (\d+), {_ALL};", r"\1, 0, \2, -1;"),
    Plant("rounding toward zero", r"cvt\.rni\.", "cvt.rzi."),
    Plant("a pair rounded toward zero", r"cvt\.rn\.bf16x2\.", "cvt.rz.bf16x2."),
    Plant("a product for a quotient", r"div\.rn\.f32", "mul.rn.f32"),
    Plant("a difference for a sum", r"add\.rn\.f32", "sub.rn.f32"),
    Plant("a sum for a product", r"mul\.rn\.f32", "add.rn.f32"),
    Plant("a NaN that is lost", r"(min|max)\.NaN\.f32", r"\1.f32"),
    Plant("a register that is never set", r"ld\.global[^;]*\.[ubf](?:32|64)\s+%\w+,[^;]*;", "", "uninitialised"),
)


class Bench:
    """The kernels of a case, in which faults are planted one at a time."""

    def __init__(self, emulator: PtxEmulator, operations: Operations) -> None:
        self._emulator, self._operations = emulator, operations
        self._content = [buffer.copy() for buffer in operations.arrays.buffers]

    def find(self, plant: Plant, kind: str) -> str | None:
        """What is found of the fault: a Fault's text, DIFFERENT or NOTHING; None if the kernel has no place for it."""
        found = None
        for name in self._operations.launches[KINDS.index(kind)].kernels:
            for text in plant.plant(self._emulator.text(name)):
                found = self._found(kind, {name: text})
                if found != NOTHING:
                    return found
        return found

    def _found(self, kind: str, edited: dict[str, str]) -> str:
        operations = self._operations
        for buffer, content in zip(operations.arrays.buffers, self._content, strict=True):
            buffer[:] = content
        try:
            self._emulator.run(
                operations.launches[KINDS.index(kind)], operations.arrays, operations.call, edited=edited
            )
            for what, span, expected in operations.expected:
                if what.startswith(_RESULTS[kind]):
                    assert_same_bits(operations.arrays.take(span, expected.dtype.type), expected, what)
        except Fault as fault:
            return str(fault)
        except AssertionError:
            return DIFFERENT
        return NOTHING
