"""DiLoCo.sparseloco() against SparseLoCo's rule, and what its 2-bit values lose.

The reference follows the paper (Sarfi et al. 2025, arXiv 2508.15706) and its authors' program
(github.com/tplr-ai/SparseLoCo): chunks of 64 x 64 of a matrix, the 64 greatest of each, error feedback with decay. It
averages over all ranks; the program averages an element over the ranks that sent it.
"""

from __future__ import annotations

import numpy as np
import pytest

import qccl
from qccl import codecs

RANKS, STEPS, ROWS, COLUMNS, BETA = 3, 4, 128, 192, np.float32(0.95)
EXACT = "topk:k=0.015625,block=4096+ef:beta=0.95"


def change(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def chosen(x: np.ndarray) -> np.ndarray:
    """Whether an element is among the 64 of greatest magnitude of its chunk."""
    found = np.zeros(x.shape, bool)
    for i in range(0, ROWS, 64):
        for j in range(0, COLUMNS, 64):
            part = abs(x[i : i + 64, j : j + 64])
            found[i : i + 64, j : j + 64] = part >= np.sort(part.reshape(-1))[-64]
    return found


def test_the_rule_to_the_bit() -> None:
    """With exact values: the selected elements, what remains on each rank, and the parameters after each step."""

    def run(comm: qccl.Communicator) -> None:
        params = np.zeros((ROWS, COLUMNS), np.float32)
        outer = qccl.DiLoCo.sparseloco(comm, params, codec=EXACT)
        common = np.zeros_like(params)
        errors = [np.zeros_like(params) for _ in range(RANKS)]
        for step in range(STEPS):
            local = params - change(comm.rank, step)
            sent = []
            for rank, error in enumerate(errors):
                error *= BETA
                error += common - (common - change(rank, step))
                sent.append(np.where(chosen(error), error, np.float32(0)))
                error -= sent[-1]
            common -= (sent[0] + sent[1] + sent[2]) * np.float32(1 / RANKS)
            params[...] = local
            outer.step()
            assert (params == common).all()
            (entry,) = comm.state_dict()["keys"].values()
            (residual,) = entry["values"].values()
            tiles = errors[comm.rank].reshape(ROWS // 64, 64, COLUMNS // 64, 64).swapaxes(1, 2)
            assert (residual.reshape(-1) == tiles.reshape(-1)).all()

    qccl.run_ranks(RANKS, run)


def authors_two_bits(values: np.ndarray) -> np.ndarray:
    """The program's quantiser of a tensor's kept values: four bins of 1.5 standard deviations, each with its mean."""
    centred = values - values.mean()
    width = 6 * np.sqrt((centred**2).sum() / (values.size - 1)) / 4
    bins = np.clip(np.round(centred / width + 2), 0, 3).astype(int)
    means = np.array([centred[bins == b].mean() if (bins == b).any() else 0.0 for b in range(4)])
    return means[bins] + values.mean()


@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_two_bits_keep_the_same_elements_and_lose_less_than_the_authors(kind: str) -> None:
    x = getattr(np.random.default_rng(5), kind)(size=64 * 4096).astype(np.float32)
    exact, coarse = (codecs.get(f"topk:k=64,block=4096,values={form}") for form in ("exact", "mean2"))
    kept, found = (codec.decode(codec.encode(x), x.size, "float32") for codec in (exact, coarse))
    assert ((found != 0) == (kept != 0)).all() and (np.sign(found) == np.sign(kept)).all()
    values, indices = kept[kept != 0].astype(np.float64), kept != 0
    assert np.linalg.norm(found[indices] - values) < np.linalg.norm(authors_two_bits(values) - values)


def test_all_ranks_hold_the_same_bits_and_options_replace_the_presets() -> None:
    """Also with arrays whose sides are no multiples of a tile's, of several types, streaming, and from a state."""

    def run(comm: qccl.Communicator) -> bytes:
        shapes = {
            "w": ((100, 70), np.float32),
            "b": ((768,), np.float32),
            "s": ((), np.float32),
            "h": ((64, 64), np.float16),
        }
        params = {name: np.zeros(shape, kind) for name, (shape, kind) in shapes.items()}
        outer = qccl.DiLoCo.sparseloco(comm, params, period=4, delay=1, fragments=2, outer_lr=0.5)
        rng = np.random.default_rng(comm.rank)
        for step in range(12):
            for array in params.values():
                array += rng.standard_normal(array.shape).astype(array.dtype)
            outer.after_local_step()
            if step == 8:  # an outer step is under way
                outer.load_state_dict(outer.state_dict())
        outer.finish()
        assert any(array.any() for array in outer.common)
        return b"".join(array.tobytes() for array in outer.common)

    assert len(set(qccl.run_ranks(RANKS, run))) == 1


def test_bad_tiles() -> None:
    def run(comm: qccl.Communicator) -> None:
        for tile in (0, -1, 1.5, "64"):
            with pytest.raises(qccl.ArgumentError, match="tile must be"):
                qccl.DiLoCo(comm, np.ones(4, np.float32), tile=tile)

    qccl.run_ranks(1, run)
