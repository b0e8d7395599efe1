"""Pairs of codecs for the two rounds of an all-reduce: one for the ranks' own values, the other for their sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qccl.base.dtypes import DType
from qccl.base.errors import CodecError
from qccl.codecs.base import Codec, Kernel

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TwoRounds"]


@dataclass(frozen=True)
class TwoRounds(Codec):
    """``first`` encodes the ranks' own values, ``second`` their sums in the second round, as in "trellis2/trellis4".

    A sum has more large values than each of its terms, so a sparse codec must keep more elements of it. All-reduce in
    one or two levels has two rounds, with the algorithm "two_round". All-gather, the second half of an all-reduce, uses
    ``second``. Everything else uses ``first``, also a single encode or decode.

    Raises CodecError if a part is not a codec, has a decorator (which follows the pair), or is a pair itself.
    """

    first: Codec
    second: Codec

    name: ClassVar[str] = "rounds"

    def __post_init__(self) -> None:
        for codec in (self.first, self.second):
            if not isinstance(codec, Codec) or codec.plain is not codec or codec.rounds != (codec, codec):
                raise CodecError(
                    f"{codec!r} is not possible in one round; write two codecs without decorators and what follows "
                    f"both behind them, such as 'trellis2/trellis4+ef'"
                )

    @property
    def rounds(self) -> tuple[Codec, Codec]:
        """The two codecs."""
        return self.first, self.second

    @property
    def granule(self) -> int:
        """A multiple of both granules, because the rounds divide a vector alike."""
        return math.lcm(self.first.granule, self.second.granule)

    @property
    def splittable(self) -> bool:
        """Whether both codecs are splittable."""
        return self.first.splittable and self.second.splittable

    def _nbytes(self, count: int, dtype: DType) -> int:
        return self.first._nbytes(count, dtype)

    def spec(self) -> str:
        """Both specifications, such as "trellis2/trellis4"."""
        return f"{self.first.spec()}/{self.second.spec()}"

    def kernel(self) -> Kernel:
        """The C++ type and the arguments of the first codec."""
        return self.first.kernel()

    def host(self) -> Any:
        """The kernel object of the first codec."""
        return self.first.host()

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The error bound of the first codec."""
        return self.first.error_bound(x)
