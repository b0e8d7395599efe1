"""Checks of PyTorch's tensors that other arrays do not need.

A tensor refers to a storage, which can be replaced and resized. Its values may differ from the stored ones (negated and
conjugate views).

This module never imports torch: a program that passes a tensor has imported it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from qccl.base.errors import InvalidBufferError

__all__ = ["check_values", "forbid_resizing", "is_tensor", "storage_of"]


def is_tensor(array: Any) -> bool:
    """Whether ``array`` is a PyTorch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def check_values(tensor: Any, what: str) -> None:
    """Raise InvalidBufferError for a negated or conjugate view, whose memory does not hold its values."""
    if tensor.is_neg() or tensor.is_conj():
        kind, method = ("negated", "resolve_neg") if tensor.is_neg() else ("conjugate", "resolve_conj")
        raise InvalidBufferError(
            f"{what} is a {kind} view: its memory does not hold its values; pass {what}.{method}(), which is a copy"
        )


def storage_of(tensor: Any, address: int, nbytes: int, what: str) -> Any:
    """The tensor's storage. It keeps the memory alive even after ``x.data = y`` or ``x.set_()``.

    Raises InvalidBufferError if the storage has fewer bytes than the tensor's shape needs.
    """
    storage = tensor.untyped_storage()
    first = address - storage.data_ptr()
    if nbytes and not 0 <= first <= first + nbytes <= storage.nbytes():
        raise InvalidBufferError(
            f"{what} needs {nbytes} bytes, but its storage has {storage.nbytes()} bytes; resize the storage before the "
            f"call"
        )
    return storage


def forbid_resizing(tensor: Any) -> None:
    """Make torch raise RuntimeError when the storage of this tensor in host memory is resized, from now on.

    A storage that grows frees its old memory, and no reference to the storage prevents that. torch refuses to resize a
    storage only if NumPy shares its memory, so this makes a NumPy array of it.
    """
    if tensor.untyped_storage().resizable():
        torch = sys.modules["torch"]
        plain = tensor.detach()
        with contextlib.suppress(RuntimeError):  # torch was built without NumPy
            (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
