"""1-bit SGD, column by column: 4 ranks train a network on handwritten digits and send one bit for each gradient.

    python docs/examples/onebit_sgd.py

As in CNTK, a layer's gradient is a matrix of inputs x outputs whose columns are quantised one by one: a bit is the
sign, and each column has two values to decode to. The columns are divided among the ranks in strips. A rank sends the
others the codes of their strips, sums its own strip, and sends the sum to all, encoded once more. What the codes lose
is added to the next step's gradient, on both sides. The data come with scikit-learn; the ranks are threads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks share the processors

import argparse

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import qccl

RANKS, HIDDEN, BATCH, RATE = 4, 128, 32, 0.1
#: by its name in the figure: the codec of a matrix with columns of so many elements
CODECS = {
    "fp32": "none",
    "1 bit, mean of each sign": "onebit:bucket={rows},reconstruct=mean+ef",
    "1 bit, between least and greatest": "onebit:bucket={rows},reconstruct=midpoint+ef",
    "1 bit, mean, no feedback": "onebit:bucket={rows},reconstruct=mean",
}
Params = dict[str, np.ndarray]


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def network() -> Params:
    """Two layers. The matrices are column-major, so that a column lies in one piece of memory, which is a bucket."""
    rng = np.random.default_rng(1)
    weights = {"w1": rng.standard_normal((64, HIDDEN)) / 8, "w2": rng.standard_normal((HIDDEN, 10)) / np.sqrt(HIDDEN)}
    biases = {"b1": np.zeros(HIDDEN), "b2": np.zeros(10)}
    return {name: np.asfortranarray(array, np.float32) for name, array in {**weights, **biases}.items()}


def scores(p: Params, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer and the outputs."""
    hidden = np.maximum(x @ p["w1"] + p["b1"], 0)
    return hidden, hidden @ p["w2"] + p["b2"]


def gradient(p: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """Of the cross-entropy."""
    hidden, out = scores(p, x)
    off = np.exp(out - out.max(axis=1, keepdims=True))
    off /= off.sum(axis=1, keepdims=True)
    off[np.arange(len(y)), y] -= 1
    off /= len(y)
    back = (off @ p["w2"].T) * (hidden > 0)
    found = {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ off, "b2": off.sum(axis=0)}
    return {name: np.asfortranarray(array) for name, array in found.items()}


def codec_of(name: str, array: np.ndarray) -> str:
    """The codec of a gradient: biases are small, and go uncompressed."""
    return CODECS[name].format(rows=array.shape[0]) if array.ndim == 2 else "none"


def train(comm: qccl.Communicator, name: str, steps: int) -> list[float]:
    """The shares of wrong answers on the test images, every tenth step."""
    images, labels, test_images, test_labels = data()
    params, rng, wrong = network(), np.random.default_rng(comm.rank), []
    for step in range(1, steps + 1):
        batch = rng.integers(0, len(labels), BATCH)
        for key, g in gradient(params, images[batch], labels[batch]).items():
            comm.quantized_allreduce(g, op="avg", codec=codec_of(name, g), algorithm="two_round", key=key)
            params[key] -= np.float32(RATE) * g
        if step % 10 == 0 and comm.rank == 0:
            wrong.append(float((scores(params, test_images)[1].argmax(axis=1) != test_labels).mean()))
        if step % 50 == 0 and comm.rank == 0:
            print(f"{name:34} step {step:4} of {steps}: {wrong[-1]:.1%} wrong", flush=True)
    return wrong


def sent_mb(name: str) -> float:
    """What a rank sends in a step."""
    encoded = sum(qccl.codecs.get(codec_of(name, a)).encoded_nbytes(a.size, a.dtype) for a in network().values())
    return 2 * (RANKS - 1) / RANKS * encoded / 1e6


def draw(path: str, wrong: dict[str, list[float]], title: str) -> None:
    """The errors over steps, and over bytes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, each in wrong.items():
        steps = 10 * np.arange(1, len(each) + 1)
        left.semilogy(steps, 100 * np.array(each), label=name)
        right.loglog(steps * sent_mb(name), 100 * np.array(each))
    left.set(xlabel="step", ylabel="wrong on test images, %")
    right.set(xlabel="MB sent by each rank")
    left.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train with each codec, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="onebit_sgd.png", help="the picture to write")
    options = parser.parse_args()
    steps = 50 if options.quick else 600
    wrong = {name: qccl.run_ranks(RANKS, lambda comm, name=name: train(comm, name, steps))[0] for name in CODECS}
    print(f"\n{'':34} {'wrong':>6} {'MB sent':>8}")
    for name, each in wrong.items():
        print(f"{name:34} {each[-1]:6.1%} {sent_mb(name) * steps:8.2f}")
    title = f"1-bit SGD, {steps} steps"
    draw(options.figure, wrong, f"Short run: {title}" if options.quick else title)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
