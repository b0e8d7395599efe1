"""Conversion of data from files: one thread at a time describes a type to msgspec."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from qccl.base.conversion import converted


def test_threads_convert_one_after_the_other(monkeypatch):
    inside = threading.Semaphore(1)

    def convert(given, kind):
        assert inside.acquire(blocking=False), "two threads are in msgspec.convert"
        time.sleep(0.01)
        inside.release()
        return kind(given)

    monkeypatch.setattr(msgspec, "convert", convert)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: converted(str(number), int), range(8))) == list(range(8))


def test_what_does_not_fit_is_a_value_error():
    with pytest.raises(ValueError, match="int"):
        converted("1", int)
