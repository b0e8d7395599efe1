"""The keywords that the collectives share: each is declared once, with its type and its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from qccl.arguments import CodecLike
from qccl.dtypes import DType
from qccl.guard import is_guard

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
    """Show ``options`` in the signature of a function that ends in ``**options: Unpack[...]``, and refuse others.

    A wrong keyword raises the TypeError that Python raises for a function without ``**``. The function is guarded as by
    guard.guarded(), for the communicator that is its first argument or its argument ``comm``.
    """

    def decorate(function: _F) -> _F:
        own = inspect.signature(function)
        shown = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=hint.__forward_arg__
            )
            for name, hint in options.__annotations__.items()
        ]
        signature = own.replace(parameters=[*list(own.parameters.values())[:-1], *shown])
        allowed = frozenset(signature.parameters)

        names = list(own.parameters)
        place = names.index("comm") if "comm" in names else 0

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            if not allowed.issuperset(given):
                wrong = next(name for name in given if name not in allowed)
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {wrong!r}")
            try:
                session = args[place]._session
            except (IndexError, AttributeError):
                session = getattr(given.get("comm"), "_session", None)
                if session is None:
                    return function(*args, **given)  # it says that this is no communicator
            unsettled, thread = session.unsettled, get_ident()
            if unsettled:
                session.check_abandoned()
            before = unsettled.get(thread)
            try:
                result = function(*args, **given)
            except BaseException as error:
                session.interrupted(error, before)
                raise
            if before is not None:
                unsettled[thread] = before
            elif thread in unsettled:
                del unsettled[thread]
            return result

        is_guard(checked)
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return cast(_F, checked)

    return decorate


def complete(options: Mapping[str, object], **others: Any) -> CallOptions:
    """All options: the defaults, replaced by those of a call."""
    return cast(CallOptions, {**_DEFAULTS, **options, **others})
