"""Collectives as operators of PyTorch, ``torch.ops.qccl``, which torch.compile() and torch.export() keep in graphs.

A graph holds no objects, so an operator takes the name of a group, which register_group() gives to a communicator.

The ranks must make their calls in the same order. A compiler takes an operator for a pure function: it drops a call
whose result is not used, makes one call of two equal ones, and changes the order of others. So the operators are
registered with an ordered effect, which keeps each call in its place, in backward passes, too; _lower() keeps it in
Inductor's programs. PyTorch allows no effect for operators that mutate: all_reduce_ is therefore a composite of
all_reduce and copy_, in eager programs as well.

Gradients are those of PyTorch's functional collectives, and belong to the sum of all ranks' losses.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qccl.base.errors import ArgumentError, EngineError
from qccl.collectives.arguments import lossiest, op_of
from qccl.communicator.communicator import Communicator
from qccl.torch.fsdp import checked_communicator

__all__ = ["register_group"]

_groups = weakref.WeakValueDictionary[str, Communicator]()
_naming = threading.Lock()
_library = torch.library.Library("qccl", "FRAGMENT")  # the operators exist as long as this object
_operators: list[Any] = []  # all but all_reduce_, with an ordered effect
_fault: Exception | None = None  # raised by a PyTorch without ordered effects


def register_group(name: str, comm: Communicator) -> None:
    """Give a communicator a name, by which the operators ``torch.ops.qccl`` of compiled programs find it.

    Each rank names its own communicator; ranks that are threads of one process need different names. The name does not
    keep the communicator alive. When it is closed or has failed, another one, such as shrink() makes, may get the name,
    and compiled programs go on with that. Raises ArgumentError for the name of another group that is still usable, for
    a name that is not a text, and for a communicator that takes no calls.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"the name of a group is a text, not {name!r}")
    with _naming:  # ranks that are threads name their communicators at the same time
        other = _groups.get(name)
        if other is not None and other is not comm and other.is_usable:
            raise ArgumentError(f"{other!r} has the name {name!r} already; close it first, or give {comm!r} another")
        if not checked_communicator(comm).is_usable:
            raise ArgumentError(f"{comm!r} takes no calls any more; make another communicator and name that {name!r}")
        _groups[name] = comm


def _group(name: str, size: int | None = None) -> Communicator:
    """The communicator with this name. Raises ArgumentError if there is none, or if it has not ``size`` ranks."""
    comm = _groups.get(name)
    if comm is None or comm.closed:
        raise ArgumentError(
            f"the group {name!r} does not exist or is closed; make a communicator and name it, "
            f"qccl.torch.register_group({name!r}, comm), before a program calls the group"
        )
    if size is not None and size != comm.size:
        raise ArgumentError(
            f"this call was written for group_size={size}, and the group {name!r} has {comm.size} ranks; pass "
            f"group_size=comm.size, and compile or export again with that"
        )
    return comm


@functools.cache
def _stateless(codec: str) -> str:
    """Return ``codec``. Raises ArgumentError for a codec that keeps state."""
    found = lossiest(codec)
    if found.state_names:
        raise ArgumentError(
            f"operators keep no state, and {codec!r} does; use {found.plain.spec()!r}, or call "
            f"comm.quantized_allreduce(x, codec={codec!r}, key=...) outside of the graph"
        )
    return codec


def _all_reduce(x: torch.Tensor, group_name: str, codec: str = "minmax8", op: str = "sum") -> torch.Tensor:
    out = x.new_empty(x.shape)
    _group(group_name).quantized_allreduce(x.contiguous(), out, codec=_stateless(codec), op=op)
    return out


def _all_reduce_(x: torch.Tensor, group_name: str, codec: str = "minmax8", op: str = "sum") -> None:
    x.copy_(torch.ops.qccl.all_reduce(x, group_name, codec, op))


def _reduce_scatter(
    x: torch.Tensor, group_size: int, group_name: str, codec: str = "minmax8", op: str = "sum"
) -> torch.Tensor:
    comm, out = _group(group_name, group_size), _part(x, group_size)
    comm.quantized_reduce_scatter(x.contiguous(), out, codec=_stateless(codec), op=op)
    return out


def _all_gather(x: torch.Tensor, group_size: int, group_name: str, codec: str = "minmax8") -> torch.Tensor:
    comm, out = _group(group_name, group_size), _whole(x, group_size)
    comm.quantized_all_gather(x.contiguous(), out, codec=_stateless(codec))
    return out


def _part(x: torch.Tensor, group_size: int, *_: Any) -> torch.Tensor:
    rows, *others = _shape(x, group_size)
    if rows % group_size:
        raise ArgumentError(
            f"the first dimension of reduce_scatter's tensor, {tuple(x.shape)}, must be a multiple of "
            f"group_size={group_size}: each rank gets an equal part; pad the tensor"
        )
    return x.new_empty((rows // group_size, *others))


def _whole(x: torch.Tensor, group_size: int, *_: Any) -> torch.Tensor:
    rows, *others = _shape(x, group_size)
    return x.new_empty((group_size * rows, *others))


def _shape(x: torch.Tensor, group_size: int) -> Sequence[int]:
    if group_size < 1:  # a compiler sees it before _group() does
        raise ArgumentError(f"group_size={group_size} is not possible; pass group_size=comm.size")
    return x.shape or (1,)


def _unfit(why: object) -> EngineError:
    text = f"PyTorch {torch.__version__} cannot compile the operators torch.ops.qccl: {why}"
    return EngineError(f"{text}; use PyTorch 2.13 or 2.14, or make the calls outside of compiled programs")


def _fake(output: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Make the output of a call for a compiler, and let Inductor keep the order of calls.

    Inductor is prepared here, when it has been loaded to compile, because to load it takes seconds.
    """
    if _fault is not None:
        raise _unfit(_fault) from _fault
    if (inductor := sys.modules.get("torch._inductor.lowering")) is not None:
        if not hasattr(inductor, "lowerings"):
            raise _unfit("Inductor has no table of lowerings")
        if getattr(inductor.V.graph, "aot_mode", False) and torch.__version__ < (2, 13):
            raise _unfit("AOTInductor's packages ignore errors before PyTorch 2.13")
        inductor.lowerings.update({each: functools.partial(_lower, each) for each in _operators})
    return output(*arguments)


def _lower(operator: Any, *arguments: Any, **keywords: Any) -> Any:
    """Lower a call as Inductor does, and let it run after the previous one.

    Inductor of PyTorch 2.10 to 2.14 loses this dependency between operators with an effect: it records the name of a
    buffer where its scheduler reads the name of an operation (pytorch/pytorch#189209), and then reorders calls to save
    memory. That of PyTorch 2.9 keeps it, and does not call this function.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph = V.graph
    try:
        previous, later_than = graph.effectful_ops.get(_EffectType.ORDERED), graph.additional_buffer_deps
    except AttributeError as error:
        raise _unfit(error) from error
    first = len(graph.operations)
    output = ir.FallbackKernel.create(operator, *arguments, **keywords)
    if previous is not None:
        for each in graph.operations[first:]:
            later_than[each.get_operation_name()].add(previous.get_name())
    return ir.TensorBox.create(output)


def _keep_arguments(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]


def _all_reduce_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    _check_linear(ctx.arguments[-1])
    return torch.ops.qccl.all_reduce(gradient, *ctx.arguments), None, None, None


def _reduce_scatter_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    group_size, group_name, codec, op = ctx.arguments
    _check_linear(op)
    gathered = torch.ops.qccl.all_gather(gradient, group_size, group_name, codec)
    return gathered if op_of(op) == "sum" else gathered / group_size, None, None, None, None


def _all_gather_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return torch.ops.qccl.reduce_scatter(gradient, *ctx.arguments), None, None, None


def _check_linear(op: str) -> None:
    if op_of(op) in ("min", "max"):
        raise ArgumentError(f"op={op!r} has no gradient; use op='sum' or 'avg', or x.detach()")


for _name, _kernel, _output, _backward in (
    ("all_reduce", _all_reduce, lambda x, *_: x.new_empty(x.shape), _all_reduce_backward),
    ("reduce_scatter", _reduce_scatter, _part, _reduce_scatter_backward),
    ("all_gather", _all_gather, _whole, _all_gather_backward),
):
    _library.define(torch.library.infer_schema(_kernel, op_name=_name, mutates_args=()))
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qccl::{_name}", functools.partial(_fake, _output), lib=_library)
    torch.library.register_autograd(f"qccl::{_name}", _backward, setup_context=_keep_arguments, lib=_library)
    _operators.append(getattr(torch.ops.qccl, _name).default)

_library.define(torch.library.infer_schema(_all_reduce_, op_name="all_reduce_", mutates_args=("x",)))
_library.impl("all_reduce_", _all_reduce_, "CompositeImplicitAutograd")

try:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    for _operator in _operators:
        _register_effectful_op(_operator, _EffectType.ORDERED)
except Exception as _error:  # names private to PyTorch, which eager calls do not need
    _fault = _error
