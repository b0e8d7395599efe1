"""The codecs of blocks: their errors, and the floats of OCP MX and NVFP4 against ml_dtypes."""

from __future__ import annotations

import statistics
from typing import Any

import frontier
import ml_dtypes
import numpy as np
import pytest
from kernel_calls import errors

from qccl.codecs import Levels, get

SAMPLES = ("Gaussian", "Laplace", "Student t(3)")


@pytest.mark.parametrize(
    ("spec", "most_bytes", "most"),
    [
        ("levels4", 0.537, (0.084, 0.092, 0.11)),
        ("levels3", 0.411, (0.17, 0.20, 0.25)),
        ("levels2:block=64", 0.28, (0.35, 0.43, 0.54)),
        ("mxfp8", 1.0313, (0.031, 0.034, 0.036)),
        ("mxfp4", 0.5313, (0.118, 0.130, 0.150)),
        ("nvfp4", 0.567, (0.096, 0.095, 0.095)),
    ],
)
def test_errors(spec: str, most_bytes: float, most: tuple[float, ...]) -> None:
    """The median of ten draws."""
    codec, count = get(spec), 1 << 16
    assert codec.encoded_nbytes(count, "float32") / count <= most_bytes
    for name, limit in zip(SAMPLES, most, strict=True):
        draws = [frontier.SAMPLES[name](count, draw) for draw in range(10)]
        found = [float(np.linalg.norm(errors(codec, x)) / np.linalg.norm(x)) for x in draws]
        assert statistics.median(found) <= limit, name


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("small", [2.0**-121, 2.0**-149])
def test_blocks_far_below_the_greatest_have_the_smallest_scale(bits: int, small: float) -> None:
    x = np.where(np.arange(1024) // 128 % 2, 2.0**30, small).astype(np.float32)
    scales = get(f"levels{bits}").encode(x)[-32:]
    assert (scales.reshape(-1, 4)[::2] == 253).all() and (scales.reshape(-1, 4)[1::2] < 32).all()


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_of_hard_blocks_is_less_than_their_values(bits: int, block: int) -> None:
    """Otherwise error feedback could diverge."""
    rng, shape = np.random.default_rng(0), (256, block)
    one_hot = np.zeros(shape)
    one_hot[np.arange(256), rng.integers(0, block, 256)] = rng.standard_normal(256)
    sparse = np.where(rng.random(shape) < 0.05, rng.standard_normal(shape), 0)
    hard = {"one-hot": (one_hot, 0.97), "sparse": (sparse, 0.93)}
    hard["constant"] = np.repeat(rng.standard_normal((256, 1)), block, axis=1), 0.025
    hard["offset"] = 100 + rng.standard_normal(shape), 0.025
    for kind, (values, most) in hard.items():
        x = values.astype(np.float32).reshape(-1)
        assert np.linalg.norm(errors(Levels(bits, block), x)) < most * np.linalg.norm(x), kind


def test_a_block_that_is_not_finite_spoils_no_other_block() -> None:
    for spec in ("levels2", "levels3:rounding=stochastic", "levels4", "mxfp8:type=e5m2", "mxfp4", "nvfp4"):
        codec = get(spec)
        x = np.random.default_rng(0).standard_normal(200).astype(np.float32)
        alone = codec.decode(codec.encode(x), x.size, "float32")
        x[40] = np.inf
        y = codec.decode(codec.encode(x), x.size, "float32")
        block = codec.block  # type: ignore[attr-defined]
        spoiled = np.arange(200) // block == 40 // block
        assert np.isnan(y[spoiled]).all() and np.isfinite(y[~spoiled]).all()
        assert spec == "nvfp4" or abs(alone).argmax() // block == 40 // block or (y[~spoiled] == alone[~spoiled]).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """The mean of 4,000 encodings is within 6 standard errors of each value."""
    codec, calls = Levels(bits, 16, 16, "stochastic", seed=1), 4000
    x = np.random.default_rng(0).standard_normal(48).astype(np.float32)
    draws = [codec.decode(codec.encode(x, call), x.size, "float32") for call in range(calls)]
    found = np.stack(draws).astype(np.float64)
    error = np.abs(found.mean(axis=0) - x)
    assert (error <= 6 * found.std(axis=0) / calls**0.5 + 1e-6).all()
    assert np.abs(found - x).max() > 0.05


FLOATS = [
    ("mxfp8", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu),
    ("mxfp8:type=e5m2", ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
    ("mxfp4", ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu),
    ("nvfp4", ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn),
]


def wire_of(codes: np.ndarray, scales: np.ndarray, bits: int, number: bool) -> np.ndarray:
    """A wire of whole buckets whose numbers are 1. The lower half of a byte is the first of two codes of 4 bits."""
    packed = codes if bits == 8 else codes[::2] | codes[1::2] << 4
    metas = scales.reshape(-1, 1024 // (codes.size // scales.size))
    if number:
        metas = np.hstack([np.tile(np.ones(1, np.float32).view(np.uint8), (len(metas), 1)), metas])
    return np.concatenate([packed, metas.reshape(-1)])


@pytest.mark.parametrize(("spec", "element", "scale"), FLOATS)
def test_each_code_and_scale_is_the_number_of_ml_dtypes(spec: str, element: Any, scale: Any) -> None:
    codec = get(spec)
    bits, block = codec.code_bits, codec.block  # type: ignore[attr-defined]
    blocks = 1 << bits >> 4  # with all codes; a block of 16 or 32 repeats them
    codes = np.tile(np.arange(256 if bits == 8 else 16, dtype=np.uint8), 256 * max(blocks, 1) * block // (1 << bits))
    scales = np.repeat(np.arange(256, dtype=np.uint8), codes.size // block // 256)
    found = codec.decode(wire_of(codes, scales, bits, spec == "nvfp4"), codes.size, "float32")
    with np.errstate(all="ignore"):
        factors = np.repeat(scales.view(scale).astype(np.float32), block)
        wanted = codes.view(element).astype(np.float32) * factors
    assert np.array_equal(found, wanted, equal_nan=True)
    assert (np.signbit(found) == np.signbit(wanted))[~np.isnan(wanted)].all()


@pytest.mark.parametrize(("spec", "element", "scale"), FLOATS[:3])
def test_mx_encodes_as_ocp_mx_says(spec: str, element: Any, scale: Any) -> None:
    """The scale is the greatest power of two in the block over that of the element type; then each value is cast."""
    codec, rng = get(spec), np.random.default_rng(0)
    x = (rng.standard_normal((256, 32)) * 2.0 ** rng.integers(-100, 100, (256, 1))).astype(np.float32)
    x[:16] *= x[:16] > 0  # zeros of both signs
    x[16] = np.linspace(-1, 1, 32)
    shared = np.floor(np.log2(abs(x).max(axis=1))) - np.floor(np.log2(float(ml_dtypes.finfo(element).max)))
    scales = np.exp2(shared).astype(np.float32)
    most = float(ml_dtypes.finfo(element).max)
    codes = np.clip(x / scales[:, None], -most, most).astype(element).view(np.uint8).reshape(-1)
    wanted = wire_of(codes, scales.astype(scale).view(np.uint8), codec.code_bits, number=False)  # type: ignore[attr-defined]
    assert np.array_equal(codec.encode(x.reshape(-1)), wanted)
