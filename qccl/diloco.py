"""DiLoCo: each rank trains alone for many steps, then the ranks average what changed and take one outer step."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qccl import codecs
from qccl.arguments import CodecLike, count_of
from qccl.arrays import Values
from qccl.communicator import Communicator
from qccl.errors import ArgumentError, MismatchError
from qccl.scalars import as_bool, as_real
from qccl.state import check_key

__all__ = ["DiLoCo"]

#: element type and shape
_Form = tuple[str, tuple[int, ...]]


class DiLoCo:
    """Local training with a compressed outer step (DiLoCo, Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    All ranks have the same common parameters. Each trains its own copy of them for as many steps as it likes, with any
    optimizer. Then ``step()`` averages the changes over the ranks, with the codec and its error feedback, and takes a
    step of SGD with Nesterov momentum::

        d = average over the ranks of (common - local)        encoded
        v = momentum v + d
        common -= outer_lr (d + momentum v)                   without nesterov: outer_lr v

    Every rank then continues from the common parameters, which are the same bits on all ranks. They and the outer
    momentum have the parameters' element types; keep parameters of 16 bits in float32 for training.

    Attributes:
        params: the parameters as last given or returned.
        common: the common parameters, which no local step changes; a list of arrays, those of a dict by sorted name.
        steps: the number of outer steps so far.
    """

    def __init__(
        self,
        comm: Communicator,
        params: Any,
        *,
        codec: CodecLike = "minmax4+ef",
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        key: str = "diloco",
    ) -> None:
        """Collective: all ranks continue from rank 0's parameters, which are written to ``params``.

        ``params`` is an array, a list of arrays or a dict of them, of float32, float16 or bfloat16 (NumPy, torch, CuPy;
        JAX on the host). Arrays of dicts belong together by name, whatever the dicts' orders. A codec with error
        feedback keeps its residuals in the communicator under ``key``, so two objects on one communicator need
        different keys. ``outer_lr=1`` and ``momentum=0`` average the parameters.
        """
        self._codec = codecs.get(codec)
        if "momentum" in self._codec.state_names:
            raise ArgumentError(f"{self._codec.spec()} has momentum, and so has the outer step; use +ef alone")
        check_key(self._codec, key)
        rate, decay, looks_ahead = as_real(outer_lr), as_real(momentum), as_bool(nesterov)
        if rate is None or not 0 < rate < math.inf:
            raise ArgumentError(f"outer_lr must be a positive number, the rate of the outer step, not {outer_lr!r}")
        if decay is None or not 0 <= decay < 1:
            raise ArgumentError(f"momentum must be a number from 0 to below 1, not {momentum!r}")
        if looks_ahead is None:
            raise ArgumentError(f"nesterov must be True or False, not {nesterov!r}")
        self._outer_lr, self._momentum, self._nesterov, self._key = float(rate), float(decay), looks_ahead, key
        self.comm, self.params, self.steps = comm, params, 0
        given = self._values(params)
        self._names = _names(params)
        self._forms = [_form(values) for values in given]
        self.common = [_mutable_copy(values) for values in given]
        self._velocity = [_zeros(array) for array in self.common]
        self.continue_on(comm)

    def step(self, params: Any = None) -> Any:
        """Collective: one outer step after any number of local ones; returns the parameters with the new values.

        ``params`` are the local parameters, in the same structure as before; None means ``self.params``. Arrays that
        can be written get the new values in place. JAX's cannot: the result has NumPy copies in their place.

        Raises ArgumentError on all ranks, and changes neither parameters nor residuals, if the average is not finite.
        """
        params = self.params if params is None else params
        if _names(params) != self._names:
            raise ArgumentError(f"params has the names {_names(params)}, and DiLoCo was made for {self._names}")
        local = self._values(params, self._forms)
        changes = [_change(common, values.array) for common, values in zip(self.common, local, strict=True)]
        by_type: dict[str, list[Any]] = {}
        for change, values in zip(changes, local, strict=True):
            by_type.setdefault(str(values.dtype), []).append(change)
        self._average(by_type)
        for common, velocity, change in zip(self.common, self._velocity, changes, strict=True):
            self._advance(common, velocity, change)
        self.steps += 1
        self.params = self._deliver(params)
        return self.params

    def continue_on(self, comm: Communicator) -> None:
        """Collective: use another communicator, such as the one that shrink() or grow() returned.

        The ranks of ``comm`` continue from the state of the one with the most outer steps; new ranks construct their
        DiLoCo on ``comm`` meanwhile. A rank that was behind, or is new, gets the common parameters in ``params``; the
        others keep their local ones, so that a step that failed can be repeated.
        """
        found = comm.allgather(struct.pack("<q", self.steps) + self._identity())
        others = [rank for rank, each in enumerate(found) if each[8:] != found[0][8:]]
        if others:
            raise MismatchError(
                f"ranks {others} have other parameters (number, names, shapes, types) or arguments of DiLoCo "
                "than rank 0"
            )
        steps = [struct.unpack("<q", each[:8])[0] for each in found]
        root = steps.index(max(steps))
        for array in (*self.common, *self._velocity):
            comm.quantized_broadcast(array, root=root, codec="none")
        behind = self.steps < steps[root] or self.steps == 0
        self.comm, self.steps = comm, steps[root]
        if behind:
            self.params = self._deliver(self.params)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the common parameters and of the outer momentum, the same on all ranks, and the number of steps.

        The residuals of error feedback are in the communicator's state_dict(), which each rank saves too.
        """
        copies = {"common": self.common, "momentum": self._velocity}
        return {name: [_copy(array) for array in arrays] for name, arrays in copies.items()} | {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), the same on all ranks; ``params`` get the common parameters.

        A state that was saved between two outer steps continues bit for bit if the local parameters are loaded
        afterwards. Raises ArgumentError for any other state, and then changes nothing.
        """
        if not isinstance(state, Mapping) or set(state) != {"common", "momentum", "steps"}:
            raise ArgumentError("a state is the dict that state_dict() returned, with common, momentum and steps")
        steps = count_of(state["steps"], 'the state\'s "steps"')
        for name in ("common", "momentum"):
            self._values(state[name], self._forms, f"the state's {name}")
        for arrays, name in ((self.common, "common"), (self._velocity, "momentum")):
            for array, saved in zip(arrays, state[name], strict=True):
                array[...] = saved
        self.steps = steps
        self.params = self._deliver(self.params)

    def _average(self, by_type: Mapping[str, list[Any]]) -> None:
        """Replace arrays by their averages, in one call for each element type; an error changes no residuals."""
        put_back: list[Callable[[], object]] = []
        try:
            for number, (dtype, arrays) in enumerate(by_type.items(), 1):
                key = f"{self._key} {dtype}"
                if number < len(by_type):  # the last call changes nothing if it fails
                    put_back.append(self.comm._session.state.keep(key))
                self.comm.quantized_allreduce_coalesced(arrays, op="avg", codec=self._codec, key=key, nonfinite="error")
        except BaseException:  # Ctrl-C, too
            for each in put_back:
                each()
            raise

    def _advance(self, common: Any, velocity: Any, change: Any) -> None:
        """One step of SGD. Each operation rounds once, so that all ranks get the same bits on any processor."""
        velocity *= self._momentum
        velocity += change
        if self._nesterov:
            change += _times(velocity, self._momentum)
        else:
            change[...] = velocity
        change *= self._outer_lr
        common -= change

    def _values(self, params: Any, forms: list[_Form] | None = None, what: str = "params") -> list[Values]:
        """The memory of all arrays, which must have ``forms`` if given."""
        values = [
            self.comm._memory.from_array(_plain(array), writable=False, what=name)
            for name, array in _named(params, what)
        ]
        if forms is not None and len(values) != len(forms):
            raise ArgumentError(f"{what} has {len(values)} arrays, and DiLoCo was made for {len(forms)}")
        for each, form in zip(values, forms or (), strict=False):
            if _form(each) != form:
                raise ArgumentError(f"type and shape of {each.what} are {_form(each)}, and DiLoCo was made for {form}")
        return values

    def _deliver(self, params: Any) -> Any:
        """Write the common parameters into ``params``; returns them, with copies for arrays that cannot be written."""
        delivered = []
        for (_, array), values, common in zip(_named(params), self._values(params), self.common, strict=True):
            if not values.view.readonly:
                values.array[...] = common
            delivered.append(_copy(common) if values.view.readonly else array)
        if hasattr(params, "shape"):
            return delivered[0]
        if not isinstance(params, Mapping):
            return delivered
        by_name = dict(zip(_names(params), delivered, strict=True))
        return {name: by_name[name] for name in params}

    def _identity(self) -> bytes:
        """What must be the same on all ranks."""
        rule = self._outer_lr, self._momentum, self._nesterov, self._key
        arrays = self._names, self._forms
        return hashlib.sha256(f"{codecs.identity(self._codec)} {rule} {arrays}".encode()).digest()


def _named(params: Any, what: str = "params") -> list[tuple[str, Any]]:
    """Each array with its name in messages."""
    if hasattr(params, "shape"):
        return [(what, params)]
    if isinstance(params, Mapping):
        return [(f"{what}[{name!r}]", params[name]) for name in _names(params)]
    if isinstance(params, Collection) and not isinstance(params, str | bytes):
        return [(f"{what}[{i}]", array) for i, array in enumerate(params)]
    raise ArgumentError(
        f"{what} must be an array, a list of arrays or a dict of arrays, not {type(params).__name__}; make a list of "
        f"an iterator: list(model.parameters())"
    )


def _names(params: Any) -> list[Any]:
    """The names of a dict's arrays in an order that its own does not change: jax.jit() sorts the dicts it returns."""
    return sorted(params, key=repr) if isinstance(params, Mapping) else []


def _plain(array: Any) -> Any:
    """A torch tensor without its gradient, which shares the memory; other arrays as they are."""
    return array.detach() if hasattr(array, "detach") else array


def _form(values: Values) -> _Form:
    return str(values.dtype), values.shape_and_strides[0]


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _mutable_copy(values: Values) -> Any:
    """A copy in the same library; in NumPy if that library's arrays cannot be written (JAX)."""
    if not values.view.readonly:
        return _copy(values.array)
    import numpy as np

    return np.array(values.array)


def _zeros(like: Any) -> Any:
    zeros = _copy(like)
    zeros[...] = 0
    return zeros


def _change(common: Any, local: Any) -> Any:
    """``common - local``, in an array of the kind of ``common`` (NumPy minus JAX would be JAX's)."""
    change = _copy(common)
    change[...] = local
    change *= -1
    change += common
    return change


def _times(array: Any, factor: float) -> Any:
    """A product in the array's own type, which a factor outside the array may widen (NumPy with bfloat16)."""
    product = _copy(array)
    product *= factor
    return product
