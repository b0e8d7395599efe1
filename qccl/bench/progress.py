"""Marked lines of rank 0's output that are not part of the table: the progress of the run, and its report."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["Bar", "Progress", "decode_report", "encode_progress", "encode_report", "is_progress", "is_report"]

#: called with (steps done, all steps, name of the next step)
Progress = Callable[[int, int, str], None]

#: ASCII's record and group separators mark the lines that the starting process does not print
_MARK, _REPORT_MARK = "\x1e", "\x1d"
_WIDTH = 30


def encode_progress(done: int, total: int, label: str) -> str:
    """The line that reports rank 0's progress to the process that started it."""
    return _MARK + json.dumps([done, total, label])


def is_progress(line: str) -> bool:
    """Whether encode_progress() made this line."""
    return line.startswith(_MARK)


def encode_report(document: dict[str, Any]) -> str:
    """The line that passes all results so far from rank 0 to the process that started it."""
    return _REPORT_MARK + json.dumps(document)


def is_report(line: str) -> bool:
    """Whether encode_report() made this line."""
    return line.startswith(_REPORT_MARK)


def decode_report(line: str) -> dict[str, Any]:
    """The document in a line of encode_report()."""
    document: dict[str, Any] = json.loads(line[len(_REPORT_MARK) :])
    return document


class Bar:
    """A progress bar in the last line of a terminal; does nothing if ``stream`` is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._share, self._text = 0.0, ""
        self._begin = time.monotonic()

    def feed(self, line: str) -> None:
        """Show the progress in a line of encode_progress()."""
        done, total, label = json.loads(line[len(_MARK) :])
        self.show(done, total, label)

    def show(self, done: int, total: int, label: str) -> None:
        """Show ``done`` of ``total`` steps, and the name of the next one."""
        left = ""
        if done:
            seconds = (time.monotonic() - self._begin) / done * (total - done)
            left = f"  about {seconds / 60:.0f} min left" if seconds > 90 else f"  about {seconds:.0f} s left"
        self._share, self._text = done / max(total, 1), f" {done}/{total}  {label}{left}"
        self.draw()

    def draw(self) -> None:
        """Draw the bar; in a narrow terminal it is shorter, so that the text beside it fits."""
        if self._shown and self._text:
            columns = shutil.get_terminal_size().columns - 1
            width = max(0, min(_WIDTH, columns - len("[]") - len(self._text)))
            filled = int(width * self._share)
            text = f"[{'#' * filled}{'.' * (width - filled)}]{self._text}"
            self._stream.write(f"\r\x1b[K{text[:columns]}")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the bar, before a line is printed or at the end."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
