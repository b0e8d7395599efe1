"""The keywords that the collectives share: each is declared once, with its type and its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from qccl.arguments import CodecLike
from qccl.dtypes import DType

if TYPE_CHECKING:
    from qccl.trace import TraceEvent

__all__ = ["ArrayOptions", "CallOptions", "Options", "PointerOptions", "ResultArrayOptions", "ResultOptions"]
__all__ += ["StateArrayOptions", "StateOptions", "accepts", "complete"]


class Options(TypedDict, total=False):
    """Keywords of every collective, on arrays and on pointers."""

    codec: CodecLike
    async_op: bool
    chunk: int | None
    timeout: float | None


class ResultOptions(Options, total=False):
    """Keywords of the collectives whose ranks all get the whole result."""

    nonfinite: str


class _OfState(TypedDict, total=False):
    key: str | None
    lr: float | None


class StateOptions(Options, _OfState, total=False):
    """Keywords of the collectives that keep the state of codecs."""


class PointerOptions(ResultOptions, _OfState, total=False):
    """All options of a function on pointers."""


class _OfArrays(TypedDict, total=False):
    dtype: DType | str | None
    stream: Any
    trace: list[TraceEvent] | None


class ArrayOptions(Options, _OfArrays, total=False):
    """Options of a method on arrays."""


class ResultArrayOptions(ResultOptions, _OfArrays, total=False):
    """ResultOptions of a method on arrays."""


class StateArrayOptions(StateOptions, _OfArrays, total=False):
    """StateOptions of a method on arrays."""


class CallOptions(PointerOptions, _OfArrays, total=False):
    """All options."""


_DEFAULTS: dict[str, Any] = {
    **{"codec": "minmax8", "async_op": False, "chunk": None, "timeout": None, "nonfinite": "propagate"},
    **{"key": None, "lr": None, "dtype": None, "stream": None, "trace": None},
}

_F = TypeVar("_F", bound=Callable[..., Any])


def accepts(options: type) -> Callable[[_F], _F]:
    """Show ``options`` in the signature of a function that ends in ``**options: Unpack[...]``."""

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        shown = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=hint.__forward_arg__
            )
            for name, hint in options.__annotations__.items()
        ]
        parameters = [*list(signature.parameters.values())[:-1], *shown]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def complete(kind: type, function: str, given: Mapping[str, object]) -> CallOptions:
    """All options: the defaults, replaced by those of a call of ``function``, which takes those of ``kind``.

    A wrong keyword raises the TypeError that Python raises for a function without ``**``.
    """
    for name in given:
        if name not in kind.__annotations__ and name != "stream":  # which functions on pointers have by its place
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return cast(CallOptions, {**_DEFAULTS, **given})
