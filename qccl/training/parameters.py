"""Parameters of a model as a list of arrays in order: an array, a list of arrays or a dict of them, of any library."""

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

#: element type and shape
Form = tuple[str, tuple[int, ...]]


def named(params: Any, what: str = "params") -> list[tuple[str, Any]]:
    """Each array with its name in messages. Raises ArgumentError for anything but arrays, lists and dicts of them."""
    if hasattr(params, "shape"):
        return [(what, params)]
    if isinstance(params, Mapping):
        return [(f"{what}[{name!r}]", params[name]) for name in names_of(params)]
    check_listed(params, what, "an array, a dict of arrays, or ")
    return [(f"{what}[{i}]", array) for i, array in enumerate(params)]


def names_of(params: Any) -> list[Any]:
    """The names of a dict's arrays in an order that its own does not change: jax.jit() sorts the dicts it returns."""
    return sorted(params, key=repr) if isinstance(params, Mapping) else []


def restored(arrays: Sequence[Any], params: Any) -> Any:
    """The arrays, which are in the order of named(), in the structure of ``params``."""
    if hasattr(params, "shape"):
        return arrays[0]
    if not isinstance(params, Mapping):
        return list(arrays)
    by_name = dict(zip(names_of(params), arrays, strict=True))
    return {name: by_name[name] for name in params}


def plain(array: Any) -> Any:
    """A torch tensor without its gradient, which shares the memory; other arrays as they are."""
    return array.detach() if hasattr(array, "detach") else array


def check_separate(values: Iterable[Values]) -> None:
    """Raise InvalidBufferError if arrays share memory that a step writes. Results of read-only ones are copies."""
    check_disjoint([each for each in values if not each.view.readonly])


def form_of(values: Values) -> Form:
    """Element type and shape."""
    return str(values.dtype), values.shape_and_strides[0]


def copy_of(array: Any) -> Any:
    """A copy in the same library."""
    return array.clone() if hasattr(array, "clone") else array.copy()


def mutable_copy(values: Values) -> Any:
    """A copy in the same library; in NumPy if that library's arrays cannot be written (JAX)."""
    if not values.view.readonly:
        return copy_of(values.array)
    import numpy as np

    return np.array(values.array)


def zeros_like(array: Any) -> Any:
    """Zeros in the same library, of the same type and shape."""
    zeros = copy_of(array)
    zeros[...] = 0
    return zeros


def difference(common: Any, local: Any) -> Any:
    """``common - local``, in an array of the kind of ``common`` (NumPy minus JAX would be JAX's)."""
    change = copy_of(common)
    change[...] = local
    change *= -1
    change += common
    return change


def times(array: Any, factor: float) -> Any:
    """A product in the array's own type, which a factor outside the array may widen (NumPy with bfloat16)."""
    product = copy_of(array)
    product *= factor
    return product


def move(local: Any, begun: Any, common: Any) -> None:
    """Set ``local`` to ``common`` and what has changed in it since it was ``begun``, which is lost.

    ``local`` changes at once at the end, so that an exception before leaves it as it was.
    """
    begun *= -1
    begun += local
    begun += common
    local[...] = begun


class ArrayChange:
    """A change of many arrays, as ``with commit:``. If an exception such as Ctrl-C ends it, no step may follow.

    An error of qccl may end it, too: such an error comes before the first array has changed.

    Attributes:
        interrupted: whether some arrays may have changed, and others not.
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
    """The fragment of each array with ``counts`` elements, from what a caller gave for ``fragments``; see DiLoCo."""
    number = as_integer(given)
    if number is not None:
        if not 1 <= number <= max(1, len(counts)):
            raise ArgumentError(
                f"fragments={given} is not possible; there are {len(counts)} arrays, each in one of them"
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
            f"fragments must be how many, or for each of the {len(counts)} arrays the number of its fragment (of a "
            f"dict's by name), where all numbers from 0 to the greatest occur; not {given!r}"
        )
    return [each for each in listed if each is not None]
