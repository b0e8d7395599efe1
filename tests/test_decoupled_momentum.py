"""qccl.DeMo against a reference from its formulas, equal bits on all ranks, checkpoints, hard and bad input.

The reference follows the paper (arXiv 2411.19870, algorithm 1) and its authors' program, github.com/bloc97/DeMo: the
momentum is kept as values, what a rank sends is transformed back and subtracted, and a coefficient is the mean over the
ranks that sent it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qccl
from qccl.dct import CosineTransform

RANKS, LR, DECAY, K, CHUNK = 3, 0.01, 0.9, 5, 8
SHAPES = {"w": (24, 20), "b": (12,), "scale": (), "prime": (7, 11)}
#: of each array, the sides of its tiles: the greatest divisors of its sides up to CHUNK
TILES = {"w": (8, 5), "b": (1, 6), "scale": (1, 1), "prime": (7, 1)}


def gradient(rank: int, step: int, name: str) -> np.ndarray:
    return np.asarray(np.random.default_rng([rank, step, *name.encode()]).standard_normal(SHAPES[name]), np.float32)


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: gradient(rank, step, name) for name in SHAPES}


def begin(rank: int) -> dict[str, np.ndarray]:
    return {name: np.full(shape, rank + 1, np.float32) for name, shape in SHAPES.items()}


def cosines(n: int) -> np.ndarray:
    k, j = np.mgrid[:n, :n]
    return np.where(k == 0, np.sqrt(1 / n), np.sqrt(2 / n)) * np.cos(np.pi * (2 * j + 1) * k / (2 * n))


def transformed(x: np.ndarray, name: str, *, back: bool = False) -> np.ndarray:
    """Each tile's DCT, in its place; ``back``: the inverse."""
    (h, w), found = TILES[name], np.zeros(x.shape)
    rows, columns = (cosines(n).T if back else cosines(n) for n in (h, w))
    for i in range(0, x.shape[0], h):
        for j in range(0, x.shape[1], w):
            found[i : i + h, j : j + w] = rows @ x[i : i + h, j : j + w] @ columns.T
    return found


def strongest(x: np.ndarray, name: str) -> np.ndarray:
    """The K coefficients of greatest magnitude of each tile; the others are zero."""
    (h, w), found = TILES[name], np.zeros(x.shape)
    for i in range(0, x.shape[0], h):
        for j in range(0, x.shape[1], w):
            tile = x[i : i + h, j : j + w]
            kept = abs(tile) >= np.sort(abs(tile).reshape(-1))[-min(K, h * w)]
            found[i : i + h, j : j + w] = np.where(kept, tile, 0)
    return found


class Reference:
    """All ranks, in double precision."""

    def __init__(self, weight_decay: float) -> None:
        self.params = {name: np.ones(shape) for name, shape in SHAPES.items()}
        self.momenta = [{name: np.zeros(self.matrix(name)) for name in SHAPES} for _ in range(RANKS)]
        self.weight_decay, self.uncertain = weight_decay, 0

    def matrix(self, name: str) -> tuple[int, int]:
        shape = SHAPES[name]
        return (shape[0], shape[1]) if len(shape) == 2 else (1, int(np.prod(shape)))

    def step(self, step: int) -> None:
        for name in SHAPES:
            sent = []
            for rank, momenta in enumerate(self.momenta):
                g = gradient(rank, step, name).astype(np.float64).reshape(self.matrix(name))
                momenta[name] = DECAY * momenta[name] + LR * g
                sent.append(strongest(transformed(momenta[name], name), name))
                momenta[name] = momenta[name] - transformed(sent[-1], name, back=True)
            senders = np.maximum(np.sum([q != 0 for q in sent], axis=0), 1)
            values = transformed(np.sum(sent, axis=0) / senders, name, back=True)
            self.uncertain += int((abs(values) < 1e-6 * abs(values).max()).sum())
            kept = self.params[name] * (1 - LR * self.weight_decay)
            self.params[name] = kept - LR * np.sign(values).reshape(SHAPES[name])


def coefficients(optimizer: qccl.DeMo) -> np.ndarray:
    """The momenta of this rank that are not zero, in ascending order."""
    found = np.concatenate([momentum.reshape(-1) for momentum in optimizer.state_dict()["momenta"]])
    return np.sort(found[found != 0])


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_steps_are_the_authors_rule(weight_decay: float) -> None:
    """The same coefficients are sent, the same momenta remain, and parameters move the same way."""
    wanted = Reference(weight_decay)

    def run(comm: qccl.Communicator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        params = begin(comm.rank)
        how = {"lr": LR, "decay": DECAY, "k": K, "chunk": CHUNK, "weight_decay": weight_decay}
        optimizer = qccl.DeMo(comm, params, **how)
        for step in range(6):
            assert optimizer.step(gradients(comm.rank, step)) is params and optimizer.steps == step + 1
        return params, coefficients(optimizer)

    for step in range(6):
        wanted.step(step)
    assert wanted.uncertain == 0  # values whose sign rounding may change
    for (params, kept), momenta in zip(qccl.run_ranks(RANKS, run), wanted.momenta, strict=True):
        for name, array in params.items():
            np.testing.assert_allclose(array, wanted.params[name], atol=1e-6)
        found = np.concatenate([transformed(momenta[name], name).reshape(-1) for name in SHAPES])
        remain = np.sort(found[abs(found) > 1e-12])  # those that were sent are zero, but for double precision
        assert kept.size == remain.size
        np.testing.assert_allclose(kept, remain, rtol=0, atol=1e-6 * abs(remain).max())


@pytest.mark.parametrize("values", ["exact", "float16", "exp4", "mean2"])
def test_all_ranks_hold_the_same_bits_whatever_their_products_add_first(
    values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank adds in an order of its own in the forward transform, as unequal processors do."""
    forward = CosineTransform.forward

    def run(comm: qccl.Communicator) -> bytes:
        params = begin(comm.rank)
        optimizer = qccl.DeMo(comm, params, lr=LR, k=K, values=values)
        noise = 1 + comm.rank * 2.0**-23
        optimizer._transform.forward = lambda tiles: forward(optimizer._transform, tiles) * np.float32(noise)
        for step in range(5):
            optimizer.step(gradients(comm.rank, step))
        return b"".join(array.tobytes() for array in params.values())

    assert len(set(qccl.run_ranks(RANKS, run))) == 1


def test_parameters_of_torch_and_their_gradients() -> None:
    """Steps are those of NumPy's arrays; a parameter without gradient counts as one with zeros."""
    torch = pytest.importorskip("torch")

    def run(comm: qccl.Communicator) -> None:
        arrays = [np.ones((8, 16), np.float32), np.ones(5, np.float32)]
        tensors = [torch.nn.Parameter(torch.ones(8, 16)), torch.nn.Parameter(torch.ones(5))]
        how = {"lr": 0.25, "k": 4}
        by_numpy, by_torch = qccl.DeMo(comm, arrays, **how), qccl.DeMo(comm, tensors, **how)
        with pytest.raises(qccl.ArgumentError, match="no parameter has a gradient"):
            by_torch.step()
        for step in range(4):
            g = np.random.default_rng([comm.rank, step]).standard_normal((8, 16)).astype(np.float32)
            tensors[0].grad = torch.from_numpy(g)
            by_torch.step()
            by_numpy.step([g, np.zeros(5, np.float32)])
            for array, tensor in zip(arrays, tensors, strict=True):
                assert tensor.requires_grad and tensor.detach().numpy().tobytes() == array.tobytes()

    qccl.run_ranks(2, run)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_16_bits(dtype: str) -> None:
    kind = np.float16 if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16

    def run(comm: qccl.Communicator) -> bytes:
        params = np.ones((16, 16), kind)
        optimizer = qccl.DeMo(comm, params, lr=0.125)
        optimizer.step(np.random.default_rng(comm.rank).standard_normal((16, 16)).astype(kind))
        assert set(params.astype(np.float32).reshape(-1)) == {0.875, 1.125}
        return params.tobytes()

    assert len(set(qccl.run_ranks(2, run))) == 1


def test_goes_on_from_a_state_to_the_bit() -> None:
    def run(comm: qccl.Communicator) -> None:
        params, again = begin(0), begin(0)
        optimizer = qccl.DeMo(comm, params, lr=LR)
        for step in range(3):
            optimizer.step(gradients(comm.rank, step))
        saved = optimizer.state_dict()
        middle = {name: array.copy() for name, array in params.items()}
        optimizer.step(gradients(comm.rank, 3))
        other = qccl.DeMo(comm, again, lr=LR)
        for name, array in again.items():
            array[...] = middle[name]
        other.load_state_dict(saved)
        other.step(gradients(comm.rank, 3))
        assert other.steps == 4
        assert all(again[name].tobytes() == params[name].tobytes() for name in params)
        for wrong in ({}, saved | {"steps": -1}, saved | {"lr": "x"}, saved | {"momenta": saved["momenta"][:1]}):
            with pytest.raises(qccl.ArgumentError):
                other.load_state_dict(wrong)
        assert other.steps == 4

    qccl.run_ranks(2, run)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    """Neither parameters nor the momenta of the other arrays, whose calls succeed."""

    def run(comm: qccl.Communicator) -> None:
        params = begin(comm.rank)
        optimizer = qccl.DeMo(comm, params, lr=LR, k=K)
        optimizer.step(gradients(comm.rank, 0))
        before, momenta = {name: array.copy() for name, array in params.items()}, coefficients(optimizer)
        spoiled = gradients(comm.rank, 1)
        if comm.rank == 1:
            spoiled["prime"][3, 3] = bad
        with pytest.raises(qccl.ArgumentError, match="not finite"):
            optimizer.step(spoiled)
        assert all((params[name] == before[name]).all() for name in params) and optimizer.steps == 1
        assert coefficients(optimizer).tobytes() == momenta.tobytes()
        optimizer.step(gradients(comm.rank, 1))

    qccl.run_ranks(2, run)


def test_zeros_denormals_and_empty_arrays() -> None:
    def run(comm: qccl.Communicator) -> bytes:
        params = [np.ones((8, 8), np.float32), np.zeros((0, 4), np.float32), np.ones(1, np.float32)]
        optimizer = qccl.DeMo(comm, params, lr=0.5)
        optimizer.step([np.zeros_like(array) for array in params])
        assert (params[0] == 1).all() and params[2][0] == 1
        optimizer.step([np.full_like(array, 1e-41) for array in params])
        return b"".join(array.tobytes() for array in params)

    assert len(set(qccl.run_ranks(2, run))) == 1
    qccl.run_ranks(2, lambda comm: qccl.DeMo(comm, [], lr=1).step([]))


def test_momenta_whose_sum_overflows_change_nothing() -> None:
    """Each rank's momentum is finite."""

    def run(comm: qccl.Communicator) -> None:
        params = [np.ones(1, np.float32), np.ones(4, np.float32)]
        optimizer = qccl.DeMo(comm, params, lr=1.0)
        with pytest.raises(qccl.ArgumentError, match="the sum of the ranks' momenta is not finite"):
            optimizer.step([np.full(1, 3e38, np.float32), np.ones(4, np.float32)])
        assert all((array == 1).all() for array in params) and optimizer.steps == 0
        assert not coefficients(optimizer).size
        optimizer.step([np.ones(1, np.float32), np.ones(4, np.float32)])

    qccl.run_ranks(2, run)


def test_gradients_of_another_library() -> None:
    """JAX's steps are NumPy's; what NumPy cannot read is refused."""
    jnp = pytest.importorskip("jax.numpy")

    def run(comm: qccl.Communicator) -> None:
        params, again = begin(0), begin(0)
        optimizer, other = qccl.DeMo(comm, params, lr=LR), qccl.DeMo(comm, again, lr=LR)
        for step in range(2):
            optimizer.step(gradients(comm.rank, step))
            other.step({name: jnp.asarray(array) for name, array in gradients(comm.rank, step).items()})
        assert all(again[name].tobytes() == params[name].tobytes() for name in params)

    qccl.run_ranks(2, run)


def test_gradients_that_are_no_arrays() -> None:
    class Opaque:
        shape = (4,)

    def run(comm: qccl.Communicator) -> None:
        params = [np.ones(4, np.float32)]
        optimizer = qccl.DeMo(comm, params, lr=LR)
        with pytest.raises(
            qccl.ArgumentError, match=r"gradients\[0\] must be an array with the shape of its parameter"
        ):
            optimizer.step([[1.0, 2.0, 3.0, 4.0]])
        with pytest.raises(qccl.ArgumentError, match=r"gradients\[0\] is of type Opaque, .* convert it before"):
            optimizer.step([Opaque()])
        assert (params[0] == 1).all() and optimizer.steps == 0

    qccl.run_ranks(1, run)


def test_ranks_load_one_learning_rate() -> None:
    """Or none: a rank with another one, and one whose state is refused, change nothing on any rank."""

    def run(comm: qccl.Communicator) -> None:
        optimizer = qccl.DeMo(comm, np.ones(4, np.float32), lr=LR)
        optimizer.step(np.ones(4, np.float32))
        state = optimizer.state_dict()
        with pytest.raises(
            qccl.MismatchError, match=r"learning rates of the ranks' states are \[0.5, 1.5\] .* one rate"
        ):
            optimizer.load_state_dict(state | {"lr": 0.5 + comm.rank, "steps": 7})
        kind, message = (qccl.ArgumentError, "steps") if comm.rank else (qccl.MismatchError, r"\[0.5, nan\]")
        with pytest.raises(kind, match=message):
            optimizer.load_state_dict(state | {"lr": 0.5, "steps": -1 if comm.rank else 7})
        assert optimizer.steps == 1 and optimizer.lr == LR
        optimizer.load_state_dict(state | {"lr": 0.5, "steps": 7})
        assert optimizer.steps == 7 and optimizer.lr == 0.5

    qccl.run_ranks(2, run)


@pytest.mark.parametrize("where", ["_gather", "_move"])
def test_no_step_follows_an_interrupted_one(where: str) -> None:
    """Ctrl-C after the first of two calls, or of two changes of parameters, until all ranks load a state."""

    def run(comm: qccl.Communicator) -> bytes:
        params = [np.ones(4, np.float32), np.ones(8, np.float32)]
        optimizer = qccl.DeMo(comm, params, lr=0.5)
        state, ones = optimizer.state_dict(), [np.ones(4, np.float32), np.ones(8, np.float32)]
        usual, calls = getattr(optimizer, where), []

        def interrupted(*arguments: Any) -> Any:
            found = usual(*arguments)
            calls.append(found)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return found

        if comm.rank == 0:
            vars(optimizer)[where] = interrupted
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(ones)
            del vars(optimizer)[where]
            for call in (lambda: optimizer.step(ones), optimizer.state_dict):
                with pytest.raises(qccl.ArgumentError, match=r"interrupted a change .* call load_state_dict\(\)"):
                    call()
        else:
            optimizer.step(ones)
        for array in params:
            array[...] = 1
        optimizer.load_state_dict(state)
        optimizer.step(ones)
        assert optimizer.steps == 1
        return b"".join(array.tobytes() for array in params)

    assert len(set(qccl.run_ranks(2, run))) == 1


def refused(comm: qccl.Communicator, message: str, **arguments: Any) -> None:
    with pytest.raises(qccl.QcclError, match=message):
        qccl.DeMo(comm, np.ones((8, 8), np.float32), **{"lr": 1.0, **arguments})


def test_bad_input() -> None:
    def run(comm: qccl.Communicator) -> None:
        refused(comm, "lr must be a finite number", lr=float("nan"))
        refused(comm, "weight_decay must be a finite number", weight_decay=-1)
        refused(comm, "chunk must be the longest side of a tile, 1 to 128", chunk=129)
        refused(comm, "k must be the number of coefficients", k=0)
        refused(comm, "decay must be a number from 0 to below 1", decay=1)
        refused(comm, "values", values="exp5")
        with pytest.raises(qccl.MismatchError, match=r"ranks \[1\] have other parameters, or other arguments of DeMo"):
            qccl.DeMo(comm, np.ones(4, np.float32), lr=1.0 + comm.rank)
        params = np.ones((8, 8), np.float32)
        optimizer = qccl.DeMo(comm, params, lr=1.0)
        with pytest.raises(qccl.ArgumentError, match="gradients must have the names and shapes"):
            optimizer.step(np.ones(64, np.float32))
        optimizer.lr = "fast"
        with pytest.raises(qccl.ArgumentError, match="lr must be a finite number"):
            optimizer.step(np.ones((8, 8), np.float32))
        assert (params == 1).all() and optimizer.steps == 0

    qccl.run_ranks(2, run)
