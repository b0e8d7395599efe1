"""qccl.DiLoCo with tensors."""

from __future__ import annotations

import io

import numpy as np
import torch
from thread_ranks import on_ranks

import qccl


@on_ranks(2)
def test_arrays_of_torch_keep_their_identity_and_types(comm: qccl.Communicator) -> None:
    """Parameters that require gradients, of two element types, as a list."""
    params = [torch.nn.Parameter(torch.ones(3)), torch.ones(2, 2, dtype=torch.bfloat16)]
    outer = qccl.DiLoCo(comm, params)
    with torch.no_grad():
        for p in params:
            p -= comm.rank + 1
    found = outer.step(params)
    assert all(a is b for a, b in zip(found, params, strict=True))
    assert params[0].requires_grad and not any(array.requires_grad for array in outer.common)
    # d = 1.5; v = 1.5; 1 - 0.7 (1.5 + 0.9 * 1.5)
    assert torch.allclose(params[0], torch.full((3,), -0.995)) and torch.allclose(
        params[1].float(), torch.full((2, 2), -0.995), atol=2e-2
    )


@on_ranks(2)
def test_goes_on_from_a_file_of_torch_to_the_bit_while_an_outer_step_is_under_way(comm: qccl.Communicator) -> None:
    def train(params: list[torch.Tensor], rank: int, number: int) -> None:
        for i, tensor in enumerate(params):
            draw = np.random.default_rng([rank, number, i])
            tensor.mul_(0.75).add_(torch.from_numpy(draw.standard_normal(tuple(tensor.shape), np.float32) / 100))

    how = {"codec": "minmax2:rounding=stochastic+ef", "fragments": 2, "period": 4, "delay": 3, "weighted": True}
    params, again = ([torch.ones(shape) for shape in ((40, 7), (300,))] for _ in range(2))
    outer = qccl.DiLoCo(comm, params, **how)

    def go_on(each: qccl.DiLoCo, tensors: list[torch.Tensor]) -> bytes:
        for number in range(8, 13):
            train(tensors, comm.rank, number)
            each.after_local_step(local_steps=comm.rank + 1)
        found = b"".join(tensor.numpy().tobytes() for tensor in (*tensors, *each.common, *each._velocity))
        each.finish([tensor.clone() for tensor in tensors])
        return found

    for number in range(1, 8):
        train(params, comm.rank, number)
        outer.after_local_step(local_steps=comm.rank + 1)
    file, residuals = io.BytesIO(), comm.state_dict()
    torch.save(outer.state_dict() | {"local": params}, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert len(state["under_way"]) == 1 and state["steps"] == [1, 1]
    wanted = go_on(outer, params)
    outer.close()
    other = qccl.DiLoCo(comm, again, **how)
    local = state.pop("local")
    other.load_state_dict(state)
    comm.load_state_dict(residuals)
    for tensor, saved in zip(again, local, strict=True):
        tensor.copy_(saved)
    assert other.local_steps == 7 and go_on(other, again) == wanted
