"""What the ranks say beside the table, in marked lines of their output: how far the run is, and its report."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["Bar", "Progress", "decode_report", "encode_progress", "encode_report", "is_progress", "is_report"]

#: called with (steps done, steps in all, what comes next)
Progress = Callable[[int, int, str], None]

#: ASCII's separators of records and of groups begin lines that are not for the reader
_MARK, _REPORT_MARK = "\x1e", "\x1d"
_WIDTH = 30


def encode_progress(done: int, total: int, label: str) -> str:
    """The line by which rank 0 tells the process that started it."""
    return _MARK + json.dumps([done, total, label])


def is_progress(line: str) -> bool:
    """Whether encode_progress() made this line."""
    return line.startswith(_MARK)


def encode_report(document: dict[str, Any]) -> str:
    """The line by which rank 0 hands over all that the run has found so far."""
    return _REPORT_MARK + json.dumps(document)


def is_report(line: str) -> bool:
    """Whether encode_report() made this line."""
    return line.startswith(_REPORT_MARK)


def decode_report(line: str) -> dict[str, Any]:
    """The document in a line of encode_report()."""
    document: dict[str, Any] = json.loads(line[len(_REPORT_MARK) :])
    return document


class Bar:
    """A progress bar in the last line of a terminal; nothing at all where ``stream`` is none."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._share, self._words = 0.0, ""
        self._begin = time.monotonic()

    def feed(self, line: str) -> None:
        """Show what a line of encode_progress() says."""
        done, total, label = json.loads(line[len(_MARK) :])
        self.show(done, total, label)

    def show(self, done: int, total: int, label: str) -> None:
        """Show ``done`` of ``total`` steps, and what comes next."""
        left = ""
        if done:
            seconds = (time.monotonic() - self._begin) / done * (total - done)
            left = f"  about {seconds / 60:.0f} min left" if seconds > 90 else f"  about {seconds:.0f} s left"
        self._share, self._words = done / max(total, 1), f" {done}/{total}  {label}{left}"
        self.draw()

    def draw(self) -> None:
        """Write the bar again; in a narrow terminal it is shorter, so that the words beside it fit."""
        if self._shown and self._words:
            columns = shutil.get_terminal_size().columns - 1
            width = max(0, min(_WIDTH, columns - len("[]") - len(self._words)))
            filled = int(width * self._share)
            text = f"[{'#' * filled}{'.' * (width - filled)}]{self._words}"
            self._stream.write(f"\r\x1b[K{text[:columns]}")
            self._stream.flush()

    def clear(self) -> None:
        """Take the bar off the screen, so that a line can be printed, or for good."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
