"""The output of rank 0: the lines of the table, and below them a progress bar in the last line of a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

__all__ = ["Progress", "Screen"]

#: called with (steps done, all steps, name of the next step)
Progress = Callable[[int, int, str], None]

_WIDTH = 30


class Screen:
    """Shows lines on standard output, and a progress bar on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._share, self._text = 0.0, ""
        self._begin = time.monotonic()

    def line(self, line: str) -> None:
        """Show a line; ends this process if nobody reads them."""
        self.clear()
        try:
            print(line, flush=True)
        except BrokenPipeError:
            os._exit(1)
        self._draw()

    def progress(self, done: int, total: int, label: str) -> None:
        """Show ``done`` of ``total`` steps, and the name of the next one."""
        left = ""
        if done:
            seconds = (time.monotonic() - self._begin) / done * (total - done)
            left = f"  about {seconds / 60:.0f} min left" if seconds > 90 else f"  about {seconds:.0f} s left"
        self._share, self._text = done / max(total, 1), f" {done}/{total}  {label}{left}"
        self._draw()

    def clear(self) -> None:
        """Erase the bar, before a line is printed or at the end."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        """Draw the bar; in a narrow terminal it is shorter, so that the text beside it fits."""
        if self._shown and self._text:
            columns = shutil.get_terminal_size().columns - 1
            width = max(0, min(_WIDTH, columns - len("[]") - len(self._text)))
            filled = int(width * self._share)
            text = f"[{'#' * filled}{'.' * (width - filled)}]{self._text}"
            print(f"\r\x1b[K{text[:columns]}", end="", file=sys.stderr, flush=True)
