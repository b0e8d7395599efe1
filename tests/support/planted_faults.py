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

    name: str
    pattern: str
    replacement: str
    everywhere: bool = False  # in all lines that run, not in one


PLANTS = (
    # all of them: another one may stand between the same accesses
    Plant("barriers are missing", r"\bbar\.sync\s+0;", "", everywhere=True),
    Plant("a load is far away", rf"(ld\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]"),
    Plant("a store is far away", rf"(st\.global[^;]*\[%\w+){_OFFSET}", r"\1+16777216]"),
    Plant("a store is one byte further", rf"(st\.global[^;]*\[%\w+){_OFFSET}", r"\1+1]"),
    Plant("a store is wider", r"st\.global\.u?b?8(\s+\[%\w+(?:\+\d+)?\], )%\w+;", r"st.global.u32\g<1>%r1;"),
    Plant("shared memory is not there", rf"((?:ld|st)\.shared[^;]*\[[%\w$]+){_OFFSET}", r"\1+131072]"),
    Plant("a lane is missing", r"(shfl\.sync\.[^;]*), (?:-1|0xffffffff|4294967295);", r"\1, 0x7fffffff;"),
    Plant("a lane reads itself", r"(shfl\.sync\.bfly\.[^;]*), \d+, (\d+), -1;", r"\1, 0, \2, -1;"),
    # of addresses: other undefined bits may decide comparisons without consequence
    Plant("a register is never set", r"cvta\.to\.global\.u64\s+%\w+, %\w+;", ""),
    # not of constants: of NaN the result is the same, of +0 it is for all but -0
    Plant("a sum is a difference", r"add\.rn\.f32(\s+%\w+, %\w+, %)", r"sub.rn.f32\1"),
    Plant("a product is a sum", r"mul\.rn\.f32", "add.rn.f32"),
    Plant("a comparison is inverted", r"@!?(%p\w+) bra", r"@\1 bra"),
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
                            yield f"{kind}: {plant.name}", lines[chosen[0]].strip(), self.found(kind)

    def found(self, kind: str) -> str | None:
        """What is wrong with a launch."""
        for buffer, content in zip(self._prepared.arrays.buffers, self._content, strict=True):
            buffer[:] = content
        try:
            self._prepared.check(self._emulator, [kind])
        except (Fault, AssertionError) as error:
            return str(error) or "other bytes"
        return None
