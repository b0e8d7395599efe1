"""JAX: ranks train a network on handwritten digits, and send 32, 8, 4 or 1 bit for each gradient.

    mpiexec -n 4 python docs/examples/jax_mlp.py

A step is one compiled function: gradients of this rank's data, their mean over all ranks, and Adam's update. The data
come with scikit-learn; each rank has a part of them. Also torchrun and other launchers start the ranks.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import qccl
import qccl.jax

LAYERS, BATCH, RATE, EVERY = (64, 256, 256, 10), 128, 1e-3, 10
CODECS = ("none", "minmax8", "minmax4+ef", "onebit:reconstruct=mean+ef")
Params = list[dict[str, jax.Array]]


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def network() -> Params:
    """The same on all ranks."""
    rng = np.random.default_rng(1)
    return [
        {"w": jnp.asarray(rng.normal(0, (2 / rows) ** 0.5, (rows, columns)), jnp.float32), "b": jnp.zeros(columns)}
        for rows, columns in pairwise(LAYERS)
    ]


def scores(params: Params, x: jax.Array) -> jax.Array:
    """The ten outputs for each image."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """The cross-entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], 1).mean()


def step_with(codec: str) -> Any:
    """A compiled training step, whose gradients are the means over all ranks."""

    @jax.jit
    def step(params: Params, means: Params, squares: Params, t: int, x: jax.Array, y: jax.Array) -> Any:
        gradients = qccl.jax.allreduce(jax.grad(loss)(params, x, y), codec, key=codec)
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
        squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, gradients)
        rate = RATE * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, means, squares)
        return params, means, squares

    return step


def train(comm: qccl.Communicator, codec: str, steps: int) -> tuple[list[float], list[float]]:
    """The losses and the shares of wrong answers on the test images, every few steps."""
    images, labels, test_images, test_labels = data()
    images, labels = images[comm.rank :: comm.size], labels[comm.rank :: comm.size]
    step, rng = step_with(codec), np.random.default_rng(comm.rank)
    params = network()
    means, squares = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    losses, wrong, begin = [], [], time.perf_counter()
    for t in range(1, steps + 1):
        batch = rng.integers(0, len(labels), BATCH // comm.size)
        params, means, squares = step(params, means, squares, t, images[batch], labels[batch])
        if t % EVERY == 0:
            losses.append(float(loss(params, test_images, test_labels)))
            wrong.append(float((scores(params, test_images).argmax(axis=1) != test_labels).mean()))
        if t % 50 == 0 and comm.rank == 0:
            seconds = time.perf_counter() - begin
            print(f"{codec:26} step {t:4} of {steps}, {seconds:5.1f} s: {wrong[-1]:.1%} wrong", flush=True)
    return losses, wrong


def sent_mb(comm: qccl.Communicator, codec: str) -> float:
    """What a rank sends in a step."""
    encoded = sum(qccl.codecs.get(codec).encoded_nbytes(p.size, p.dtype) for p in jax.tree.leaves(network()))
    return 2 * (comm.size - 1) / comm.size * encoded / 1e6


def draw(path: str, runs: dict[str, tuple[list[float], list[float]]], mb: dict[str, float], title: str) -> None:
    """The losses over steps, and over bytes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for codec, (losses, _) in runs.items():
        steps = EVERY * np.arange(1, len(losses) + 1)
        left.semilogy(steps, losses, label=codec)
        right.loglog(steps * mb[codec], losses)
    left.set(xlabel="step", ylabel="loss on test images")
    right.set(xlabel="MB sent by each rank")
    left.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train with each codec, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default="jax_mlp.png", help="the picture to write")
    options = parser.parse_args()
    comm = qccl.jax.default_communicator()
    steps = 50 if options.quick else 400
    runs = {codec: train(comm, codec, steps) for codec in CODECS}
    if comm.rank == 0:
        mb = {codec: sent_mb(comm, codec) for codec in CODECS}
        print(f"\n{'codec':26} {'loss':>6} {'wrong':>6} {'MB sent':>8}")
        for codec, (losses, wrong) in runs.items():
            print(f"{codec:26} {losses[-1]:6.3f} {wrong[-1]:6.1%} {mb[codec] * steps:8.2f}")
        title = f"Compressed gradients in JAX, {steps} steps"
        draw(options.figure, runs, mb, f"Short run: {title}" if options.quick else title)
        print(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
