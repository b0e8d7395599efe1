"""SparseLoCo: 4 ranks train a small language model, and of each 4096 changes send the 64 greatest with 4 bits.

    python docs/examples/sparseloco.py

An outer step of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) is one of DiLoCo with other options. A rank sends the
greatest changes of each square of 64 x 64 of a matrix, and their positions. The rest is part of its next change, by
error feedback that decays by 0.95. The average over the ranks is a step of SGD. The model is that of diloco.py.

The authors' program (github.com/tplr-ai/SparseLoCo) sends the values with 2 bits, and averages an element over the
ranks that sent it; here that is over all ranks.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks share the processors

from typing import Any

import numpy as np
from diloco import RANKS, Adam, bits_per_byte, compare, gradient_of, model, text

import qccl

#: the side of a tile, and rows of the embedding: more than there are letters, and a multiple of the side
SIDE, LETTERS = 64, 128
#: k as a fraction, which also holds for arrays that are shorter than a block
SPARSELOCO: dict[str, Any] = {
    "codec": f"topk:k={1 / 64},block={SIDE**2},values=exp4+ef:beta=0.95",
    **{"algorithm": "one_shot", "outer_lr": 1, "momentum": 0},
}
#: by the name in tables: options of DiLoCo
WAYS: dict[str, dict[str, Any]] = {
    "DiLoCo, fp32": {"codec": "none"},
    "DiLoCo, 4 bits": {"codec": "minmax4+ef"},
    "SparseLoCo": SPARSELOCO,
    "SparseLoCo, no feedback": SPARSELOCO | {"codec": SPARSELOCO["codec"].partition("+")[0]},
}


def sides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """A matrix as a grid of tiles: tiles down, their height, tiles across, their width. A vector is one row.

    The sides of a tile are the greatest divisors of the matrix's sides up to SIDE.
    """
    rows, columns = (1, *shape)[-2:]
    height, width = (next(d for d in range(SIDE, 0, -1) if n % d == 0) for n in (rows, columns))
    return rows // height, height, columns // width, width


def split(array: np.ndarray) -> np.ndarray:
    """The tiles of an array, of shape (number, height, width)."""
    _, height, _, width = sides(array.shape)
    return array.reshape(sides(array.shape)).swapaxes(1, 2).reshape(-1, height, width)


def join(tiles: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array of this shape that consists of tiles."""
    down, height, across, width = sides(shape)
    return tiles.reshape(down, across, height, width).swapaxes(1, 2).reshape(shape)


def outer_step(outer: qccl.DiLoCo, params: dict[str, np.ndarray]) -> None:
    """Take an outer step of parameters, which DiLoCo has in the order of tiles, so that a block is a square."""
    found = outer.step({name: split(array) for name, array in params.items()})
    for name, array in params.items():
        array[...] = join(found[name], array.shape)


def train(comm: qccl.Communicator, way: str, rounds: int, local_steps: int) -> list[float]:
    """The validation losses after each round of local steps, in bits per byte."""
    parts, validation, _ = text()
    params, rng, losses = model(LETTERS), np.random.default_rng(comm.rank), []
    outer = qccl.DiLoCo(comm, {name: split(array) for name, array in params.items()}, **WAYS[way])
    inner = Adam(params)
    for number in range(1, rounds + 1):
        for _ in range(local_steps):
            inner.step(params, gradient_of(params, parts[comm.rank], rng))
        outer_step(outer, params)
        if comm.rank == 0:
            losses.append(bits_per_byte(params, validation))
            print(f"{way:28} outer step {number:3} of {rounds}: {losses[-1]:.3f} bits per byte", flush=True)
    return losses


def sent_mb(way: str, local_steps: int) -> float:
    """What a rank sends in an outer step: its code to each other rank, or in two rounds a part of it."""
    codec, count = qccl.codecs.get(WAYS[way]["codec"]), sum(array.size for array in model(LETTERS).values())
    messages = RANKS - 1 if "algorithm" in WAYS[way] else 2 * (RANKS - 1) / RANKS
    return messages * codec.encoded_nbytes(count, "float32") / 1e6


if __name__ == "__main__":
    compare(__doc__, "SparseLoCo", WAYS, train, sent_mb, lengths=(100, 15))
