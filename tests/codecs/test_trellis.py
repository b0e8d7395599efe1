"""The trellis codec: its bound is close and follows its blocks; its device code is told what it needs."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_calls import errors

from qccl.codecs import get
from qccl.codecs.base import Kernel, Tile

TRELLISES = [f"trellis{bits}{options}" for bits in range(1, 9) for options in ("", ":bucket=200,block=64,outliers=0")]


@pytest.mark.parametrize("spec", TRELLISES)
@pytest.mark.parametrize("scale", [2.0**-110, 1.0, 2.0**124])
def test_the_bound_of_trellis_is_close(spec: str, scale: float) -> None:
    """Some value reaches 0.9 of its bound, and none exceeds it."""
    x = (np.random.default_rng(0).standard_normal(1 << 16) * scale).astype(np.float32)
    ratio = errors(codec := get(spec), x) / codec.error_bound(x)
    assert 0.9 < ratio.max() <= 1


def test_the_bound_of_trellis_follows_blocks_and_not_outliers() -> None:
    """Outliers and blocks with a larger scale do not make the bounds of other values larger."""
    codec, x = get("trellis8"), np.random.default_rng(0).standard_normal(1 << 11).astype(np.float32)
    calm = codec.error_bound(x)
    x[300] = 1e6
    bound = codec.error_bound(x)
    assert errors(codec, x)[300] <= bound[300] < 1e6 * 2.0**-12
    assert np.delete(bound, 300).max() < 1.5 * calm.max()
    x[1024:] *= 100
    assert np.delete(codec.error_bound(x)[:1024], 300).max() < 1.5 * calm.max()


def test_the_device_decodes_buckets_and_encodes_with_the_general_kernel() -> None:
    """A decoder that took a part of a bucket by itself would lack the codes before it."""
    found = get("trellis3:bucket=512,block=64,outliers=2").kernel()
    tile = Tile(None, "TrellisTile<3, 512, 64, 2>", by_bucket=True)
    assert found == Kernel("Trellis", bucket=512, options=(3, 64, 2), tile=tile)
