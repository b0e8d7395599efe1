"""Trainings on two ranks whose states are kept as files of an older qccl: see tests/old_files/write.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import qccl

FOLDER = Path(__file__).parents[1] / "old_files" / "written_by_837b5da"
SIZE = 2
#: steps before the files are saved, and in all
SAVED_AFTER, STEPS = 3, 6
#: gradients before the save are so many times larger: steps that lack the state are wrong by far
_FACTOR = 64


@dataclass(frozen=True)
class Training:
    """A training of one rank, and how a user saves and restores it.

    Attributes:
        step: takes the step of this number; returns the values that it computed.
        save, load: write and read the files whose names begin with this path.
    """

    step: Callable[[int], np.ndarray]
    save: Callable[[str], None]
    load: Callable[[str], None]


def gradient(rank: int, step: int, shape: tuple[int, ...] | int, parameter: int = 0) -> np.ndarray:
    """Multiples of 1/16, which every machine computes alike."""
    i = np.arange(np.prod(shape, dtype=int), dtype=np.int64)
    found = (i * i * 31 + i * 7919 + step * 104_729 + rank * 15_485_863 + parameter * 611_953) % 2003 - 1001
    return (found / 16 * (_FACTOR if step < SAVED_AFTER else 1)).astype(np.float32).reshape(shape)


def sum_of_steps(training: Training) -> np.ndarray:
    """The sum of the values of the steps that follow the save."""
    steps = [training.step(number) for number in range(SAVED_AFTER, STEPS)]
    return sum(steps[1:], steps[0])


def check_goes_on(make: Callable[[qccl.Communicator], Training], name: str, folder: Path) -> None:
    """A new training that loads the files goes on with the same bits; without the files it does not.

    So does a training that loads the files that the first one saves in ``folder``.
    """
    with np.load(FOLDER / f"{name}.sums.npz") as sums:
        wanted = [sums[f"arr_{rank}"] for rank in range(SIZE)]

    def run(comm: qccl.Communicator, source: Path | None) -> np.ndarray:
        training = make(comm)
        if source is not None:
            training.load(str(source / name))
            training.save(str(folder / name))
        return sum_of_steps(training)

    for source in (FOLDER, folder):
        found = qccl.run_ranks(SIZE, lambda comm, source=source: run(comm, source))
        assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted], source
    others = qccl.run_ranks(SIZE, lambda comm: run(comm, None))
    assert all(np.linalg.norm(a - b) > 0.2 * np.linalg.norm(b) for a, b in zip(others, wanted, strict=True))


def rank_file(path: str, comm: qccl.Communicator) -> str:
    return f"{path}.rank{comm.rank}.npz"


def communicator(comm: qccl.Communicator) -> Training:
    """Calls of every kind that keep state, and one whose random numbers go on."""
    keyed = {
        "nesterov": "minmax4:bucket=64+ef+nesterov:mu=0.5",
        "sparse": "topk:k=0.1+ef",
        "random": "randomk:k=0.2+ef",
        "bfloat16": "onebit:bucket=32+ef:beta=0.95,dtype=bfloat16",
        "lr": "minmax2:bucket=64+ef",
    }

    def step(number: int) -> np.ndarray:
        found = []
        for i, (key, codec) in enumerate(keyed.items()):
            lr = 0.5 ** (number + 1) if key == "lr" else None
            x = gradient(comm.rank, number, 101, i)
            found.append(comm.quantized_allreduce(x, codec=codec, op="avg", key=key, lr=lr))
        pair = [gradient(comm.rank, number, n, n) for n in (70, 33)]
        found += comm.quantized_allreduce_coalesced(pair, codec="minmax3:bucket=32+ef", op="avg", key="pair")
        x, part = gradient(comm.rank, number, 128, 9), np.empty(64, np.float32)
        found.append(comm.quantized_reduce_scatter(x, part, codec="minmax2:bucket=32+ef", op="avg", key="part"))
        drawn = gradient(comm.rank, number, 99, 10)
        found.append(comm.quantized_allreduce(drawn, codec="minmax2:bucket=32,rounding=stochastic,seed=3", op="avg"))
        return np.concatenate(found)

    return Training(
        step,
        lambda path: qccl.save_state(rank_file(path, comm), comm.state_dict()),
        lambda path: comm.load_state_dict(qccl.load_state(rank_file(path, comm))),
    )


def diloco(comm: qccl.Communicator) -> Training:
    """Two fragments with a delay: an outer step is under way when the files are saved."""
    params = {"a": np.zeros((12, 16), np.float32), "b": np.zeros(100, np.float32)}
    outer = qccl.DiLoCo(comm, params, codec="minmax2:bucket=32+ef", period=2, delay=1, fragments=2)

    def step(number: int) -> np.ndarray:
        for i, name in enumerate(params):
            params[name] -= gradient(comm.rank, number, params[name].shape, i) / 1024
        outer.after_local_step()
        if number == STEPS - 1:
            outer.finish()  # a rank must not leave while an outer step is under way
        return np.concatenate([params[name].ravel() for name in params])

    def save(path: str) -> None:
        state = {"outer": outer.state_dict(), "comm": comm.state_dict(), "params": params}
        qccl.save_state(rank_file(path, comm), state)

    def load(path: str) -> None:
        state = qccl.load_state(rank_file(path, comm))
        comm.load_state_dict(state["comm"])
        outer.load_state_dict(state["outer"])
        for name, array in params.items():
            array[...] = state["params"][name]

    return Training(step, save, load)


def decentralized(comm: qccl.Communicator) -> Training:
    trained = qccl.LowPrecisionDecentralized(comm, np.zeros(150, np.float32), codec="minmax4:bucket=32")

    def step(number: int) -> np.ndarray:
        trained.step(gradient(comm.rank, number, 150), 0.25)
        return trained.model.copy()

    return Training(
        step,
        lambda path: qccl.save_state(rank_file(path, comm), trained.state_dict()),
        lambda path: trained.load_state_dict(qccl.load_state(rank_file(path, comm))),
    )


TRAININGS: dict[str, Callable[[qccl.Communicator], Training]] = {
    made.__name__: made for made in (communicator, diloco, decentralized)
}
