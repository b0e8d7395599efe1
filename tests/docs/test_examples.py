"""The programs of docs/examples: their short forms run and draw, and their page lists them with their commands.

Those with PyTorch and JAX: tests/torch/test_examples.py and tests/jax/test_examples.py.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import EXAMPLES, run_example

import qccl

SHAPES = {"w": (128, 192), "b": (96,)}


@pytest.mark.packages
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.starts_first
@pytest.mark.parametrize("name", ["decentralized", "demo", "diloco", "onebit_sgd", "sparseloco"])
def test_the_short_form_trains_and_draws(name: str, tmp_path: Path) -> None:
    """The programs whose ranks are threads; they take digits of scikit-learn."""
    assert "MB sent" in run_example(name, tmp_path)  # the table


def test_the_page_lists_every_example_with_its_command() -> None:
    page = (EXAMPLES / "index.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"]({path.name})" in page and f"docs/examples/{path.name}" in page, path.name


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the example that the test names."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module(request.param)


def normal(*seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def kept(x: np.ndarray, number: int, divisor: int) -> np.ndarray:
    """The elements of greatest magnitude of each square of 64 x 64 or vector: ``number``, or fewer of a small one."""
    found = np.zeros_like(x)
    tiles = [np.s_[i : i + 64, j : j + 64] for i in range(0, len(x), 64) for j in range(0, x.shape[-1], 64)]
    for tile in tiles if x.ndim == 2 else [np.s_[:]]:
        least = np.sort(abs(x[tile]), axis=None)[-min(number, -(-x[tile].size // divisor))]
        found[tile] = np.where(abs(x[tile]) >= least, x[tile], 0)
    return found


@pytest.mark.packages
@pytest.mark.parametrize("example", ["sparseloco"], indirect=True)
def test_sparseloco_follows_its_rule_to_the_bit(example: Any) -> None:
    """With exact values: chunks of 64 x 64, the 64 greatest of each, error feedback with decay."""
    how = example.SPARSELOCO | {"codec": example.SPARSELOCO["codec"].replace("exp4", "exact")}

    def run(comm: qccl.Communicator) -> None:
        params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        outer = qccl.DiLoCo(comm, {name: example.split(array) for name, array in params.items()}, **how)
        common = {name: array.copy() for name, array in params.items()}
        errors = [{name: np.zeros_like(array) for name, array in params.items()} for _ in range(2)]
        for step in range(3):
            for name, array in params.items():
                sent = []
                for rank, error in enumerate(errors):
                    change = common[name] - (common[name] - normal(step, rank)[name])
                    error[name] = error[name] * np.float32(0.95) + change
                    sent.append(kept(error[name], 64, 64))
                    error[name] -= sent[-1]
                common[name] -= (sent[0] + sent[1]) * np.float32(0.5)
                array -= normal(step, comm.rank)[name]
            example.outer_step(outer, params)
            assert all((params[name] == common[name]).all() for name in params)

    qccl.run_ranks(2, run)


@pytest.mark.packages
@pytest.mark.parametrize("example", ["demo"], indirect=True)
def test_demo_follows_its_rule(example: Any) -> None:
    """That of the authors' program, which keeps momenta as values, not as coefficients."""
    shape = SHAPES["w"]
    k, j = np.ogrid[:64, :64]
    dct = np.sqrt((2 - (k == 0)) / 64) * np.cos(np.pi * (2 * j + 1) * k / 128)
    down, across = (np.kron(np.eye(n // 64), dct) for n in shape)

    def run(comm: qccl.Communicator) -> bytes:
        params = {"w": np.zeros(shape, np.float32)}
        demo = example.DeMo(comm, params, "exact", 0.5)
        momenta, wanted = np.zeros((2, *shape)), np.zeros(shape)
        for step in range(3):
            sent = []
            for rank, momentum in enumerate(momenta):
                momentum *= example.DECAY
                momentum += 0.5 * normal(step, rank)["w"]
                sent.append(kept(down @ momentum @ across.T, example.K, 1))
                momentum -= down.T @ sent[-1] @ across
            mean = sum(sent) / np.maximum(1, sum(each != 0 for each in sent))
            values = down.T @ mean @ across
            wanted -= 0.5 * np.sign(values)
            demo.step({"w": normal(step, comm.rank)["w"]})
            assert (params["w"] == wanted)[abs(values) > 1e-4].mean() > 0.9999
            wanted[...] = params["w"]
        return params["w"].tobytes()

    found = qccl.run_ranks(2, run)
    assert found[0] == found[1]
