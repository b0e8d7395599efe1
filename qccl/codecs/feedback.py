"""The decorators +ef and +nesterov, codecs with state; collectives/feedback.py adds their state to schedules.

They give a codec state from call to call: error feedback and momentum. A decorated codec has the sizes and bytes of the
codec inside. All-reduce in one or two levels, reduce-scatter and peer exchange take it, and store its state by a key;
``docs/algorithms.md`` describes their use of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.base.dtypes import BFLOAT16, FLOAT32, DType
from qccl.base.errors import CodecError
from qccl.base.scalars import as_real
from qccl.codecs.base import Codec, Kernel
from qccl.codecs.checks import keep

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Decorator", "ErrorFeedback", "Momentum"]


#: the element types in which errors can be kept
_KEPT = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16)}


@dataclass(frozen=True)
class Decorator(Codec):
    """A codec with state. A single encode or decode has no state, so the inner ``codec`` does it."""

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise CodecError(
                f"{type(self).__name__} takes a Codec, not {self.codec!r}; pass one, or write "
                f"qccl.codecs.get('onebit+{self.name}')"
            )

    @property
    def plain(self) -> Codec:
        """The codec inside, without any decorator."""
        return self.codec.plain

    @property
    def rounds(self) -> tuple[Codec, Codec]:
        """The codecs of the inner codec's rounds, each decorated."""
        first, second = self.codec.rounds
        return replace(self, codec=first), replace(self, codec=second)

    @property
    def granule(self) -> int:
        """The granule of the inner codec."""
        return self.codec.granule

    @property
    def splittable(self) -> bool:
        """The inner codec's answer: state is kept for each element, so chunks do not change it."""
        return self.codec.splittable

    def _nbytes(self, count: int, dtype: DType) -> int:
        return self.codec._nbytes(count, dtype)

    def spec(self) -> str:
        """The inner codec's specification and the decorator's name, such as "onebit+ef"."""
        return f"{self.codec.spec()}+{self.name}"

    def kernel(self) -> Kernel:
        """The kernel of the inner codec; schedules add the state (``collectives/feedback.py``)."""
        return self.codec.kernel()

    def host(self) -> Any:
        """The kernel of the inner codec; schedules add the state (``collectives/feedback.py``)."""
        return self.codec.host()

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The bound of one call whose state is all zeros."""
        return self.codec.error_bound(x)


@dataclass(frozen=True)
class ErrorFeedback(Decorator):
    """Error feedback: the quantisation error of a call is added to the values of the next call with the same key.

    Every rank keeps the errors of the wires that it encodes: of its own values, and in an all-reduce also of its shard
    of the sum.

    Sources: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv 1901.09847; BytePS's design of gradient
    compression, "Compressor - Development API". The decay: DeMo (Peng et al. 2024, arXiv 2411.19870) and SparseLoCo
    (arXiv 2508.15706).

    Attributes:
        beta: decay of the error from one call to the next, 0 < beta <= 1; with 1 nothing is ever lost.
        dtype: element type in which errors are kept, "float32" or "bfloat16" (rounded to nearest, ties to even).
    """

    beta: float = 1.0
    dtype: str = "float32"

    name: ClassVar[str] = "ef"

    def __post_init__(self) -> None:
        super().__post_init__()
        beta = as_real(self.beta)
        if beta is None or not 0 < beta <= 1:
            raise CodecError(f"ef: beta={self.beta!r} is not possible; allowed are numbers above 0, up to 1")
        keep(self, "beta", float(beta))
        if self.dtype not in _KEPT:
            raise CodecError(f"ef: dtype={self.dtype!r} is not possible; allowed are {', '.join(_KEPT)}")
        if self.codec.state_names:
            raise CodecError(
                f"{self.codec.spec()}+ef is not possible: +ef directly follows the codec, once, and momentum follows "
                f"+ef; write {self.codec.plain.spec()}+ef+nesterov"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """The residual alone, because +ef directly follows a codec without state."""
        return ("residual",)

    def spec(self) -> str:
        """The specification with all fields that are not defaults, such as "onebit+ef:beta=0.95,dtype=bfloat16"."""
        options = [
            f"{name}={value}"
            for name in ("beta", "dtype")
            if (value := getattr(self, name)) != getattr(ErrorFeedback, name)
        ]
        return f"{super().spec()}:{','.join(options)}" if options else super().spec()


@dataclass(frozen=True)
class Momentum(Decorator):
    """Nesterov momentum of each rank's own values before encoding: ``m = mu m + x``, then ``x + mu m``.

    The optimiser must not use momentum too.

    Sources: dist-EF-SGDM (Zheng, Huang and Kwok 2019, arXiv 1905.10936); BytePS's design of gradient
    compression, "Precautions", item 4.

    Attributes:
        mu: decay of the momentum, 0 <= mu < 1.
    """

    mu: float = 0.9

    name: ClassVar[str] = "nesterov"

    def __post_init__(self) -> None:
        super().__post_init__()
        mu = as_real(self.mu)
        if mu is None or not 0 <= mu < 1:
            raise CodecError(f"nesterov: mu={self.mu!r} is not possible; allowed are numbers from 0 to below 1")
        keep(self, "mu", float(mu))
        if "momentum" in self.codec.state_names:
            raise CodecError(f"{self.codec.spec()}+nesterov is not possible: the codec has momentum already")

    @property
    def rounds(self) -> tuple[Codec, Codec]:
        """The codecs of the inner codec's rounds; the first, which encodes a rank's own values, has the momentum."""
        first, second = self.codec.rounds
        return (self, self) if first == second else (replace(self, codec=first), second)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The state of the inner codec, then "momentum"."""
        return (*self.codec.state_names, "momentum")

    def spec(self) -> str:
        """The specification with the value of mu, such as "topk:k=0.01+ef+nesterov:mu=0.9"."""
        return f"{super().spec()}:mu={self.mu}"


def feedback_of(codec: Codec) -> tuple[float, DType]:
    """The ``beta`` of a codec's error feedback, and the element type of the errors; 1 and float32 without feedback."""
    while isinstance(codec, Decorator):
        if isinstance(codec, ErrorFeedback):
            return codec.beta, _KEPT[codec.dtype]
        codec = codec.codec
    return 1.0, FLOAT32


def momentum_of(codec: Codec) -> float:
    """The ``mu`` of a codec; 0 without momentum."""
    while isinstance(codec, Decorator):
        if isinstance(codec, Momentum):
            return codec.mu
        codec = codec.codec
    return 0.0
