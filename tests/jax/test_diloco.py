"""qccl.DiLoCo with arrays of JAX, which cannot be written."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from thread_ranks import on_ranks

import qccl


def test_arrays_that_cannot_be_written_may_be_the_same() -> None:
    """Their results are copies."""

    def run(comm: qccl.Communicator) -> list[float]:
        x = jnp.ones(3)
        params = qccl.DiLoCo(comm, {"a": x, "b": x}, codec="none", outer_lr=1, momentum=0).step({"a": x - 1, "b": x})
        return [float(params[name][0]) for name in "ab"]

    assert qccl.run_ranks(2, run) == [[0.0, 1.0]] * 2


@on_ranks(2)
def test_arrays_of_jax_come_back_as_numpys_where_they_changed(comm: qccl.Communicator) -> None:
    params: Any = {"w": jnp.ones(5), "b": jnp.ones(3)}
    how: dict[str, Any] = {"codec": "none", "outer_lr": 1, "momentum": 0, "period": 2, "delay": 1}
    outer = qccl.DiLoCo(comm, params, fragments={"w": 0, "b": 1}, **how)
    assert outer.fragments == [1, 0]  # "b" comes first
    for _ in range(3):
        params = outer.after_local_step({name: array + 1 + comm.rank for name, array in params.items()})
    # after step 1 the average of w is 2.5, after step 2 that of b is 4; the local steps since then are kept
    np.testing.assert_allclose(params["w"], 2.5 + 2 * (1 + comm.rank))
    np.testing.assert_allclose(params["b"], 4 + 1 + comm.rank)
    assert isinstance(params["b"], np.ndarray)
    outer.finish()
