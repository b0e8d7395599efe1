"""Faults that are planted in the PTX of kernels, in lines that run, to see whether the emulation of PTX finds them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_cases import Prepared
from ptx_emulator import Fault, PtxEmulator

__all__ = ["PLANTS", "Bench", "Plant"]

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
