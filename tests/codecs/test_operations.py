"""Single calls of a codec's kernels give the bits of encode() and decode(), and of the oracle's reduce."""

from __future__ import annotations

import numpy as np
import pytest

from qccl import ArgumentError, codecs
from qccl.codecs.operations import Operations, copy, instruction_set, usable_instruction_sets

COUNT = 5000
RNG = np.random.default_rng(0)
OWN, FIRST, SECOND = (RNG.standard_normal(COUNT).astype(np.float32) for _ in range(3))


def wire_of(codec: codecs.Codec) -> np.ndarray:
    return np.empty(codec.encoded_nbytes(COUNT, "float32"), np.uint8)


@pytest.mark.parametrize("spec", ["none", "minmax4", "minmax4:rounding=stochastic", "trellis2", "randomk:k=0.1"])
def test_encode_and_decode(spec: str) -> None:
    codec, wire, values = codecs.get(spec), wire_of(codecs.get(spec)), np.empty_like(OWN)
    operations = Operations(codec, "float32", call=7)
    operations.encode(OWN, wire)()
    operations.decode(wire, values)()
    assert wire.tobytes() == codec.encode(OWN, 7).tobytes()
    assert values.tobytes() == codec.decode(wire, COUNT, "float32", 7).tobytes()


def test_the_place_keys_random_numbers() -> None:
    operations = Operations(codecs.get("minmax4:rounding=stochastic"), "float32")
    wires = []
    for place in ((0, 0, 0), (0, 0, 0), (1024, 0, 0), (0, 1, 0), (0, 0, 1)):
        wires.append(wire_of(codecs.get("minmax4")))
        operations.encode(OWN, wires[-1], place)()
    assert len({wire.tobytes() for wire in wires}) == 4


@pytest.mark.parametrize("threads", [1, 2])
def test_reduce(threads: int) -> None:
    codec = codecs.get("minmax8")
    received, wire, out = [codec.encode(each) for each in (FIRST, SECOND)], wire_of(codec), np.empty_like(OWN)
    Operations(codec, "float32", threads=threads).reduce(received, OWN, wire, out)()
    total = OWN + codec.decode(received[0], COUNT, "float32") + codec.decode(received[1], COUNT, "float32")
    assert wire.tobytes() == codec.encode(total).tobytes()
    assert out.tobytes() == codec.decode(wire, COUNT, "float32").tobytes()


def test_state() -> None:
    """Momentum ``m = mu m + x`` and ``x + mu m``; the residual is what the code lacks."""
    codec, wire = codecs.get("minmax4"), wire_of(codecs.get("minmax4"))
    residual, momentum = ((old, np.empty_like(OWN)) for old in (FIRST, SECOND))
    Operations(codec, "float32").reduce([], OWN, wire, residual=residual, momentum=momentum, mu=0.5)()
    sums = np.float32(0.5) * SECOND + OWN
    np.testing.assert_allclose(momentum[1], sums, rtol=1e-6, atol=1e-6)
    given = OWN + np.float32(0.5) * sums + FIRST
    np.testing.assert_allclose(residual[1], given - codec.decode(wire, COUNT, "float32"), rtol=1e-5, atol=1e-5)


def test_bad_call_and_the_rest() -> None:
    with pytest.raises(ArgumentError, match="call=-1 is not possible"):
        Operations(codecs.get("minmax4"), "float32", call=-1)
    out = np.empty_like(OWN)
    copy(OWN, out)
    assert out.tobytes() == OWN.tobytes() and instruction_set() in usable_instruction_sets()
