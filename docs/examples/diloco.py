"""DiLoCo: 4 ranks train a small language model, and average their changes every 50 steps in 32 bits, 4 bits or 1 bit.

"Streaming" sends half of the parameters at a time while the training goes on, and applies the average 5 steps later.

    python docs/examples/diloco.py

The model predicts the next byte of the text of Python's own documentation from the 8 bytes before it. Each rank has a
quarter of the text, and Adam. The ranks are threads; on several machines start it with a launcher and qccl.init().
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks share the processors

import argparse
from collections.abc import Callable, Iterable
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

import qccl

RANKS, CONTEXT, WIDTH, HIDDEN, BATCH = 4, 8, 16, 96, 64
STREAMING = {"fragments": 2, "delay": 5}
#: by the name in tables: the codec, and options of DiLoCo
WAYS: dict[str, tuple[str, dict[str, int]]] = {
    "none": ("none", {}),
    "minmax4+ef": ("minmax4+ef", {}),
    "minmax4+ef, streaming": ("minmax4+ef", STREAMING),
    "onebit:reconstruct=mean+ef": ("onebit:reconstruct=mean+ef", {}),
}
Params = dict[str, np.ndarray]


def text() -> tuple[list[np.ndarray], np.ndarray, int]:
    """Each rank's part of the text, the text for validation, and the number of different bytes."""
    data = "\n".join(topics.values()).encode()
    letters, codes = np.unique(np.frombuffer(data, np.uint8), return_inverse=True)
    blocks = codes[: len(codes) // 1000 * 1000].reshape(-1, 1000)
    held_out = np.arange(len(blocks)) % 20 == 0
    return np.array_split(blocks[~held_out].reshape(-1), RANKS), blocks[held_out].reshape(-1), len(letters)


def model(letters: int) -> Params:
    """The same random parameters on every rank."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (letters, WIDTH), "w1": (CONTEXT * WIDTH, HIDDEN), "b1": (HIDDEN,)}
    shapes |= {"w2": (HIDDEN, letters), "b2": (letters,)}
    return {name: (rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for name, s in shapes.items()}


def samples(codes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The contexts that begin at ``starts``, and the byte that follows each."""
    return codes[starts[:, None] + np.arange(CONTEXT)], codes[starts + CONTEXT]


def loss_and_gradient(p: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, Params]:
    """Nats per byte, and its gradient."""
    inputs = p["embedding"][x].reshape(len(x), -1)
    hidden = np.tanh(inputs @ p["w1"] + p["b1"])
    scores = hidden @ p["w2"] + p["b2"]
    scores -= scores.max(axis=1, keepdims=True)
    off = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(off[rows, y]).mean()
    off[rows, y] -= 1
    off /= len(y)
    back = (off @ p["w2"].T) * (1 - hidden**2)
    embedding = np.zeros_like(p["embedding"])
    np.add.at(embedding, x, (back @ p["w1"].T).reshape(*x.shape, WIDTH))
    gradient = {"embedding": embedding, "w1": inputs.T @ back, "b1": back.sum(axis=0)}
    return float(loss), gradient | {"w2": hidden.T @ off, "b2": off.sum(axis=0)}


class Adam:
    """The local optimizer; its moments stay on the rank."""

    def __init__(self, p: Params) -> None:
        self.first, self.second = ({name: np.zeros_like(array) for name, array in p.items()} for _ in range(2))
        self.steps = 0

    def step(self, p: Params, gradient: Params, lr: float = 2e-3) -> None:
        """Change ``p`` in place by one step (Kingma and Ba 2015, algorithm 1, with betas 0.9 and 0.99)."""
        self.steps += 1
        for name, g in gradient.items():
            m, v = self.first[name], self.second[name]
            m += 0.1 * (g - m)
            v += 0.01 * (g * g - v)
            bias = np.sqrt(1 - 0.99**self.steps) / (1 - 0.9**self.steps)
            p[name] -= np.float32(lr * bias) * m / (np.sqrt(v) + 1e-8)


def gradient_of(p: Params, part: np.ndarray, rng: np.random.Generator) -> Params:
    """Of a random batch of a rank's part of the text."""
    return loss_and_gradient(p, *samples(part, rng.integers(0, len(part) - CONTEXT, BATCH)))[1]


def bits_per_byte(p: Params, validation: np.ndarray) -> float:
    """The loss on every seventh byte of the text for validation."""
    return loss_and_gradient(p, *samples(validation, np.arange(0, len(validation) - CONTEXT, 7)))[0] / float(np.log(2))


def train(comm: qccl.Communicator, way: str, rounds: int, local_steps: int) -> list[float]:
    """The validation losses of the common parameters after each round of local steps, in bits per byte."""
    parts, validation, letters = text()
    params, part, rng = model(letters), parts[comm.rank], np.random.default_rng(comm.rank)
    codec, options = WAYS[way]
    outer, inner = qccl.DiLoCo(comm, params, codec=codec, period=local_steps, **options), Adam(params)
    losses = []
    for number in range(1, rounds + 1):
        for _ in range(local_steps):
            inner.step(params, gradient_of(params, part, rng))
            outer.after_local_step()
        if comm.rank == 0:
            common = dict(zip(sorted(params), outer.common, strict=True))
            losses.append(bits_per_byte(common, validation))
            print(f"{way:28} outer step {number:3} of {rounds}: {losses[-1]:.3f} bits per byte", flush=True)
    outer.finish()
    return losses


def sent_mb(way: str, local_steps: int) -> float:
    """What a rank sends in an outer step of all parameters, however many local steps it follows."""
    codec, arrays = qccl.codecs.get(WAYS[way][0]), model(text()[2]).values()
    return 2 * (RANKS - 1) / RANKS * sum(codec.encoded_nbytes(a.size, a.dtype) for a in arrays) / 1e6


def draw(path: str, losses: dict[str, list[float]], sent: dict[str, float], title: str, unit: str) -> None:
    """The losses over outer steps, and over bytes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for way, each in losses.items():
        steps = np.arange(1, len(each) + 1)
        left.plot(steps, each, label=way)
        right.semilogx(steps * sent[way], each)
    left.set(xlabel=unit, ylabel="validation loss, bits per byte")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="MB sent by each rank")
    right.xaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:g}", minor_formatter=NullFormatter())
    left.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def compare(
    description: str,
    name: str,
    ways: Iterable[str],
    train: Callable[..., list[float]],
    sent_mb: Callable[[str, int], float],
    *,
    lengths: tuple[int, int] = (30, 50),
    unit: str = "outer step",
) -> None:
    """Train in each way for ``lengths``, rounds of so many steps; print a table and draw."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--figure", default=f"{name.lower()}.png", help="the picture to write")
    options = parser.parse_args()
    rounds, steps = (3, 10) if options.quick else lengths
    losses = {way: qccl.run_ranks(RANKS, lambda comm, way=way: train(comm, way, rounds, steps))[0] for way in ways}
    sent = {way: sent_mb(way, steps) for way in ways}
    print(f"\n{'':28} {'loss':>6} {'MB sent':>8}")
    for way, each in losses.items():
        print(f"{way:28} {each[-1]:6.3f} {sent[way] * rounds:8.2f}")
    title = f"{name}, {rounds} times {steps} steps"
    draw(options.figure, losses, sent, f"Short run: {title}" if options.quick else title, unit)
    print(f"wrote {options.figure}")


if __name__ == "__main__":
    compare(__doc__, "DiLoCo", WAYS, train, sent_mb)
