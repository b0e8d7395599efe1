"""DeMo: 4 ranks train a small language model by the signs of the strongest frequencies of their momenta.

    python docs/examples/demo.py

The method of Peng, Quesnelle and Kingma 2024 (arXiv 2411.19870). Each rank has a momentum of its own. A step, for each
tile of a parameter, with ``m`` the cosine transform (DCT-II) of the rank's momentum::

    m = DECAY m + lr DCT(gradient)
    q = the K coefficients of m of greatest magnitude, encoded; the others are 0
    m = m - q
    p = p - lr sign(inverse DCT(for each coefficient the mean over the ranks that sent it))

The authors' program (github.com/bloc97/DeMo) keeps the inverse transform of ``m``, which is the same but for rounding.
The ranks gather codes, because how many ranks sent a coefficient differs from one to the next, so that a sum would not
do. All of them decode the same coefficients. On unlike processors the signs of numbers near 0 may differ nevertheless:
there broadcast the parameters of rank 0 from time to time. The model and the tiles are those of the other examples.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks share the processors

import numpy as np
from diloco import RANKS, Adam, Params, bits_per_byte, compare, gradient_of, model, text
from sparseloco import LETTERS, join, split

import qccl

K, DECAY = 32, 0.999
#: by the name in tables: how DeMo encodes coefficients, or None for Adam with averaged gradients; and the learning rate
WAYS: dict[str, tuple[str | None, float]] = {
    "Adam, fp32": (None, 2e-3),
    "DeMo, fp32": ("exact", 3e-3),
    "DeMo, 4 bits": ("exp4", 3e-3),
}


def basis(n: int) -> np.ndarray:
    """The orthonormal DCT-II of n elements as a matrix."""
    k, j = np.ogrid[:n, :n]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * j + 1) * k / (2 * n))
    return np.where(k == 0, np.sqrt(1 / n), rows).astype(np.float32)


def block_of(tiles: np.ndarray) -> int:
    """The elements of a tile, and zeros behind them up to a multiple of 8."""
    return -(-tiles[0].size // 8) * 8


def codec_of(tiles: np.ndarray, values: str) -> str:
    """A codec that keeps the K greatest elements of a tile."""
    return f"topk:k={min(K, tiles[0].size)},block={block_of(tiles)},values={values}"


class DeMo:
    """The optimiser of one rank; it changes ``params``, the same on all ranks, in place."""

    def __init__(self, comm: qccl.Communicator, params: Params, values: str, lr: float) -> None:
        self.comm, self.params, self.values, self.lr = comm, params, values, lr
        tiles = {name: split(array) for name, array in params.items()}
        self.momenta = {name: np.zeros((len(each), block_of(each)), np.float32) for name, each in tiles.items()}

    def step(self, gradients: Params) -> None:
        """Take a step by this rank's own gradients."""
        for name, p in self.params.items():
            tiles, m = split(gradients[name].astype(np.float32)), self.momenta[name]
            rows, columns = (basis(n) for n in tiles.shape[1:])
            m *= DECAY
            m[:, : tiles[0].size] += self.lr * (rows @ tiles @ columns.T).reshape(len(m), -1)
            sent = np.empty((self.comm.size, *m.shape), np.float32)
            self.comm.quantized_all_gather(m, sent, codec=codec_of(tiles, self.values))
            m -= sent[self.comm.rank]
            mean = sent.sum(axis=0) / np.maximum(1, (sent != 0).sum(axis=0, dtype=np.float32))
            values = rows.T @ mean[:, : tiles[0].size].reshape(tiles.shape) @ columns
            p -= self.lr * np.sign(join(values, p.shape))


def train(comm: qccl.Communicator, way: str, rounds: int, steps: int) -> list[float]:
    """The validation losses after each round of steps, in bits per byte."""
    parts, validation, _ = text()
    params, rng, losses = model(LETTERS), np.random.default_rng(comm.rank), []
    values, lr = WAYS[way]
    demo, adam = DeMo(comm, params, values or "", lr), Adam(params)
    for number in range(1, rounds + 1):
        for _ in range(steps):
            gradients = gradient_of(params, parts[comm.rank], rng)
            if values is not None:
                demo.step(gradients)
            else:
                arrays = comm.quantized_allreduce_coalesced(list(gradients.values()), codec="none", op="avg")
                adam.step(params, dict(zip(gradients, arrays, strict=True)), lr)
        if comm.rank == 0:
            losses.append(bits_per_byte(params, validation))
            print(f"{way:28} step {number * steps:4} of {rounds * steps}: {losses[-1]:.3f} bits per byte", flush=True)
    return losses


def sent_mb(way: str, steps: int) -> float:
    """What a rank sends in so many steps."""
    arrays, values = model(LETTERS).values(), WAYS[way][0]
    if values is None:
        return steps * 2 * (RANKS - 1) / RANKS * sum(array.nbytes for array in arrays) / 1e6
    tiles = [split(array) for array in arrays]
    codes = (qccl.codecs.get(codec_of(t, values)).encoded_nbytes(len(t) * block_of(t), "float32") for t in tiles)
    return steps * (RANKS - 1) * sum(codes) / 1e6


if __name__ == "__main__":
    compare(__doc__, "DeMo", WAYS, train, sent_mb, lengths=(30, 50), unit="50 steps")
