"""Decentralised SGD: 8 ranks in a ring, each with some of the digits only, send their two neighbours a few bits.

    python docs/examples/decentralized.py

There is no all-reduce and no server: a rank averages its model with its neighbours' models. It sends them the encoded
change of its model, which they add to their copies of it, so the copies always equal the model bit for bit. The data
come with scikit-learn and are sorted by class: no rank can learn all ten digits alone. The ranks are threads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks share the processors

import argparse

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import qccl

RANKS, RATE, EVERY = 8, 0.3, 10
CODECS = ("none", "minmax8", "minmax4", "minmax3")


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels for training, sorted by label, and for testing."""
    images, labels = load_digits(return_X_y=True)
    images, is_test = (images / 16).astype(np.float32), np.arange(len(labels)) % 5 == 0
    order = np.argsort(labels[~is_test], kind="stable")
    return images[~is_test][order], labels[~is_test][order], images[is_test], labels[is_test]


def probabilities(model: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of the ten digits for each image; the model is 64 x 10 weights and 10 biases."""
    scores = x @ model[:640].reshape(64, 10) + model[640:]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def gradient(model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the cross-entropy."""
    off = probabilities(model, x)
    off[np.arange(len(y)), y] -= 1
    off /= len(y)
    return np.concatenate([(x.T @ off).reshape(-1), off.sum(axis=0)])


def train(comm: qccl.Communicator, codec: str, steps: int) -> tuple[list[float], list[np.ndarray]]:
    """The loss of this rank's model on the test images, and the model, every few steps."""
    images, labels, test_images, test_labels = data()
    mine = np.array_split(np.arange(len(labels)), RANKS)[comm.rank]
    sgd = qccl.LowPrecisionDecentralized(comm, np.zeros(650, np.float32), weights="ring", codec=codec)
    losses, models = [], []
    for step in range(1, steps + 1):
        sgd.step(gradient(sgd.model, images[mine], labels[mine]), RATE)
        if step % EVERY == 0:
            right = probabilities(sgd.model, test_images)[np.arange(len(test_labels)), test_labels]
            losses.append(float(-np.log(np.maximum(right, 1e-30)).mean()))
            models.append(sgd.model.copy())
        if step % 100 == 0 and comm.rank == 0:
            print(f"{codec:8} step {step:4} of {steps}: loss of rank 0 on all digits {losses[-1]:.3f}", flush=True)
    return losses, models


def sent_mb(codec: str) -> float:
    """What a rank sends its two neighbours in a step."""
    return 2 * qccl.codecs.get(codec).encoded_nbytes(650, "float32") / 1e6


def draw(path: str, runs: dict[str, list[tuple[list[float], list[np.ndarray]]]], title: str) -> None:
    """The losses over steps and over bytes, and how far the ranks' models are apart."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    for codec, ranks in runs.items():
        loss = np.mean([losses for losses, _ in ranks], axis=0)
        models = np.array([models for _, models in ranks])
        apart = np.linalg.norm(models - models.mean(axis=0), axis=2).mean(axis=0)
        steps = EVERY * np.arange(1, len(loss) + 1)
        left.plot(steps, loss, label=codec)
        middle.semilogx(steps * sent_mb(codec), loss)
        right.semilogy(steps, apart / np.linalg.norm(models.mean(axis=0), axis=1))
    left.set(xlabel="step", ylabel="loss on test images, mean of the ranks")
    middle.set(xlabel="MB sent by each rank")
    right.set(xlabel="step", ylabel="relative distance from the mean model")
    left.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train with each codec, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="decentralized.png", help="the picture to write")
    options = parser.parse_args()
    steps = 100 if options.quick else 1000
    runs = {codec: qccl.run_ranks(RANKS, lambda comm, codec=codec: train(comm, codec, steps)) for codec in CODECS}
    print(f"\n{'codec':8} {'loss':>6} {'MB sent':>8}")
    for codec, ranks in runs.items():
        print(f"{codec:8} {np.mean([losses[-1] for losses, _ in ranks]):6.3f} {sent_mb(codec) * steps:8.2f}")
    title = f"Decentralised SGD in a ring, {steps} steps"
    draw(options.figure, runs, f"Short run: {title}" if options.quick else title)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
