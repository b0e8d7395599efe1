"""Codecs of Python functions: the documented one in collectives, and what becomes of its mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from schedule_cases import one_rank

import qccl
from qccl.base.dtypes import FLOAT32
from qccl.codecs import Codec, ErrorFeedback, Momentum, PythonCodec, get
from qccl.collectives.allreduce import two_round
from qccl.engine.cuda.source import check_codecs

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-codec.md"


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> type[PythonCodec]:
    """The codec of the page."""
    text = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    names: dict = {"__name__": "int8_of_the_page"}
    monkeypatch.setitem(sys.modules, "int8_of_the_page", type(sys)("int8_of_the_page"))
    exec(compile(text, PAGE.name, "exec", dont_inherit=True), names)
    return names["Int8"]


def values(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def quantised(codec: PythonCodec, x: np.ndarray) -> np.ndarray:
    return codec.decode_values(codec.encode_values(x), x.size)


@pytest.mark.parametrize("count", [1, 64, 1000, 5001])
def test_the_documented_codec_all_reduces(int8, count: int) -> None:
    codec = int8(64)
    assert codec.slow and repr(codec) == "Int8(bucket=64)"
    every = [values(rank, count) for rank in range(3)]
    found = qccl.run_ranks(
        3, lambda comm: comm.quantized_allreduce(every[comm.rank].copy(), codec=codec, algorithm="two_round")
    )
    for y in found[1:]:
        assert y.tobytes() == found[0].tobytes()
    decoded = [quantised(codec, x).astype(np.float64) for x in every]
    first = sum(codec.error_bound(x) for x in every)
    second = codec.error_bound(sum(abs(x) for x in decoded) + first)
    assert (abs(found[0] - sum(x.astype(np.float64) for x in every)) <= first + second + 1e-5).all()
    assert count == 1 or abs(found[0] - sum(x.astype(np.float64) for x in every)).max() > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_element_types_round_trip(int8, dtype: str) -> None:
    codec = int8(64)
    x = values(0, 200)
    given = x if dtype == "float32" else x.astype(np.float16)
    if dtype == "bfloat16":
        given = (x.view(np.uint32) >> 16).astype(np.uint16)
    exact = (given.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else given.astype(np.float32)
    wire = codec.encode(given, dtype=dtype)
    assert wire.tobytes() == codec.encode_values(exact).tobytes()
    y = codec.decode(wire, 200, dtype)
    decoded = (y.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else y.astype(np.float32)
    unit = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    wanted = quantised(codec, exact)
    assert (abs(decoded - wanted) <= unit * abs(wanted) + 2.0**-25).all()


def test_what_a_function_raises_is_what_its_rank_raises(int8) -> None:
    class Broken(int8):
        def encode_values(self, x):
            if np.isnan(x[0]):
                raise ZeroDivisionError("no such thing")
            return super().encode_values(x)

    def run(comm):
        x = values(comm.rank, 500)
        if comm.rank == 1:
            x[:] = np.nan
        try:
            comm.quantized_allreduce(x, codec=Broken(64))
        except Exception as error:
            return error
        return None

    found = qccl.run_ranks(3, run)
    assert isinstance(found[1], ZeroDivisionError) and "no such thing" in str(found[1])
    assert all(isinstance(found[rank], qccl.PeerLost) for rank in (0, 2)), found


def test_a_function_that_makes_a_call_of_its_own_is_refused(int8) -> None:
    """It would be made in the middle of the one that it belongs to."""

    def run(comm):
        class Nested(int8):
            def encode_values(self, x):
                comm.quantized_allreduce(np.ones(100, np.float32))
                return super().encode_values(x)

        try:
            comm.quantized_allreduce(values(comm.rank, 5000), codec=Nested(64))
        except Exception as error:
            return error
        return None

    found = qccl.run_ranks(2, run, timeout=20)
    assert any("started or waited for a call while qccl was running one" in str(error) for error in found), found
    assert all(isinstance(error, RuntimeError) for error in found), found


def test_a_rank_that_gives_up_while_its_codec_computes_tells_the_others(int8, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest when it is done: only then may somebody else touch what it uses."""
    monkeypatch.setattr("qccl.engine.host.engine._HALT_SECONDS", 0.05)
    began = threading.Event()

    class Slow(int8):
        def decode_values(self, wire, count):
            if threading.current_thread().name == "qccl progress":
                began.set()
                time.sleep(0.4)
            return super().decode_values(wire, count)

    def run(comm):
        comm.quantized_allreduce(values(comm.rank, 500), codec=Slow(64), async_op=comm.rank == 1)
        if comm.rank == 0:
            comm.barrier()
        assert began.wait(60)
        comm.abort("tired of it")

    with pytest.raises(qccl.PeerLost, match="rank 1 gave up: tired of it"):  # not the timeout
        qccl.run_ranks(2, run)


class Speechless(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "cause"),
    [(OSError("caf\udce9"), r"rank 1 gave up: OSError: caf\\udce9"), (Speechless(), "rank 1 gave up: Speechless: <")],
    ids=["no UTF-8", "no text"],
)
def test_the_others_hear_of_an_error_whose_text_cannot_be_sent_as_it_is(int8, error: Exception, cause: str) -> None:
    class Broken(int8):
        def encode_values(self, x):
            raise error

    def run(comm):
        kind = Broken if comm.rank == 1 else int8
        try:
            comm.quantized_allreduce(values(comm.rank, 500), codec=kind(64))
        except Exception as caught:
            return caught
        return None

    heard, own = qccl.run_ranks(2, run)
    assert own is error
    assert isinstance(heard, qccl.PeerLost) and re.search(cause, str(heard)), heard


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
def test_a_codec_may_use_its_array_again(int8, algorithm: str) -> None:
    """Also where it decodes several wires that are then added up."""
    scratch: dict[int, np.ndarray] = {}

    class Thrifty(int8):
        def decode_values(self, wire, count):
            found = scratch.setdefault(threading.get_ident(), np.empty(500, np.float32))[:count]
            found[:] = super().decode_values(wire, count)
            return found

    def sums(kind):
        return qccl.run_ranks(
            3, lambda comm: comm.quantized_allreduce(values(comm.rank, 500), codec=kind(64), algorithm=algorithm)
        )

    for expected, found in zip(sums(int8), sums(Thrifty), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_wires_and_values_of_another_size_are_refused(int8) -> None:
    class Short(int8):
        def encode_values(self, x):
            return super().encode_values(x)[:-1]

    class Wide(int8):
        def decode_values(self, wire, count):
            return super().decode_values(wire, count).astype(np.float64)

    with pytest.raises(qccl.CodecError, match=r"gave 103 of uint8; encoded_nbytes.* says 104"):
        Short(64).encode(values(0, 96))
    wire = int8(64).encode(values(0, 96))
    with pytest.raises(qccl.CodecError, match="must give float32"):
        Wide(64).decode(wire, 96, "float32")


@dataclass(frozen=True)
class Copy(PythonCodec):
    """A codec of qccl's own, called from Python."""

    name: ClassVar[str] = "copy"
    codec: ClassVar[Codec] = get("minmax3:bucket=64")

    @property
    def granule(self) -> int:
        return self.codec.granule

    def _nbytes(self, count, dtype):
        return self.codec.encoded_nbytes(count, dtype)

    def encode_values(self, x):
        return self.codec.encode(x)

    def decode_values(self, wire, count):
        return self.codec.decode(wire, count, "float32")

    def error_bound(self, x):
        return self.codec.error_bound(x)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_round"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("around", [ErrorFeedback, Momentum, lambda codec: Momentum(ErrorFeedback(codec), 0.5)])
def test_error_feedback_and_momentum_go_around_it(around, dtype: str, algorithm: str) -> None:
    """To the bit as around the same codec in C++, with a changing learning rate, and a result that overflows."""

    def run(comm, codec):
        found = []
        for step in range(4):
            x = np.clip(values(comm.rank + 10 * step, 1000) * (3e4 if step == 2 else 1), -65504, 65504).astype(dtype)
            options = {"op": "avg", "algorithm": algorithm, "key": "x", "lr": 0.1 / (step + 1)}
            found.append(comm.quantized_allreduce(x, codec=codec, **options).tobytes())
        return found

    native, python = around(Copy.codec), around(Copy())
    assert qccl.run_ranks(2, lambda comm: run(comm, python)) == qccl.run_ranks(2, lambda comm: run(comm, native))


def test_devices_are_refused(int8) -> None:
    with pytest.raises(qccl.CodecError, match="runs on the host only"):
        check_codecs(one_rank(two_round, 0, 2, 256, FLOAT32, int8(64)))


@pytest.mark.processes
def test_a_process_that_used_one_ends_quietly() -> None:
    text = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    done = subprocess.run(
        [sys.executable, "-c", text + "\nInt8().encode(np.ones(9, np.float32))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
