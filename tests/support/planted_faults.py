"""Faults that are planted in the PTX of kernels, to see whether the emulation of PTX finds them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernel_calls import assert_same_bits
from kernel_cases import Operations
from ptx_emulator import Fault, PtxEmulator

__all__ = ["DIFFERENT", "KINDS", "PLANTS", "Bench", "Plant"]

#: what is found if the kernel does nothing wrong but its bytes are not the host's
DIFFERENT = "other bytes"
#: what the launches of Operations do
KINDS = ("encode", "decode", "add", "reduce")
_RESULTS = {"encode": "wire of", "decode": "values of", "add": "sum of", "reduce": "reduced"}


@dataclass(frozen=True)
class Plant:
    """A kind of fault: a regular expression for the code that it replaces, what by, and for what must be found."""

    name: str
    pattern: str
    replacement: str
    finding: str = DIFFERENT

    def plant(self, text: str) -> str | None:
        """A kernel's text with the fault at its first place, if it has one."""
        match = re.search(self.pattern, text)
        return match and text[: match.start()] + match.expand(self.replacement) + text[match.end() :]


_OFFSET = r"(?:\+\d+)?\]"
_ALL = r"(?:-1|0xffffffff|4294967295)"
PLANTS = (
    Plant("no barrier of the block", r"\bbar\.sync\s+0;", "", "race"),
    Plant("no barrier of the warp", r"\bbar\.warp\.sync\s+[^;]+;", "", "race"),
    Plant("a load 4 bytes further", rf"(ld\.global[^;]*\.v[24]\.[^;]*\[%\w+){_OFFSET}", r"\1+4]", "misaligned"),
    Plant("a store 4 bytes further", rf"(st\.global[^;]*\.v[24]\.[^;]*\[%\w+){_OFFSET}", r"\1+4]", "misaligned"),
    Plant("a load far away", rf"(ld\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]", "outside"),
    Plant("a store far away", rf"(st\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]", "outside"),
    Plant("shared memory that is not there", rf"((?:ld|st)\.shared[^;]*\[[%\w$]+){_OFFSET}", r"\1+131072]", "outside"),
    Plant("a mask without a lane", rf"((?:shfl|redux)\.sync\.[^;]*), {_ALL};", r"\1, 0x7fffffff;", "mask"),
    Plant("a lane's own value", rf"(shfl\.sync\.bfly\.[^;]*), \d+, (\d+), {_ALL};", r"\1, 0, \2, -1;"),
    Plant("rounding toward zero", r"cvt\.rni\.", "cvt.rzi."),
    Plant("a pair rounded toward zero", r"cvt\.rn\.bf16x2\.", "cvt.rz.bf16x2."),
    Plant("an integer of 8 bits", r"cvt\.rn\.f32\.[su]\d+", "cvt.rn.f32.s8"),
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
        """What is found of the fault: a Fault's text, DIFFERENT or "nothing"; None if the kernel has no place for it."""
        launch = self._operations.launches[KINDS.index(kind)]
        edited = {name: plant.plant(self._emulator.text(name)) for name in launch.kernels}
        name = next((name for name, text in edited.items() if text is not None), None)
        return None if name is None else self._found(kind, {name: edited[name]})

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
        return "nothing"
