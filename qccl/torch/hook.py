"""The communication hook of compress() that DDP keeps, and its replacement in a copy of the model."""

from __future__ import annotations

import warnings
from typing import Any

from qccl.communicator.dynamo import not_traced

__all__ = ["HookState", "is_of_a_copy", "reduce_bucket"]


class HookState:
    """The state of the hook: the handle of compress(). A pickle or a copy of the model does not contain the handle.

    Attributes:
        handle: the handle; None in a copy, whose reducer has no hook.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_a_copy, ()


def _of_a_copy() -> HookState:
    warnings.warn(
        "this copy of a DistributedDataParallel model averages its gradients without the codec of the original's "
        "qccl.torch.compress(), and without its state; to train the copy, call compress() on it",
        stacklevel=2,
    )
    return HookState(None)


def is_of_a_copy(hook: tuple[Any, Any]) -> bool:
    """Whether an entry of DDP's list of hooks was copied with the model, so that the reducer lacks this hook."""
    return isinstance(hook[1], HookState) and hook[1].handle is None


@not_traced  # the backward pass of a compiled step calls it while TorchDynamo looks for frames to compile
def reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Reduce a bucket; DDP calls this hook."""
    return state.handle._reduce(bucket)
