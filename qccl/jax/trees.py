"""All-reduce of trees of JAX arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qccl import codecs
from qccl.base.errors import ArgumentError
from qccl.codecs import Codec
from qccl.collectives.arguments import CodecLike, check_key, one_of
from qccl.communicator.communicator import Communicator
from qccl.communicator.launch import init
from qccl.communicator.owners import Owner
from qccl.jax.host_call import call_on_host
from qccl.jax.reduction import Reduction, check_type

__all__ = ["allreduce", "default_communicator", "reduce_gradients"]

#: alignment in bytes of memory that JAX uses without a copy
_ALIGNMENT = 64


@cache
def default_communicator() -> Communicator:
    """The communicator of all processes, the default of allreduce().

    The first call is collective, and makes it with ``qccl.init(backend="host")``; later calls return the same. The
    processes are started by mpiexec, torchrun or another launcher, or belong to jax.distributed.
    """
    return init(backend="host")


def allreduce(
    tree: Any,
    codec: CodecLike = "minmax8",
    *,
    op: str = "avg",
    key: str | Owner | None = None,
    comm: Communicator | None = None,
    algorithm: str = "auto",
    nonfinite: str = "propagate",
    lr: float | None = None,
    timeout: float | None = None,
) -> Any:
    """Combine the arrays of a tree over all ranks, with encoded traffic; every rank gets the same bits.

    It works outside compiled functions, and inside jax.jit(), scan(), while_loop() and cond() on the CPU. All ranks
    must make the same calls in the same order: calls in compiled functions run in the order of the program.

    Its derivative is the derivative of the exact operation: cotangents are combined over the ranks with the same
    ``op``, and encoded with the same codec, without its state. JAX refuses forward-mode derivatives, vmap() and
    checkpoint().

    Args:
        tree: a tree of arrays on the host, such as a dict of gradients. An array is on one device, or replicated over
            several devices of this process; outside of compiled functions the result has the same devices. Leaves of
            float32, float16 and bfloat16 are encoded, with one call for each type. float64 and integers (``op="sum"``
            only) are sent exactly: every rank gets every rank's values, so they should be few.
        codec: as in Communicator.quantized_allreduce().
        op: "avg" or "sum".
        key: a name for the tree; codecs with "+ef" or "+nesterov" need it. Each leaf then has its own call, and its
            state in ``comm.state_dict()`` has the name of the tree followed by the path to the leaf, such as
            "gradients['w']".
        comm: a communicator on host memory; None means default_communicator(). Compiled functions keep the communicator
            that they were compiled with.
        algorithm: as in Communicator.quantized_allreduce(), also the next three.
        nonfinite: "propagate" or "error".
        lr: a number, not a traced value.
        timeout: seconds for each call.

    Returns:
        A tree of the same structure, of new arrays.

    Raises:
        ArgumentError: an argument or a leaf is not allowed; nothing was sent. The errors of the call itself are those
            of Communicator.quantized_allreduce(). In a compiled function they are a jax.errors.JaxRuntimeError with
            the error's name and text, which JAX raises when the program waits for a result; JAX may then raise it again
            for every later call of this thread.
    """
    one_of(op, ("avg", "sum"), "op")
    chosen = codecs.get(codec)
    if chosen.state_names and not isinstance(key, Owner):
        check_key(chosen, key)
    if isinstance(lr, jax.core.Tracer):
        raise ArgumentError("lr is a traced value; pass a number, or call allreduce() outside the compiled function")
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in found]
    leaves = [
        _as_array(leaf, f"leaf {name}" if name else "the array", op, chosen)
        for name, (_, leaf) in zip(names, found, strict=True)
    ]
    sent = [i for i, leaf in enumerate(leaves) if leaf.size]
    if sent:
        options = {"algorithm": algorithm, "nonfinite": nonfinite, "lr": lr, "timeout": timeout}
        keys = [key.key(names[i]) if isinstance(key, Owner) else f"{key}{names[i]}" for i in sent]
        reduction = Reduction(_on_host(comm), chosen, op, tuple(keys) if chosen.state_names else None, options)
        for i, reduced in zip(sent, _differentiable(reduction)([leaves[i] for i in sent]), strict=True):
            leaves[i] = reduced
    return jax.tree_util.tree_unflatten(structure, leaves)


class _Transformation(NamedTuple):
    """A pair of functions, like optax's GradientTransformation."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class _Gradients:
    """The gradients of one model, which one transformation reduces; it owns their state."""

    def __init__(self, codec: CodecLike, key: str | None, options: Mapping[str, Any]) -> None:
        self._codec, self._key, self._options = codec, key, options
        self._owner: Owner | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}  # the shapes of the first accepted gradients

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Reduce gradients; optax calls this, also while a program is traced."""
        found, _ = jax.tree_util.tree_flatten_with_path(updates)
        shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in found}
        key = self._own(shapes) if codecs.get(self._codec).state_names else None
        reduced = allreduce(updates, self._codec, key=key, **self._options)
        self._shapes = shapes
        return reduced, state

    def _own(self, shapes: Mapping[str, tuple[int, ...]]) -> Owner:
        """The owner of the state. Raises ArgumentError for the gradients of another model."""
        if self._owner is None:
            owners = _on_host(self._options.get("comm")).state.owners
            self._owner = owners.add("reduce_gradients()", "gradients", self._key, separators="[.")
        if self._shapes and shapes != self._shapes:
            names = [*shapes, *self._shapes]
            leaf = next(name for name in names if shapes.get(name) != self._shapes.get(name))
            raise ArgumentError(
                f"this reduce_gradients() has the residuals of one model, and now gets gradients of another model: "
                f"the shape of the leaf {leaf!r} was {self._shapes.get(leaf, 'not there')}, and is "
                f"{shapes.get(leaf, 'not there')}; make a reduce_gradients() for each model, or call "
                f"qccl.jax.allreduce(gradients, codec, key=...) if leaves of one model come and go"
            )
        return self._owner


def reduce_gradients(codec: CodecLike = "minmax8", *, key: str | None = None, **options: Any) -> _Transformation:
    """Make a gradient transformation of optax, the first of a chain, from allreduce(); optax is not needed.

        optimizer = optax.chain(qccl.jax.reduce_gradients("minmax8"), optax.adam(1e-3))

    ``options`` are the other keywords of allreduce(). ``init(parameters)`` returns the state (), and
    ``update(gradients, state, parameters)`` the reduced gradients and the state.

    With "+ef" or "+nesterov" make one transformation for each model, because it has the residuals of one model:
    gradients of other names or shapes raise ArgumentError. ``key`` is the begin of the state's names in the
    communicator, for this object alone. None: "gradients" for the first transformation with state that is used,
    "gradients#2" for the second, and so on. A saved state of the communicator then fits a program that uses them in the
    same order.
    """
    return _Transformation(lambda params: (), _Gradients(codec, key, options).update)


def _on_host(comm: Communicator | None) -> Communicator:
    if comm is None:
        return default_communicator()
    if not isinstance(comm, Communicator) or comm.backend != "host":
        raise ArgumentError(
            f'comm must be a communicator on host memory, such as qccl.init(backend="host"), not {comm!r}; arrays on a '
            f"GPU are reduced by the methods of a communicator on CUDA, with a CuPy array as out="
        )
    return comm


def _as_array(leaf: Any, what: str, op: str, codec: Codec) -> Any:
    """Make a leaf, named ``what`` in errors, a JAX array that is whole on each of its devices, or a tracer."""
    try:
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError as error:
        raise ArgumentError(f"{what} is of type {type(leaf).__name__}, not an array for JAX ({error})") from error
    check_type(what, array.dtype, op, codec)
    if isinstance(array, jax.core.Tracer):
        return array
    if not (array.is_fully_addressable and array.is_fully_replicated):
        raise ArgumentError(
            f"{what} is split over {len(array.sharding.device_set)} devices; pass the part on one, such as "
            f"x.addressable_shards[0].data, or an array that is whole on each of this process's devices"
        )
    if array.ndim > 1 and array.format.layout.major_to_minor != tuple(range(array.ndim)):
        return jax.device_put(np.ascontiguousarray(array), array.sharding)  # the results are row-major
    return array


def _differentiable(reduction: Reduction) -> Callable[[list[Any]], list[Any]]:
    """Make a function of arrays from a reduction, with its derivative."""
    backward = replace(reduction, codec=reduction.codec.plain, keys=None, options=reduction.options | {"lr": None})

    def transposed(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        real = [i for i, each in enumerate(cotangents) if each.dtype != jax.dtypes.float0]  # integers have none
        found: list[Any] = [None] * len(cotangents)
        for i, each in zip(real, _differentiable(backward)([cotangents[i] for i in real]), strict=True):
            found[i] = each
        return (found,)

    function: Any = jax.custom_vjp(lambda xs: _reduced(reduction, xs))
    function.defvjp(lambda xs: (function(xs), None), transposed)  # itself: it may be differentiated again
    return function  # type: ignore[no-any-return]


def _reduced(reduction: Reduction, xs: Sequence[Any]) -> list[Any]:
    """Reduce arrays now, or traced arrays when the program runs."""
    if any(isinstance(x, jax.core.Tracer) for x in xs):
        return call_on_host(reduction.run, xs)
    jax.effects_barrier()  # compiled programs under way may be using the communicator
    outs = [_aligned(x.shape, x.dtype) for x in xs]
    reduction.run([x.addressable_data(0) for x in xs], outs)
    places = [x.sharding if x.committed else None for x in xs]
    return jax.device_put(outs, places if any(places) else None)  # type: ignore[no-any-return]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Make an array without values that JAX can use without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + nbytes].view(dtype).reshape(shape)
