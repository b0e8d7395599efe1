"""The addresses of a program's buffers, as its kernels find them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

from qccl.cuda.source import ADDRESSES, DIRECT_BUFFERS, MEMORY_WORDS, TABLE_WORD

__all__ = ["Addresses"]


class Addresses:
    """The addresses of named buffers: each launch passes those of the first, and a table on the device has the others.

    Attributes:
        words: the kernels' Memory argument.
        numbers: the number of each buffer, by which kernels know it.
        table_nbytes: size of the table; 0 if none is needed.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.numbers = {name: i for i, name in enumerate(names)}
        self.words = (ctypes.c_uint64 * MEMORY_WORDS)()
        self._others = max(len(self.numbers) - DIRECT_BUFFERS, 0)
        self.table_nbytes = 8 * self._others
        self._table = (ctypes.c_uint64 * (-(-self._others // ADDRESSES) * ADDRESSES))()

    def __getitem__(self, name: str) -> int:
        number = self.numbers[name]
        return int(self.words[number] if number < DIRECT_BUFFERS else self._table[number - DIRECT_BUFFERS])

    def __setitem__(self, name: str, address: int) -> None:
        number = self.numbers[name]
        if number < DIRECT_BUFFERS:
            self.words[number] = address
        else:
            self._table[number - DIRECT_BUFFERS] = address

    def table_arguments(self) -> Iterator[tuple[Any, ...]]:
        """The arguments of the ADDRESS_KERNELs that write the table; launches read the values."""
        table = self.words[TABLE_WORD]
        for first in range(0, self._others, ADDRESSES):
            values = (ctypes.c_uint64 * ADDRESSES).from_buffer(self._table, 8 * first)
            count = min(self._others - first, ADDRESSES)
            yield ctypes.c_uint64(table + 8 * first), values, ctypes.c_uint32(count)
