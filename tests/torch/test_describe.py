"""From a tensor to its address, layout and element type, without a copy."""

from __future__ import annotations

import pytest
import torch
from dlpack import check_that_a_view_keeps_the_memory

from qccl import _host


def test_torch() -> None:
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    view = _host.describe(x)
    assert (view.address, view.shape, view.dtype, view.readonly) == (x.data_ptr(), (3, 4), "bfloat16", False)


def test_torch_by_the_c_functions_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is described without a call of __dlpack__."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no C functions for DLPack")

    exports = []
    monkeypatch.setattr(torch.Tensor, "__dlpack__", lambda *arguments, **options: exports.append(arguments))
    x = torch.zeros(3, 4)
    part = x[1:, ::2].T
    view = _host.describe(part)
    assert (view.address, view.shape, view.strides) == (part.data_ptr(), (2, 2), (2, 4))
    assert (view.dtype, view.device_type, view.device_id, view.readonly) == ("float32", 1, 0, False)
    assert _host.describe(torch.zeros(())).shape == ()
    assert not exports
    with pytest.raises(TypeError, match="no access to its memory"):
        _host.describe(x.to_sparse())
    check_that_a_view_keeps_the_memory(lambda: torch.zeros(3, 4)[1:, ::2].T)
