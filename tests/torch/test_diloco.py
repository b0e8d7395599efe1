"""qccl.DiLoCo with tensors."""

from __future__ import annotations

import io

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
    file = io.BytesIO()
    torch.save(outer.state_dict(), file)
    other = qccl.DiLoCo(comm, [torch.zeros_like(p) for p in params])
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))  # with its default, weights_only=True
    assert all(map(torch.equal, (*other.common, *other._velocity), (*outer.common, *outer._velocity)))
