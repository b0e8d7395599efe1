"""A model's parameters as an ordered list of arrays, from an array, a list or a dict of arrays, of any library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qccl.base.arrays import Values, check_disjoint, check_listed
from qccl.base.errors import ArgumentError, QcclError
from qccl.base.scalars import as_integer

__all__ = [
    *(
        "ArrayChange",
        "Form",
        "check_separate",
        "copy_of",
        "difference",
        "form_of",
        "fragments_of",
        "move",
        "mutable_copy",
    ),
    *("named", "names_of", "plain", "restored", "times", "zeros_like"),
]

#: the element type and the shape of an array
Form = tuple[str, tuple[int, ...]]


def named(params: Any, what: str = "params") -> list[tuple[str, Any]]:
    """List the arrays with their names for messages. Raises ArgumentError unless ``params`` are arrays."""
    if hasattr(params, "shape"):
        return [(what, params)]
    if isinstance(params, Mapping):
        return [(f"{what}[{name!r}]", params[name]) for name in names_of(params)]
    check_listed(params, what, "an array, a dict of arrays, or ")
    return [(f"{what}[{i}]", array) for i, array in enumerate(params)]


def names_of(params: Any) -> list[Any]:
    """The sorted names of a dict's arrays: the dict's own order may change, because jax.jit() sorts its results."""
    return sorted(params, key=repr) if isinstance(params, Mapping) else []


def restored(arrays: Sequence[Any], params: Any) -> Any:
    """Put arrays, in the order of named(), into the structure of ``params``."""
    if hasattr(params, "shape"):
        return arrays[0]
    if not isinstance(params, Mapping):
        return list(arrays)
    by_name = dict(zip(names_of(params), arrays, strict=True))
    return {name: by_name[name] for name in params}


def plain(array: Any) -> Any:
    """Detach a torch tensor from its gradient, sharing its memory; return other arrays unchanged."""
    return array.detach() if hasattr(array, "detach") else array


def check_separate(values: Iterable[Values]) -> None:
    """Raise InvalidBufferError if writable arrays share memory."""
    check_disjoint([each for each in values if not each.view.readonly])


def form_of(values: Values) -> Form:
    """The element type and the shape."""
    return str(values.dtype), values.shape_and_strides[0]


def copy_of(array: Any) -> Any:
    """Copy an array, in the same library."""
    return array.clone() if hasattr(array, "clone") else array.copy()


def mutable_copy(values: Values) -> Any:
    """Copy an array, in the same library, or in NumPy if that library's arrays are read-only (JAX)."""
    if not values.view.readonly:
        return copy_of(values.array)
    import numpy as np

    return np.array(values.array)


def zeros_like(array: Any) -> Any:
    """Make zeros in the same library, of the same type and shape."""
    zeros = copy_of(array)
    zeros[...] = 0
    return zeros


def difference(common: Any, local: Any) -> Any:
    """Subtract, with a result of the kind of ``common`` (NumPy minus JAX would be an array of JAX)."""
    change = copy_of(common)
    change[...] = local
    change *= -1
    change += common
    return change


def times(array: Any, factor: float) -> Any:
    """Multiply in the array's own element type, which a Python number would widen in NumPy with bfloat16."""
    product = copy_of(array)
    product *= factor
    return product


def move(local: Any, begun: Any, common: Any) -> None:
    """Set ``local`` to ``common`` plus its change since ``begun``, whose contents are overwritten.

    ``local`` changes in the last statement, so that an earlier exception leaves it unchanged.
    """
    begun *= -1
    begun += local
    begun += common
    local[...] = begun


class ArrayChange:
    """A change of many arrays, used by ``with``. If an exception such as Ctrl-C ends it, no step may follow.

    After an error of qccl steps may follow: such an error comes before the first array has changed.

    Attributes:
        interrupted: some arrays may have changed, and others not.
    """

    interrupted = False

    def check(self) -> None:
        """Raise ArgumentError if a change was interrupted."""
        if self.interrupted:
            raise ArgumentError(
                "an exception interrupted a change of the parameters, so they may differ between ranks; call "
                "continue_on() or load a state on all ranks"
            )

    def __enter__(self) -> None:
        self.interrupted = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.interrupted = kind is not None and not issubclass(kind, QcclError)


def fragments_of(given: Any, names: Sequence[Any], counts: Sequence[int]) -> list[int]:
    """Find the fragment of each array with ``counts`` elements, from the argument ``fragments``; see DiLoCo."""
    number = as_integer(given)
    if number is not None:
        if not 1 <= number <= max(1, len(counts)):
            raise ArgumentError(
                f"fragments={given} is not possible: there are {len(counts)} arrays, and each fragment needs one"
            )
        loads, found = [0] * number, []
        for count in counts:
            found.append(loads.index(min(loads)))
            loads[found[-1]] += count
        return found
    if isinstance(given, Mapping) and set(given) == set(names):
        given = [given[name] for name in names]
    listed = [as_integer(each) for each in given] if isinstance(given, list | tuple) else []
    if len(listed) != len(counts) or {*listed} != {*range(len({*listed}))}:
        raise ArgumentError(
            f"fragments must be the number of fragments, or the fragment's number for each of the {len(counts)} arrays "
            f"(by name for a dict), with all numbers from 0 to the greatest; not {given!r}"
        )
    return [each for each in listed if each is not None]
