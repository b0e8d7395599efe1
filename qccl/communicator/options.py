"""The keywords that collectives share, declared once, with their types and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from qccl.base.dtypes import DType
from qccl.base.errors import ArgumentError
from qccl.base.removed import KEYWORDS
from qccl.collectives.arguments import CodecLike

if TYPE_CHECKING:
    from qccl.base.trace import TraceEvent
    from qccl.collectives import CollectiveSpec

__all__ = ["ArrayOptions", "CallOptions", "CommonOptions", "Method", "PointerOptions"]
__all__ += ["ResultArrayOptions", "ResultOptions", "StateArrayOptions", "StateOptions"]


class CommonOptions(TypedDict, total=False):
    """Keywords of every collective, on arrays and on pointers."""

    codec: CodecLike
    async_op: bool
    chunk: int | None
    timeout: float | None


class ResultOptions(CommonOptions, total=False):
    """Keywords of the collectives whose ranks all get the whole result."""

    nonfinite: str


class _OfState(TypedDict, total=False):
    key: str | None
    lr: float | None


class StateOptions(CommonOptions, _OfState, total=False):
    """Keywords of the collectives that keep the state of codecs."""


class PointerOptions(ResultOptions, _OfState, total=False):
    """All options of a function on pointers."""


class _OfArrays(TypedDict, total=False):
    dtype: DType | str | None
    stream: Any
    trace: list[TraceEvent] | None


class ArrayOptions(CommonOptions, _OfArrays, total=False):
    """CommonOptions of a method on arrays."""


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


class Method:
    """A public function that makes calls of one collective, on arrays or on pointers.

    Attributes:
        spec: checks the calls.
        own: the names of the arguments that the function passes to Collectives._call beside ``**options``.
        name: the function's qualified name. The table of calls finds a call by it.
        parameters: the names of all parameters, including the keywords in ``**options``.
    """

    def __init__(self, spec: type[CollectiveSpec], *own: str) -> None:
        self.spec, self.own = spec, own
        self.name = ""
        self.parameters: Collection[str] = ()

    def accepts(self, options: type) -> Callable[[_F], _F]:
        """Decorate the function, which ends in ``**options: Unpack[...]``, to show these keywords in its signature."""

        def decorate(function: _F) -> _F:
            signature = inspect.signature(function)
            shown = [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=hint.__forward_arg__
                )
                for name, hint in options.__annotations__.items()
            ]
            signature = signature.replace(parameters=[*list(signature.parameters.values())[:-1], *shown])
            function.__signature__ = signature  # type: ignore[attr-defined]
            self.name, self.parameters = function.__qualname__, signature.parameters.keys()
            return function

        return decorate

    def variant(self, spec: type[CollectiveSpec], *more: str) -> Method:
        """The same function's calls that another spec checks, with ``more`` arguments of its own."""
        method = Method(spec, *self.own, *more)
        method.name, method.parameters = self.name, self.parameters
        return method

    def complete(self, own: Sequence[Any], options: Mapping[str, Any]) -> tuple[CallOptions, dict[str, Any]]:
        """Return all options of a call, with defaults for missing ones; and the arguments ``own``, by their names.

        Raises TypeError for an unknown keyword, as Python does for a function without ``**``, and ArgumentError for a
        keyword that was removed since the last release.
        """
        for name in options:
            if instead := KEYWORDS.get(f"qccl.{self.name.rpartition('.')[2]}({name})"):
                raise ArgumentError(f"{self.name}() has no argument {name!r} any more; {instead}")
            if name not in self.parameters:
                raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}")
        given = {**_DEFAULTS, **dict(zip(self.own, own, strict=True)), **options}
        return cast(CallOptions, {name: given.pop(name) for name in _DEFAULTS}), given
