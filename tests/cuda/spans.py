"""Arrays in buffers with guard areas, for kernels that run without an engine."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from qccl.schedule import Span

GUARD = 64

BUFFERS = 3


class Arrays:
    """Copies of arrays in a few buffers, with guard areas between them, as spans of one buffer each for a schedule."""

    def __init__(self, aligned: bool, rng: np.random.Generator) -> None:
        self._aligned, self._rng = aligned, rng
        self._parts: list[list[np.ndarray]] = [[] for _ in range(BUFFERS)]
        self._places: list[tuple[int, int, int]] = []  # buffer, offset, bytes

    def add(self, content: np.ndarray) -> Span:
        """Store a copy; unless all arrays are aligned, it begins at any multiple of its element's size."""
        number = len(self._places) % BUFFERS
        start = sum(part.size for part in self._parts[number])
        shift = 0 if self._aligned else int(self._rng.integers(0, 16 // content.itemsize)) * content.itemsize
        offset = -(-(start + GUARD) // 16) * 16 + shift
        self._parts[number] += [np.full(offset - start, 0xA5, np.uint8), content.view(np.uint8)]
        self._places.append((number, offset, content.nbytes))
        return Span(f"array {len(self._places) - 1}", 0, content.size)

    def place(self, span: Span) -> tuple[int, int]:
        return self._places[int(span.buffer.split()[1])][:2]

    @cached_property
    def buffers(self) -> list[np.ndarray]:
        """The buffers; afterwards no array can be added."""
        buffers = []
        for parts in self._parts:
            content = np.concatenate([np.zeros(0, np.uint8), *parts, np.full(GUARD, 0xA5, np.uint8)])
            room = np.empty(content.size + 16, np.uint8)
            start = -room.ctypes.data % 16
            room[start : start + content.size] = content
            buffers.append(room[start : start + content.size])
        return buffers

    @property
    def addresses(self) -> list[int]:
        return [buffer.ctypes.data for buffer in self.buffers]

    @property
    def extents(self) -> list[tuple[int, int]]:
        """The address and the bytes of each array: kernels access nothing else."""
        return [(self.addresses[number] + offset, nbytes) for number, offset, nbytes in self._places]

    def take(self, span: Span, dtype: type[np.generic]) -> np.ndarray:
        number, offset, nbytes = self._places[int(span.buffer.split()[1])]
        return self.buffers[number][offset : offset + nbytes].copy().view(dtype)

    def check_guards(self) -> None:
        for number, buffer in enumerate(self.buffers):
            outside = np.ones(buffer.size, bool)
            for other, offset, nbytes in self._places:
                if other == number:
                    outside[offset : offset + nbytes] = False
            assert (buffer[outside] == 0xA5).all(), f"buffer {number} was written outside its arrays"
