"""Tiles and back; the cosine transform by its formula; signs that no order of additions changes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from qccl.dct import LONGEST, CosineTransform, basis
from qccl.tiles import Tiles


@pytest.mark.parametrize(
    ("shape", "height", "width"),
    [
        *(((128, 192), 64, 64), ((100, 7), 50, 7), ((67, 130), 1, 26), ((96,), 1, 48), ((), 1, 1), ((6, 5, 4), 6, 20)),
        *(((0, 4), 1, 4), ((1,), 1, 1)),
    ],
)
def test_tiles_are_rectangles_of_divisors(shape: tuple[int, ...], height: int, width: int) -> None:
    tiles, array = Tiles(shape, 64), np.arange(np.prod(shape, dtype=int)).reshape(shape)
    cut = tiles.split(array)
    assert cut.shape == (tiles.number, height, width) and (tiles.join(cut) == array).all()
    matrix = array.reshape(shape[0] if len(shape) > 1 else 1, -1) if array.size else array
    for number, tile in enumerate(cut):
        row, column = divmod(number, matrix.shape[1] // width)
        wanted = matrix[row * height : (row + 1) * height, column * width : (column + 1) * width]
        assert (tile == wanted).all()


def test_a_tile_may_be_much_longer_than_the_array() -> None:
    """The greatest divisor is found at once."""
    tiles = Tiles((6, 35), 1 << 60)
    assert (tiles.height, tiles.width, tiles.number) == (6, 35, 1)
    assert Tiles((0, 7), 1 << 60).number == 0


def cosines(n: int) -> np.ndarray:
    """The orthonormal DCT-II, from its formula."""
    k, j = np.mgrid[:n, :n]
    return np.where(k == 0, np.sqrt(1 / n), np.sqrt(2 / n)) * np.cos(np.pi * (2 * j + 1) * k / (2 * n))


def library_of(name: str) -> Any:
    return np.asarray if name == "numpy" else pytest.importorskip(name).from_numpy


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (1, 29), (5, 128), (1, 1)])
def test_the_transform_is_the_formula(library: str, height: int, width: int) -> None:
    """To the rounding of the basis (2**-25) and of float32, in sums of ``height + width`` terms of at most 1."""
    tiles = np.random.default_rng(0).uniform(-1, 1, (3, height, width)).astype(np.float32)
    found = np.asarray(CosineTransform().forward(library_of(library)(tiles)))
    wanted = cosines(height) @ tiles.astype(np.float64) @ cosines(width).T
    assert found.dtype == np.float32
    greatest = np.sqrt(height * width)  # of a coefficient, and of the sums of magnitudes behind it
    np.testing.assert_allclose(found, wanted, rtol=0, atol=(height + width + 4) * 2.0**-24 * greatest)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_signs_are_those_of_the_inverse(library: str) -> None:
    rng = np.random.default_rng(1)
    tiles = (rng.standard_normal((5, 64, 32)) * 10.0 ** rng.integers(-30, 30, (5, 1, 1))).astype(np.float32)
    tiles[4] = 0
    signs = np.asarray(CosineTransform().inverse_signs(library_of(library)(tiles)))
    values = cosines(64).T @ tiles.astype(np.float64) @ cosines(32)
    most = abs(tiles).max(axis=(1, 2), keepdims=True).astype(np.float64)
    certain = abs(values) > 64 * 32 * 2.0**-24 * most  # more than all roundings together
    assert certain[:4].mean() > 0.9 and (signs[certain] == np.sign(values[certain])).all() and (signs[4] == 0).all()


def test_all_sums_are_exact() -> None:
    """The worst sums of magnitudes of the longest basis, and a product whose order of additions is reversed."""
    matrix = np.array(basis(LONGEST), np.int64).reshape(LONGEST, LONGEST)
    longest = int(max(abs(matrix).sum(axis=0).max(), abs(matrix).sum(axis=1).max()))
    first = 2**24 * longest
    assert first < 2**53 and (round(Fraction(first, 2**27)) + 1) * longest < 2**53
    tiles = np.random.default_rng(2).standard_normal((4, LONGEST, LONGEST)).astype(np.float32)
    scaled = (tiles.astype(np.float64) / abs(tiles).max(axis=(1, 2), keepdims=True).astype(np.float64) * 2**24).round()
    halfway = (matrix.T @ scaled.astype(np.int64)).astype(np.float64) * 2.0**-27
    wanted = np.sign(halfway.round().astype(np.int64) @ matrix)
    assert (CosineTransform().inverse_signs(tiles) == wanted).all()
