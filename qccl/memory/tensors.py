"""What PyTorch's tensors need beside a look at their memory.

A tensor refers to a storage, which can be replaced and resized, and may stand for other values than those stored.

torch is never imported here: whoever passes a tensor has imported it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from qccl.errors import InvalidBufferError

__all__ = ["check_values", "forbid_resizing", "is_tensor", "storage_of"]


def is_tensor(array: Any) -> bool:
    """Whether it is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def check_values(tensor: Any, what: str) -> None:
    """Raise InvalidBufferError for a view that stands for other values than its memory holds: negated, conjugate."""
    for lazy, method in ((tensor.is_neg(), "resolve_neg"), (tensor.is_conj(), "resolve_conj")):
        if lazy:
            kind = "negated" if method == "resolve_neg" else "conjugate"
            raise InvalidBufferError(
                f"{what} is a {kind} view: its memory does not hold its values; pass the copy that {what}.{method}() "
                f"makes"
            )


def storage_of(tensor: Any, address: int, nbytes: int, what: str) -> Any:
    """The storage, which holds the memory even if the tensor gets another one (``x.data = y``, ``x.set_()``).

    Raises InvalidBufferError where it has fewer bytes than the tensor's shape needs.
    """
    storage = tensor.untyped_storage()
    first = address - storage.data_ptr()
    if nbytes and not 0 <= first <= first + nbytes <= storage.nbytes():
        raise InvalidBufferError(
            f"{what} needs {nbytes} bytes, which its storage of {storage.nbytes()} bytes does not have; allocate the "
            f"storage (again) before the call"
        )
    return storage


def forbid_resizing(tensor: Any) -> None:
    """For good: resizing the storage of this tensor in host memory raises RuntimeError in torch.

    A storage that grows frees its old memory, whoever refers to the storage, so nothing can keep that memory. torch
    therefore forbids it where NumPy shares the memory, and that is the only way to forbid it.
    """
    if tensor.untyped_storage().resizable():
        torch = sys.modules["torch"]
        plain = tensor.detach()
        with contextlib.suppress(RuntimeError):  # torch was built without NumPy
            (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
